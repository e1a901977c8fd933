"""What the rollout process reports of a group: once it is generated, and once it is scored."""
import numpy as np

from metrics import Window
from tools import drift, ended


def record_rollouts(metrics: Window, config, eos_token_ids: list[int], rollouts: list, sequences: list[list]) -> None:
    """Of generated rollout.Rollouts and the samples of each; lengths count generated tokens."""
    lengths = [sum(len(turn.output_ids) for turn in r.turns) for r in rollouts]
    whole = [bool(r.turns) and ended(r.turns[-1].output_ids, eos_token_ids) for r in rollouts]
    for kind, values in (("", lengths), ("terminated_", [n for n, e in zip(lengths, whole) if e])):
        for part in ("mean", "min", "max"):
            metrics.add_each(f"completions/{part}_{kind}length", values)
    metrics.add_each("completions/clipped_ratio", [not e for e in whole])
    seen = [tuple(tuple(turn.output_ids) for turn in r.turns) for r in rollouts]
    metrics.add_each("completions/duplicate_frac", [key in seen[:i] for i, key in enumerate(seen)])
    metrics.add_each("rollout/turns_mean", [len(r.turns) for r in rollouts])
    metrics.add_each("rollout/turns_max", [len(r.turns) for r in rollouts])
    metrics.add_each("rollout/samples_per_rollout", [len(samples) for samples in sequences])
    drifts = [count for r in rollouts for count in drift(r.turns)]
    metrics.add_each("rollout/fork_frac", [count > 0 for count in drifts])
    for kind in ("mean", "max"):
        metrics.add_each(f"rollout/drift_tokens_{kind}", drifts)
    if config.tools or config.environment_factory:
        metrics.add_each("tools/call_frequency", [r.tool_call_count for r in rollouts])
        calls = sum(r.tool_call_count for r in rollouts)
        metrics.add("tools/failure_frequency", sum(r.tool_failure_count for r in rollouts) / max(calls, 1), calls)


def record_rewards(metrics: Window, rewards: np.ndarray, scored: np.ndarray, weights: list[int], names: list[str], by_source: np.ndarray, kept: bool) -> None:
    """rewards (G,), NaN where none; scored (G,) bool: with a reward and a trained token; weights (G,): samples of each; by_source (sources, G); kept: it is trained."""
    for name, values in zip(names, by_source, strict=True):
        metrics.add_each(f"rewards/{name}/mean", values)
    given = rewards[~np.isnan(rewards)]
    metrics.add_each("reward", given)
    metrics.add("frac_reward_zero_std", float(not kept))
    if not kept:
        metrics.add_each("reward_dropped", given)
        return
    for reward, weight in zip(rewards, weights):
        metrics.add("reward_kept", reward, weight)
    metrics.add("reward_group_std", rewards[scored].std(), sum(weights))
    for name, values in zip(names, by_source):
        if not np.isnan(values).all():
            metrics.add(f"rewards/{name}/group_std", np.nanstd(values), sum(weights))
