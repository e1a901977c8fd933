"""What holds a run back, from measured waits, and what its rewards say of saturation: the specification's tables as code.

A verdict is over the last few logged windows, since a wait is recorded when it ends. The trainer's time is training, waiting for
samples, and weight syncs; generation's lost time is what `max_staleness` held it back. Rules, in this order:

    sync        a fifth of the time or more goes to weight syncs, and more than to waiting for samples
    generation  the trainer waits, and the servers carry as many rollouts as the cap allows
    reward      the trainer waits, and a group takes longer to be scored than a rollout to be generated
    staleness   both wait: the rollouts in flight fill max_staleness before their samples reach the queue
    generation  the trainer waits, for any other reason
    training    generation waits, and the servers are less loaded than the trainer by a fifth
    balanced    neither does, or what one side waits the other would soon wait with a GPU moved
"""
from collections import Counter, deque

from config import Config, interval

LOST = 0.1               # share of the time from which a wait counts
FULL = 0.7               # KV cache usage of servers that have all they can take: the cap on rollouts keeps it between 0.6 and 0.8
WINDOWS = 10             # over 5, noise put 2 of 39 suggested splits more than 10 % under the best of a sweep; over 10, none


class Verdict:
    """Takes each logged window and judges the last few; `summary` judges the run."""

    def __init__(self, config: Config):
        self.config, self.last_step, self.windows, self.judged, self.starting = config, 0, deque(maxlen=WINDOWS), [], True

    def judge(self, step: int, metrics: dict[str, float]) -> dict[str, float | str]:
        """The `verdict/*` metrics of the window that ends at `step`; {} without the times of a step."""
        if not metrics.get("perf/step_s"):
            return {}
        steps, self.last_step = min(step - self.last_step, interval(self.config.logging_steps, self.config.max_steps)) or 1, step
        if self.starting and self.judged:    # the first window has the start of everything in it: it counts only while it is the only one
            self.starting = False
            self.windows.clear()
            self.judged.clear()
        self.windows.append((steps, metrics))
        verdict = judge(self.windows, self.config)
        self.judged.append((verdict, metrics["perf/step_s"] * steps))
        return verdict

    def summary(self) -> list[str]:
        """Sentences for the end of a run: what held it back for most of the time, and what to change."""
        time_of = Counter()
        for verdict, seconds in self.judged:
            time_of[verdict["verdict/bound"]] += seconds
        if not time_of:
            return []
        bound, most = time_of.most_common(1)[0]
        of_bound = [(verdict, seconds) for verdict, seconds in self.judged if verdict["verdict/bound"] == bound]
        lost = sum(verdict["verdict/lost_frac"] * seconds for verdict, seconds in of_bound) / most
        return [f"{name_of(bound)} for {most / time_of.total():.0%} of the time, {lost:.0%} of it lost; {of_bound[-1][0]['verdict/advice']}"]


def name_of(bound: str) -> str:
    return bound if bound == "balanced" else f"{bound}-bound"


def judge(windows, config: Config) -> dict[str, float | str]:
    """windows: (steps, metrics) of each -> `verdict/*`."""
    def total(name, steps_of=lambda steps, metrics: steps):
        return sum(steps_of(steps, metrics) * (metrics.get(name) or 0) for steps, metrics in windows)

    def mean(name):
        values = [metrics[name] for _, metrics in windows if metrics.get(name) is not None]
        return sum(values) / len(values) if values else None
    time = total("perf/step_s")         # and these are shares of it
    waiting = total("perf/rollout_wait_s") / time
    syncing = total("perf/weight_sync_s", lambda steps, _: max(steps / config.weight_sync_steps, 1)) / time
    held = min(total("rollout/backpressure_s", lambda _, metrics: metrics.get("rollout/backpressure_count", 0)) / time, 1)
    scoring = sum(mean(f"rollout/{name}") or 0 for name in ("score_s", "score_wait_s", "score_block_s"))
    running, cap, usage = mean("rollout/concurrency") or 0, mean("rollout/concurrency_cap") or config.max_concurrent_rollouts, mean("rollout/vllm_kv_cache_usage_frac")
    full, training = running >= 0.9 * cap, max(1 - waiting - syncing, 0.01)
    load = None if usage is None else 1.0 if full else min(max(usage / FULL, running / cap), 1.0)
    ratio = None if load is None else load / training
    if syncing >= max(2 * LOST, waiting):
        bound, lost = "sync", syncing
    elif waiting >= LOST:
        slow_reward = not full and scoring > (mean("rollout/duration_s") or 0)
        bound, lost = "reward" if slow_reward else "staleness" if held >= LOST and not full else "generation", waiting
    else:
        idle = held if load is None else min(held, 1 - load)
        bound, lost = "training" if held >= LOST and (ratio is None or ratio < 1 - 2 * LOST) else "balanced", max(idle, waiting)
    advice = dict(
        sync=lambda: f"raise weight_sync_steps={config.weight_sync_steps}" + " or use a faster weight_sync_backend" * (config.weight_sync_backend == "disk"),
        reward=lambda: f"scoring a group takes {scoring:.2g} s with its waiting: make the reward functions faster, or async, to score groups at once",
        staleness=lambda: f"raise max_staleness={config.max_staleness}: rollouts in flight fill it before their samples reach the queue",
        generation=lambda: faster_generation(config, mean("frac_reward_zero_std") or 0, running, cap, usage, ratio),
        training=lambda: "give the trainer more GPUs" + split_in_words(ratio),
        balanced=lambda: "nothing to change")[bound]()
    verdict = {"verdict/bound": bound, "verdict/lost_frac": lost, "verdict/advice": advice}
    return verdict if ratio is None or bound in ("reward", "staleness") else verdict | {"verdict/server_ratio": ratio}


