"""The verdict names what holds a run back, and its split of GPUs is near the best: on runs of the real engine in virtual time."""
from dataclasses import replace
from functools import cache

import pytest
from conftest import tiny_config
from test_simulation import Blocking, Setting, Simulation

import train
from metrics import Window
from verdict import Verdict, balanced_split, duplicates, judge, saturation

# Times in seconds; a step is about 8 samples. The servers run 16 rollouts at once, so 8 take about 0.5 s of 1 s each.
BALANCED = Setting(max_staleness=4, groups=None, max_steps=30, rows=200, length=8, row_samples=8.0, server_capacity=24, generate_s=2.05,
                   score_s=0.01, train_s=1.0, sync_s=0.02, plan_s=0.01)
RUNS = dict(
    training=replace(BALANCED, train_s=4.0),
    generation=replace(BALANCED, generate_s=6.0),
    reward=replace(BALANCED, score_s=3.0, scorers=1),
    sync=replace(BALANCED, sync_s=1.5),
    staleness=replace(BALANCED, max_staleness=1, server_capacity=None, generate_s=3.0),
    balanced=BALANCED)


class Measured(Simulation):
    """Also logs each step's window as train.py does, in virtual time."""

    def __init__(self, setting):
        super().__init__(setting)
        self.logged = []

    def shared(self, num_servers):
        shared = super().shared(num_servers)
        self.reported = Window()
        shared.metrics.put = lambda report: self.reported.merge(report[0])
        return shared

    def train(self):
        feed, config, setting = self.feed, self.feed.config, self.setting
        ahead, version = max(config.max_staleness, 1), 0
        feed.shared.allowance.value = ahead * config.token_budget
        feed.plan_ahead(train.plan_steps(config, feed, 1, config.token_budget, 1))
        for step in range(1, config.max_steps + 1):
            started = self.loop.now
            plan = self.next_plan(version)
            taken = self.loop.now
            Blocking.wait(self.loop.work(setting.train_s * self.rng.uniform(0.9, 1.1)))
            feed.window.add("perf/fwd_bwd_s", self.loop.now - taken)
            version, syncing = version + 1, self.loop.now
            Blocking.wait(self.loop.work(setting.sync_s))
            feed.shared.version.value = version
            feed.window.add("perf/weight_sync_s", self.loop.now - syncing)
            feed.shared.allowance.value = ahead * plan.raw_tokens
            feed.window.add_all(plan.metrics | {"perf/step_s": self.loop.now - started})
            feed.window.merge(self.reported.drain())
            self.logged.append((step, feed.window.result()))
        feed.stop()

    def check_the_end(self):
        """The account is another test's."""


