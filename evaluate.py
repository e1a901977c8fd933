"""Evaluation beside training: on the same servers, by the rollout process, in a 24th of the rollout slots.

Nothing waits for it, so the servers may take new weights before it ends: it is pinned to one model version where it fits between two
syncs (and at the end of a run, when no sync follows). Every completion is written with the versions that sampled it, and
`eval/model_version_min` and `_max` say whether they are one.
"""
import asyncio
import json
import math
import time
from contextvars import ContextVar
from itertools import count
from pathlib import Path

import numpy as np

from metrics import Window

SLOTS = 24               # one in so many: where generation holds training back, that is what an evaluation costs at most
evaluating: ContextVar[tuple[dict, count | None, Window | None]] = ContextVar("evaluating", default=({}, None, None))
"""Of the evaluation that a task belongs to: sampling parameters that differ, seeds, metrics."""


async def evaluate_when_asked(loop) -> None:
    """Run the evaluations that the trainer asks a rollout.AsyncRolloutLoop for, one after the other, for ever."""
    while len(loop.eval_dataset):
        asked = loop.shared.evaluate.value
        if asked != loop.shared.evaluated.value:
            await evaluate(loop, asked - 1)
            loop.shared.evaluated.value = asked
        await asyncio.sleep(0.1)


async def evaluate(loop, step: int) -> None:
    """Sample and score eval_num_generations replies to each prompt; all go to output_dir/eval/step_<step>.jsonl, their means to the log."""
    started, window, slots = time.monotonic(), Window(), asyncio.Semaphore(max(loop.cap.limit // SLOTS, 1))
    async with asyncio.TaskGroup() as tasks:
        groups = [tasks.create_task(_evaluate_prompt(loop, slots, index, loop.eval_dataset[index], window)) for index in range(len(loop.eval_dataset))]
    records = [record for group in groups for record in group.result()]
    if records:
        window.add_all({"model_version_min": min(record["model_version"] for record in records),
                        "model_version_max": max(record["max_version"] for record in records)})
    window.add_all({"step": step, "completions_count": len(records), "duration_s": time.monotonic() - started})
    path = Path(loop.config.output_dir) / "eval" / f"step_{step}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text("".join(json.dumps(record) + "\n" for record in records))
    partial.rename(path)
    loop.shared.metrics.put(({f"eval/{name}": [value, 1.0] for name, value in window.result().items()}, []))


async def _evaluate_prompt(loop, slots: asyncio.Semaphore, index: int, row: dict, window: Window) -> list[dict]:
    """One prompt's completions as they are written; those that fail are left out, as in training."""
    config, n = loop.config, loop.config.eval_num_generations
    prompts = [json.loads(json.dumps(row.get("prompt") or [])) for _ in range(n)]
    results = await asyncio.gather(*(_evaluate_rollout(loop, slots, prompt, row, (index * n + i) * 1000, window) for i, prompt in enumerate(prompts)))
    pairs = [(prompt, result) for prompt, result in zip(prompts, results) if not isinstance(result, BaseException) and result.turns]
    if not pairs:
        return []
    rollouts = [rollout for _, rollout in pairs]
    columns = {name: [value] * len(pairs) for name, value in row.items() if name != "prompt"}
    names, by_source, rewards = await loop.sum_rewards([prompt for prompt, _ in pairs], [r.completion for r in rollouts], [r.completion_ids for r in rollouts],
                                                       columns, [r.env_reward for r in rollouts], [r.reward for r in rollouts])
    lengths = [sum(len(turn.output_ids) for turn in r.turns) for r in rollouts]
    window.add_each("reward", rewards)
    for name, values in zip(names, by_source):
        window.add_each(f"rewards/{name}/mean", values)
    for part in ("mean", "min", "max"):
        window.add_each(f"completions/{part}_length", lengths)
    window.add_each("completions/clipped_ratio", [r.turns[-1].output_ids[-1:] != [] and r.turns[-1].output_ids[-1] not in loop.eos_token_ids for r in rollouts])
    scored = rewards[~np.isnan(rewards)]         # one that no source scores passed as little as it failed
    for k in (k for k in (1, 2, 4, 8, 16, 32, 64, 128, 256) if k <= len(scored)):
        window.add(f"pass@{k}", pass_at(k, len(scored), int((scored >= 1).sum())))
    return [dict(index=index, prompt=prompt, completion=r.completion, reward=None if math.isnan(reward) else float(reward), length=length,
                 model_version=min(turn.model_version for turn in r.turns), mean_version=float(np.mean([turn.mean_version for turn in r.turns])), max_version=max(turn.max_version for turn in r.turns))
            for (prompt, r), reward, length in zip(pairs, rewards, lengths)]


async def _evaluate_rollout(loop, slots: asyncio.Semaphore, prompt: list[dict], row: dict, seed: int, window: Window):
    """A rollout with evaluation's sampling parameters and seeds: the same at every evaluation, and none of training's."""
    async with slots:
        evaluating.set((loop.config.eval_sampling or {}, count((loop.config.seed % 2**23 << 40) + 2**39 + seed), window))
        loop.servers.choose(loop.groups_at)
        loop.generating += 1                     # it takes a slot from training
        return await loop._run_rollout(prompt, -1, row)


def pass_at(k: int, n: int, passed: int) -> float:
    """The chance that of k out of n completions one passes (its reward is at least 1), unbiased (arXiv 2107.03374)."""
    return 1.0 - math.comb(n - passed, k) / math.comb(n, k)