def faster_generation(config: Config, silent: float, running: float, cap: float, usage: float | None, ratio: float | None) -> str:
    """What to change first when the trainer waits for generation."""
    if silent >= 0.5:
        return f"{silent:.0%} of the groups have equal rewards and are dropped: change the prompts or the reward"
    if running >= 0.9 * config.max_concurrent_rollouts and (usage is None or usage < 0.6):
        return f"raise max_concurrent_rollouts={config.max_concurrent_rollouts}: it limits what is in flight"
    if running >= 0.9 * cap:
        return "give the servers more GPUs" + split_in_words(ratio)
    return f"{running:.0f} of at most {cap:.0f} rollouts are in flight: look at the servers, long rollouts and slow tools"


def split_in_words(ratio: float | None) -> str:
    return f": about {ratio:.2g} times as many server GPUs for each trainer GPU as now" if ratio else ""


def balanced_split(verdict: dict, server_gpus: int, trainer_gpus: int) -> float | None:
    """How many of all the GPUs the servers should have; None where their load is not known."""
    ratio = verdict.get("verdict/server_ratio")
    if ratio is None:
        return None
    weighed = server_gpus * ratio
    return (server_gpus + trainer_gpus) * weighed / (weighed + trainer_gpus)


# Saturation: the policy learns from groups whose rewards differ

def trend(records: list[dict], name: str) -> tuple[float, float] | None:
    """Means of the first and of the last third of what was logged."""
    values = [record[name] for record in records if record.get(name) is not None]
    third = max(len(values) // 3, 1)
    return (sum(values[:third]) / third, sum(values[-third:]) / third) if values else None


def sources(records: list[dict]) -> int:
    """How many reward functions and environments, of up to 1 each, add up to a rollout's reward: 1 where each scores rollouts of its own.

    A penalty, at times below 0 and never above, is none of them: of penalties alone the best reward is 0.
    """
    last = next((record for record in reversed(records) if record.get("reward") is not None), {})
    means = {name: value for name, value in last.items() if name.startswith("rewards/") and name.endswith("/mean") and value is not None}
    together = means and abs(sum(means.values()) - last["reward"]) <= 0.01
    seen = [[record[name] for record in records if record.get(name) is not None] for name in means or ["reward"]]
    count = sum(max(values, default=0) > 0 or min(values, default=0) >= 0 for values in seen)
    return count if together else min(count, 1)


def saturation(records: list[dict], reward_range: tuple[float, float] | None = None) -> tuple[str, str]:
    """(diagnosis, what to do). `reward_range`: the reward's lowest and highest value; None: what was seen, and at least 0 to the number of `sources`."""
    silent, dropped, reward = (trend(records, name) for name in ("frac_reward_zero_std", "reward_dropped", "reward"))
    if silent is None or silent[1] < 0.5 and silent[1] - silent[0] < 0.2:
        return "healthy: most groups produce a gradient", "nothing"
    if dropped is None or reward is None:
        return "no dropped group has a reward: every reward function returned None", "check the reward functions and their columns"
    seen = [record[name] for record in records for name in ("reward", "reward_kept", "reward_dropped") if record.get(name) is not None]
    low, high = reward_range or (min(seen + [0.0]), max([*seen, sources(records)]))
    place, falls = (dropped[1] - low) / (high - low or 1.0), 0.1 * (high - low)
    if reward[0] - reward[1] > falls and dropped[0] - dropped[1] > falls:
        return "regression: groups that used to pass now fail together", "check completions/duplicate_frac and entropy for a collapse"
    if place > 0.8:
        return "saturating at the top: the prompts have become too easy", "stop the run, or move to harder prompts"
    if place < 0.2:
        return "stuck at the bottom: the prompts are too hard, or the reward never gives credit", "check completions/clipped_ratio, then read a few completions"
    return "a mix: some prompts are too easy and others too hard, or groups share a partial score", "read the rollouts"


def duplicates(records: list[dict], num_generations: int) -> tuple[str, str]:
    """(diagnosis, what to do) from completions/duplicate_frac and entropy."""
    repeated, entropy = trend(records, "completions/duplicate_frac"), trend(records, "entropy")
    if repeated is None or repeated[1] < 0.1:
        return "healthy: the rollouts of a group are sampled independently", "nothing"
    if repeated[1] > 0.8 * (num_generations - 1) / num_generations:
        return "sampling is no longer random: a group is copies of one rollout", "check temperature and the servers' seeds"
    if entropy and repeated[1] > repeated[0] + 0.05 and entropy[1] < 0.8 * entropy[0]:
        return "collapse: the policy converges onto one answer a prompt", "raise temperature or learn more slowly, unless the task is solved"
    return "some rollouts repeat, as short completions do by chance", "nothing while it does not climb"