@cache
def run_of(setting):
    """(verdicts of each step, samples trained a second over the second half)."""
    run = Measured(setting).run()
    verdict = Verdict(run.feed.config)
    verdicts = [verdict.judge(step, metrics) for step, metrics in run.logged]
    late = [metrics for _, metrics in run.logged[len(run.logged) // 2:]]
    return verdict, verdicts, sum(m["batch/samples_per_step"] for m in late) / sum(m["perf/step_s"] for m in late)


@pytest.mark.parametrize("bound", RUNS)
def test_a_run_is_named_by_what_holds_it_back(bound):
    verdict, verdicts, _ = run_of(RUNS[bound])
    named = [one["verdict/bound"] for one in verdicts[10:]]          # once the pipeline is full and the cap has settled
    assert named.count(bound) >= 0.7 * len(named), named
    lost = sum(one["verdict/lost_frac"] for one in verdicts[10:]) / len(named)
    assert lost < 0.25 if bound == "balanced" else lost > 0.4
    words = dict(training="the trainer more GPUs", generation="the servers more GPUs", reward="make the reward functions faster",
                 sync="raise weight_sync_steps=1", staleness="raise max_staleness=1", balanced="nothing to change")[bound]
    assert words in next(one for one in verdicts[::-1] if one["verdict/bound"] == bound)["verdict/advice"]
    sentence, = verdict.summary()
    assert sentence.startswith(bound if bound == "balanced" else f"{bound}-bound")


GPUS = 16


def with_servers(base, gpus):
    """`base`, in which 8 GPUs train, with `gpus` of 16 for the servers: each has room for 3 rollouts, and training divides over the others."""
    return replace(base, server_capacity=round(3 * gpus), train_s=base.train_s * 8 / (GPUS - gpus))


@pytest.mark.parametrize("generate_s", [1.0, 5.0])
def test_the_split_of_gpus_suggested_from_another_trains_within_10_percent_of_the_best_of_a_sweep(generate_s):
    base = replace(BALANCED, generate_s=generate_s, max_steps=60)
    sweep = {gpus: run_of(with_servers(base, gpus)) for gpus in range(2, GPUS, 2)}
    best = max(speed for _, _, speed in sweep.values())
    for now, (_, verdicts, speed) in list(sweep.items())[::2]:
        last = next(one for one in verdicts[:-11:-1] if "verdict/server_ratio" in one)       # at a split near the best some windows ask for a larger max_staleness instead
        suggested = balanced_split(last, now, GPUS - now)
        after = run_of(with_servers(base, suggested))[2]
        assert after >= 0.9 * best and (speed < 0.6 * best or 2 < now < 14), (now, suggested, speed / best, after / best)


def judged(config=None, **metrics):
    """The verdict on one step of 10 s."""
    window = {"perf/step_s": 10.0} | {name.replace("__", "/"): value for name, value in metrics.items()}
    return judge([(1, window)], tiny_config(**config or {}))


def test_shares_are_times_over_the_time_of_the_window():
    """2 s of waiting in a step of 10 s and 6 s in one of 30 s: 8 of 40. Two syncs of 6 s in four steps of 10 s: 12 of 40."""
    windows = [(1, {"perf/step_s": 10.0, "perf/rollout_wait_s": 2.0}), (1, {"perf/step_s": 30.0, "perf/rollout_wait_s": 6.0, "perf/weight_sync_s": 4.0})]
    both = judge(windows, tiny_config(weight_sync_steps=2))
    assert both["verdict/bound"] == "generation" and both["verdict/lost_frac"] == pytest.approx(8 / 40)
    sparse = Verdict(tiny_config(weight_sync_steps=2, logging_steps=4))
    assert sparse.judge(4, {"perf/step_s": 10.0, "perf/weight_sync_s": 6.0})["verdict/lost_frac"] == pytest.approx(2 * 6 / 40)


def test_held_back_time_is_the_mean_wait_times_the_number_of_waits():
    held = judged(rollout__backpressure_s=1.5, rollout__backpressure_count=4)
    assert held["verdict/bound"] == "training" and held["verdict/lost_frac"] == pytest.approx(0.6)


def test_the_servers_share_is_their_load_to_the_trainers():
    """Half of the KV cache's usual 0.7 while the trainer is busy 0.8 of the time."""
    one = judged(rollout__vllm_kv_cache_usage_frac=0.35, rollout__concurrency=10, rollout__concurrency_cap=100, perf__rollout_wait_s=0.5,
                 perf__weight_sync_s=1.5, rollout__backpressure_s=8.0, rollout__backpressure_count=1)
    assert one["verdict/bound"] == "training" and one["verdict/server_ratio"] == pytest.approx(0.5 / 0.8)
    assert balanced_split(one, 8, 8) == pytest.approx(16 * 5 / 13)
    assert balanced_split(judged(), 8, 8) is None, "without /metrics nothing is known of the servers' load"


@pytest.mark.parametrize("metrics,words", [
    (dict(frac_reward_zero_std=0.75), "75% of the groups have equal rewards"),
    (dict(rollout__concurrency=500, rollout__concurrency_cap=512, rollout__vllm_kv_cache_usage_frac=0.2), "raise max_concurrent_rollouts=512"),
    (dict(rollout__concurrency=40, rollout__concurrency_cap=41, rollout__vllm_kv_cache_usage_frac=0.7), "give the servers more GPUs: about 2 times"),
    (dict(rollout__concurrency=40, rollout__concurrency_cap=400), "40 of at most 400 rollouts are in flight")])
def test_a_waiting_trainer_is_told_which_limit_holds_generation_back(metrics, words):
    verdict = judged(perf__rollout_wait_s=5.0, **metrics)
    assert verdict["verdict/bound"] == "generation" and verdict["verdict/advice"].startswith(words)


def test_the_first_window_with_the_start_of_everything_in_it_does_not_colour_later_ones():
    verdict = Verdict(tiny_config())
    assert verdict.judge(1, {"perf/step_s": 100.0, "perf/rollout_wait_s": 90.0})["verdict/lost_frac"] == 0.9
    assert verdict.judge(2, {"perf/step_s": 10.0})["verdict/bound"] == "balanced"
    assert verdict.judge(3, {"perf/step_s": 30.0, "perf/rollout_wait_s": 20.0})["verdict/lost_frac"] == 0.5
    sentence, = verdict.summary()
    assert sentence.startswith("generation-bound for 75% of the time, 50% of it lost; ")


def test_a_run_without_times_has_no_verdict():
    verdict = Verdict(tiny_config())
    assert verdict.judge(1, {"reward": 1.0}) == {} and verdict.summary() == []


def history(**columns):
    return [{name.replace("__", "/"): value for name, value in zip(columns, values) if value is not None} for values in zip(*columns.values())]


@pytest.mark.parametrize("diagnosis,columns", [
    ("healthy", dict(frac_reward_zero_std=[0.3, 0.2, 0.3], reward_dropped=[0.9, 0.1, 0.5], reward=[0.2, 0.4, 0.6])),
    ("saturating at the top", dict(frac_reward_zero_std=[0.2, 0.5, 0.8], reward_dropped=[0.5, 0.9, 1.0], reward=[0.5, 0.8, 0.95])),
    ("stuck at the bottom", dict(frac_reward_zero_std=[0.9, 0.9, 0.9], reward_dropped=[0.0, 0.0, 0.0], reward=[0.02, 0.02, 0.02])),
    ("regression", dict(frac_reward_zero_std=[0.3, 0.5, 0.8], reward_dropped=[0.9, 0.5, 0.1], reward=[0.7, 0.5, 0.2])),
    ("a mix", dict(frac_reward_zero_std=[0.8, 0.8, 0.8], reward_dropped=[0.5, 0.5, 0.5], reward=[0.5, 0.5, 0.5])),
    ("no dropped group has a reward", dict(frac_reward_zero_std=[1.0], reward_dropped=[None], reward=[None]))])
def test_the_saturation_table(diagnosis, columns):
    assert saturation(history(**columns))[0].startswith(diagnosis)


def test_saturation_is_read_against_the_range_of_the_reward():
    stuck = history(frac_reward_zero_std=[0.9], reward_dropped=[-0.8], reward=[-0.8])
    assert saturation(stuck, (-1, 1))[0].startswith("stuck") and saturation(stuck, (-4, -0.5))[0].startswith("saturating")


@pytest.mark.parametrize("a,b,reward,diagnosis", [
    ([0.5, 0.0], [0.5, 1.0], 1.0, "a mix"), ([0.9, 1.0], [0.9, 1.0], 2.0, "saturating"), ([0.9, 1.0], [-0.2, 0.0], 1.0, "saturating"),
    ([1.0, 1.0], [1.0, 1.0], 1.0, "saturating")], ids=["one of two is always right", "both are", "the other is a penalty", "each has rollouts of its own"])
def test_the_top_of_a_sum_of_rewards_is_the_number_of_those_that_add_up_to_it(a, b, reward, diagnosis):
    means = {f"rewards__{name}__mean": values for name, values in dict(a=a, b=b).items()}
    both = history(frac_reward_zero_std=[0.9, 0.9], reward_dropped=[reward] * 2, reward=[reward] * 2, **means)
    assert saturation(both)[0].startswith(diagnosis)


@pytest.mark.parametrize("named", [True, False], ids=["a reward function's", "the rollouts' own"])
@pytest.mark.parametrize("dropped,diagnosis", [(-0.02, "saturating"), (-0.5, "a mix"), (-0.99, "stuck")])
def test_the_top_of_a_reward_that_is_never_above_0_is_0(named, dropped, diagnosis):
    """It was 1, so that a reward in [-1, 0] could not read as saturated."""
    reward = [-1.0, -0.6, -0.3, -0.02]
    columns = dict(frac_reward_zero_std=[0.1, 0.4, 0.7, 0.9], reward_dropped=[dropped] * 4, reward=reward) | (dict(rewards__penalty__mean=reward) if named else {})
    assert saturation(history(**columns))[0].startswith(diagnosis)


def test_beside_a_reward_that_was_never_given_a_small_penalty_is_no_top():
    columns = dict(frac_reward_zero_std=[0.9] * 3, reward_dropped=[-0.02] * 3, reward=[-0.2, -0.1, -0.1], rewards__right__mean=[0.0] * 3, rewards__long__mean=[-0.2, -0.1, -0.1])
    assert saturation(history(**columns))[0].startswith("stuck")


@pytest.mark.parametrize("diagnosis,repeated,entropy", [
    ("healthy", [0.02, 0.03, 0.02], [1.0, 1.0, 1.0]), ("sampling is no longer random", [0.0, 0.875, 0.875], [1.0, 1.0, 1.0]),
    ("collapse", [0.0, 0.1, 0.3], [1.0, 0.6, 0.3]), ("some rollouts repeat", [0.2, 0.2, 0.2], [1.0, 1.0, 1.0])])
def test_the_duplicates_table(diagnosis, repeated, entropy):
    assert duplicates(history(completions__duplicate_frac=repeated, entropy=entropy), 8)[0].startswith(diagnosis)
