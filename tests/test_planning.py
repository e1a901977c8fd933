"""Steps planned one ahead, in a thread: what is trained, what is counted, and what generation may do are as if planned when needed."""
import itertools
import math
import os
import queue
import signal
import threading
import time
import traceback
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import make_sample, random_group, tiny_config, until

import feed as feed_module
import planning
from config import ConfigError
from feed import RolloutFeed
from metrics import Window
from packing import plan_micro_batch
from rollout import AsyncRolloutLoop
from planning import due, plan_steps

BUDGET = 60


@pytest.fixture
def make_feed():
    """A feed whose samples the test puts into the queue itself: no rollout process."""
    feeds = []

    def make(samples=(), allowance=0, **changes):
        made = RolloutFeed(tiny_config(**changes), [], 128, Window())
        made.shared.heartbeat.value, made.shared.allowance.value = math.inf, allowance
        put(made, samples)
        feeds.append(made)
        return made
    yield make
    for made in feeds:
        made.stop()
        made.shared.samples.cancel_join_thread()


def put(feed, samples):
    for sample in samples:
        feed.shared.samples.put(sample)


def plan_ahead(feed, world_size=1, budget=BUDGET):
    feed.plan_ahead(plan_steps(feed.config, feed, world_size, budget, 1))


def taken(feed, train=lambda plan: None):
    """Every plan, as the loop takes them: train, then raise the version when a sync is due."""
    for step in itertools.count(1):
        plan = feed.next_plan()
        if plan is None:
            return
        assert plan.version == feed.version
        train(plan)
        if step % feed.config.weight_sync_steps == 0:
            feed.shared.version.value += 1
        yield plan


def trained_samples(plan):
    """What identifies a plan's samples, in the order of its rows."""
    return [[(int(row.num_samples), row.input_ids.tolist(), row.advantages.tolist()) for row in share.rows] for share in plan.shares]


def stream(seed, groups=40, versions=8):
    """Groups of 4 with shared prompts, generated at slowly rising versions with older ones mixed in."""
    rng = np.random.default_rng(seed)
    return [replace(sample, version=max(0, int(g * versions / groups - rng.integers(0, 4)))) for g in range(groups)
            for sample in random_group(rng, g, list(rng.integers(0, 37, 8)), 4, 9)]


def planned_when_needed(config, samples, world_size):
    """A reference without a thread or a queue -> (rows of samples a micro-batch, drops while filling) of each step."""
    waiting, steps = list(samples), []
    for step in itertools.count():
        version, batch, dropped = step // config.weight_sync_steps, [], 0

        def young():
            nonlocal dropped
            while waiting:
                sample = waiting.pop(0)
                if version - sample.version > config.max_staleness:
                    dropped += 1
                else:
                    yield sample
        for _ in range(config.gradient_accumulation_steps):
            rows, left_over = plan_micro_batch(young(), world_size, BUDGET)
            if left_over is not None:
                waiting.insert(0, left_over)
            if any(rows):
                batch.append(rows)
        steps.append((version, batch, dropped))
        if not batch:
            return steps


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("world_size,changes", [(1, dict(max_staleness=1)), (2, dict(max_staleness=0, gradient_accumulation_steps=2)),
                                                (1, dict(max_staleness=2, weight_sync_steps=3)), (2, dict(max_staleness=1, weight_sync_steps=2))])
def test_the_same_samples_train_in_the_same_order_and_the_same_are_too_old_as_when_planned_at_the_step(make_feed, seed, world_size, changes):
    """Also counted in the same step, the drops after the last step included; ages are those at training."""
    samples = stream(seed)
    feed = make_feed([*samples, None], **changes)
    wanted = planned_when_needed(feed.config, samples, world_size)
    plan_ahead(feed, world_size)
    got, drops = [], []
    for plan in taken(feed):
        got.append(plan)
        drops.append(feed.window.result().get("sample/dropped_stale_count", 0))
    drops.append(feed.window.result().get("sample/dropped_stale_count", 0))
    assert drops == [dropped for _, _, dropped in wanted] and sum(drops) > 0
    for plan, (version, batch, _) in zip(got, wanted[:-1], strict=True):
        assert trained_samples(plan) == trained_samples(planning.make_step(feed.config, batch, version, BUDGET))
        ages = [version - sample.version for rows in batch for row in rows for sample in row]
        assert plan.metrics["sample/staleness_max"] == (max(ages), 1) and max(ages) <= feed.config.max_staleness
        assert plan.metrics["sample/staleness_mean"] == (pytest.approx(np.mean(ages)), len(ages)) and plan.num_samples == len(ages)


def sized(n, group_id=0, **changes):
    """A sample of n tokens that shares none with those of other groups."""
    return replace(make_sample([group_id % 37, *range(n - 1)], 1, group_id), **changes)


@pytest.fixture
def clock(monkeypatch):
    """The feed's time in seconds, in a list of one: it passes when the test says so."""
    seconds = [0.0]
    monkeypatch.setattr(feed_module, "time", SimpleNamespace(monotonic=lambda: seconds[0]))
    return seconds


def once_the_loop_waits(feed, work):
    """Do `work` in a thread, after the loop has asked for a plan."""
    threading.Thread(target=lambda: (until(lambda: feed.asked_at < math.inf), work()), daemon=True).start()


def test_a_sample_young_enough_when_drawn_but_not_when_its_step_starts_is_dropped(make_feed):
    """Both are of version 0 and in the queue before step 1; step 2 starts at version 1."""
    feed = make_feed([sized(BUDGET, 0), sized(BUDGET, 1), sized(BUDGET, 2, version=1), None], max_staleness=0)
    plan_ahead(feed)
    assert feed.next_plan().last_group == 0
    until(feed.planned.done)
    assert feed.version == 0 and "sample/dropped_stale_count" not in feed.window.values     # not the loop's until it takes the plan
    plan = feed.next_plan()
    assert (plan.last_group, plan.version, plan.metrics["sample/staleness_max"]) == (2, 1, (0, 1))
    assert feed.window.result()["sample/dropped_stale_count"] == 1


def test_a_left_over_sample_that_grew_too_old_for_the_next_step_is_dropped(make_feed):
    feed = make_feed([sized(40, 0), sized(40, 1), sized(40, 2, version=1), None], max_staleness=0)
    plan_ahead(feed)
    assert [plan.last_group for plan in taken(feed)] == [0, 2]


def test_planning_and_packing_happen_while_the_step_before_trains_and_exactly_one_step_ahead(make_feed, monkeypatch, clock):
    """Packing takes 10 s: only the first step waits for it, and no wait for packing is blamed on the queue."""
    packed, asked, pack_row = [], threading.Event(), planning.pack_row

    def slow(samples, multiple):
        asked.wait(60)                                          # the first: the loop waits while it is packed
        clock[0] += 10.0
        packed.append(samples)
        return pack_row(samples, multiple)
    monkeypatch.setattr(planning, "pack_row", slow)
    feed = make_feed([*(sized(BUDGET, g) for g in range(6)), None])
    plan_ahead(feed)
    once_the_loop_waits(feed, asked.set)
    for step in range(1, 5):
        before = clock[0]
        assert feed.next_plan().last_group == step - 1 and len(packed) >= step
        assert step > 1 or clock[0] > before
        until(feed.planned.done)                                # while the loop trains
        time.sleep(0.1)
        assert len(packed) == step + 1
    assert feed.window.result()["perf/rollout_wait_s"] == 0


def test_the_wait_is_the_loops_and_only_for_samples_not_the_threads(make_feed, clock):
    """The second step's samples come 60 s after the first step starts, which takes 40 s: the loop waited 20 s, the thread 60."""
    feed = make_feed([sized(BUDGET, 0), sized(BUDGET, 1)])
    plan_ahead(feed)
    feed.next_plan()
    feed.window.result()
    looked, receive = threading.Event(), feed._receive
    feed._receive = lambda: (looked.set(), receive())[1]
    assert looked.wait(60)                                      # the thread waits since 0
    clock[0] = 40.0

    def close_the_step():
        clock[0] = 60.0
        put(feed, [sized(BUDGET, 2)])
    once_the_loop_waits(feed, close_the_step)
    feed.next_plan()
    assert feed.window.result()["perf/rollout_wait_s"] == 20.0


def test_samples_drawn_ahead_still_count_as_waiting_in_the_queue(make_feed):
    """Ten steps of one sample lie ready: the first step finds 10 waiting; the second 8, since the first drew one to know that it was full."""
    feed = make_feed(sized(BUDGET, g) for g in range(10))
    until(lambda: feed.shared.samples.qsize() == 10)
    plan_ahead(feed)
    for waiting in (10, 8, 7):
        until(feed.planned.done)
        feed.next_plan()
        assert feed.window.result()["rollout/queue_size"] == waiting


def test_time_in_queue_counts_to_the_step_not_to_its_planning(make_feed):
    feed = make_feed([sized(BUDGET // 2, 0, queued_at=100.0), sized(BUDGET // 2, 1, queued_at=104.0), None])
    plan_ahead(feed)
    assert feed.next_plan().queued_at == 102.0


# The allowance

class Producer(threading.Thread):
    """Submits groups under the rollout loop's own rule for starting one."""

    def __init__(self, feed, groups):
        super().__init__(daemon=True)
        self.feed, self.groups = feed, groups
        self.loop = AsyncRolloutLoop(feed.config, [], None, [], 128, feed.shared)
        self.start()

    def run(self):
        for group in self.groups:
            while not self.loop._may_start():
                if self.feed.stopped.wait(0.0005):
                    return
            self.loop.reserved_groups += 1
            version = self.feed.version
            tokens = sum(len(sample.input_ids) for sample in group)
            self.loop.finished_rollouts, self.loop.finished_tokens = self.loop.finished_rollouts + len(group), self.loop.finished_tokens + tokens
            for sample in group:
                self.loop.submitted += len(sample.input_ids)
                self.feed.shared.samples.put(replace(sample, version=version))
            self.loop.reserved_groups -= 1
        self.feed.shared.samples.put(None)


def equal_groups(count):
    """Two samples a group, 20 tokens in all, nothing shared."""
    return [[sized(10, 2 * g), sized(10, 2 * g + 1)] for g in range(count)]


def in_time(work, seconds=60.0):
    """The result of `work`, run so that a stall fails the test instead of blocking it."""
    results = queue.Queue()
    threading.Thread(target=lambda: results.put(work()), daemon=True).start()
    return results.get(timeout=seconds)


@pytest.mark.parametrize("steps_ahead", [1, 2, 4])
def test_generation_runs_no_further_ahead_of_training_than_the_allowance(make_feed, steps_ahead):
    """Not trained yet at the end of each step: no more than the allowance and the sample that closed a step, and all of the allowance is used."""
    allowance = steps_ahead * BUDGET
    feed = make_feed(allowance=allowance, num_generations=2, max_staleness=4)
    producer = Producer(feed, equal_groups(60))
    plan_ahead(feed)
    trained, outstanding = 0, []

    def training(plan):
        nonlocal trained
        trained += plan.raw_tokens
        until(lambda: producer.loop.submitted - trained > allowance - 20)
        time.sleep(0.1)
        outstanding.append(producer.loop.submitted - trained)
    in_time(lambda: list(itertools.islice(taken(feed, training), 6)))
    assert max(outstanding) <= allowance + 10, outstanding


@pytest.mark.parametrize("allowance", [1, 20, 50, 130])
@pytest.mark.parametrize("world_size,accumulation", [(1, 1), (2, 3)])
def test_an_allowance_below_what_a_step_needs_never_stalls(make_feed, allowance, world_size, accumulation):
    """A step takes 60 or 360 tokens, of which 1 to 130 may be waiting: every sample is trained."""
    feed = make_feed(allowance=allowance, num_generations=2, max_staleness=100, gradient_accumulation_steps=accumulation)
    Producer(feed, equal_groups(60))
    plan_ahead(feed, world_size)
    assert in_time(lambda: sum(plan.num_samples for plan in taken(feed))) == 120 and feed.shared.consumed.value == 1200


def test_it_does_not_stall_when_samples_drawn_ahead_are_all_too_old(make_feed):
    """max_staleness=0: all that is generated during a step is dropped, and only what is generated while the loop waits is trained."""
    feed = make_feed(allowance=BUDGET, num_generations=2, max_staleness=0)
    producer = Producer(feed, equal_groups(200))
    plan_ahead(feed)
    trained = in_time(lambda: sum(plan.num_samples for plan in itertools.islice(taken(feed, lambda plan: time.sleep(0.02)), 8)))
    assert trained == 8 * 6 and producer.loop.submitted <= 8 * (2 * BUDGET + 20) + BUDGET + 20


def test_packing_that_makes_a_step_larger_than_the_allowance_does_not_stall(make_feed):
    """40 shared tokens and 2 of its own a sample: a row of 60 unique tokens takes 7 samples, 294 raw tokens, of which 60 may wait at first."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, 37, (12, 40))
    groups = [[make_sample([*prompt, *rng.integers(0, 37, 2)], 40, g) for _ in range(16)] for g, prompt in enumerate(prompts)]
    feed = make_feed(allowance=BUDGET, num_generations=16, max_staleness=1, weight_sync_steps=1000)
    Producer(feed, groups)
    plan_ahead(feed)

    def training(plan):
        feed.shared.allowance.value = plan.raw_tokens
    plans = in_time(lambda: list(taken(feed, training)))
    assert sum(plan.num_samples for plan in plans) == 12 * 16 and max(plan.raw_tokens for plan in plans) > 4 * BUDGET


def test_what_is_drawn_ahead_is_consumed_when_the_loop_asks_and_then_at_once(make_feed):
    feed = make_feed([sized(20, 0), sized(20, 1)])
    plan_ahead(feed)
    until(lambda: feed.ahead == 2)
    assert feed.shared.consumed.value == 0
    waiting = threading.Thread(target=feed.next_plan, daemon=True)
    waiting.start()
    until(lambda: feed.shared.consumed.value == 40)
    put(feed, [sized(20, 2)])
    until(lambda: feed.shared.consumed.value == 60)
    assert waiting.is_alive()                    # that sample fits too: the step is not full yet
    put(feed, [sized(30, 3)])
    waiting.join(60)
    assert feed.shared.consumed.value == 90 and feed.ahead == 0
    put(feed, [sized(20, 4)])
    until(lambda: feed.ahead == 1)
    assert feed.shared.consumed.value == 90


# How it ends

def test_what_planning_raises_is_raised_in_the_waiting_loop_as_itself_from_where_it_happened(make_feed, monkeypatch):
    def refuse(samples, *_):
        raise ConfigError(f"no row for {len(next(samples).input_ids)} tokens")
    monkeypatch.setattr(planning, "plan_micro_batch", refuse)
    feed = make_feed()
    plan_ahead(feed)
    once_the_loop_waits(feed, lambda: put(feed, [sized(30, 0)]))
    with pytest.raises(ConfigError, match="no row for 30 tokens") as caught:
        feed.next_plan()
    assert {"plan_steps", "refuse", "next_plan"} <= {frame.name for frame in traceback.extract_tb(caught.tb)}


def test_a_sample_whose_first_trained_token_is_beyond_the_budget_is_dropped_and_counted_like_any_other(make_feed, capsys):
    """A prompt of 65 tokens, and a forked later turn after 62 of them; what comes after is trained."""
    first, later = make_sample(np.arange(70) % 37, 65, group_id=0), make_sample(np.arange(90) % 37, 62, group_id=1)
    feed = make_feed([first, sized(BUDGET, 1), later, sized(BUDGET, 2), None])
    plan_ahead(feed)
    assert [plan.last_group for plan in taken(feed)] == [1, 2] and feed.window.result()["batch/dropped_oversize_count"] == 2
    assert capsys.readouterr().out.count("raise token_budget=60 to train on it") == 2


def test_an_oversize_sample_is_dropped_and_counted_in_the_step_it_was_drawn_for(make_feed):
    feed = make_feed([sized(BUDGET, 0), sized(BUDGET, 1), sized(BUDGET + 1, 2), sized(BUDGET, 3), None])
    plan_ahead(feed)
    assert [(plan.last_group, feed.window.result().get("batch/dropped_oversize_count", 0)) for plan in taken(feed)] == [(0, 0), (1, 1), (3, 0)]


def test_a_dead_server_is_noticed_while_waiting_and_before_a_plan_that_lay_ready_is_used(make_feed):
    def dead():
        raise ConfigError("the vLLM server exited")
    for samples in ([], [sized(BUDGET, 0), sized(BUDGET, 1)]):
        feed = make_feed(samples)
        plan_ahead(feed)
        until(lambda: feed.planned.done() or not samples)
        feed.check_server = dead
        started = time.monotonic()
        with pytest.raises(ConfigError, match="the vLLM server exited"):
            feed.next_plan()
        assert time.monotonic() - started < 20


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_a_loop_that_waits_for_its_plan(make_feed, number):
    def leave(*_):
        raise SystemExit(143)
    before = signal.signal(number, leave)       # a shell's background jobs ignore SIGINT otherwise
    try:
        feed = make_feed()
        plan_ahead(feed)
        once_the_loop_waits(feed, lambda: os.kill(os.getpid(), number))
        started = time.monotonic()
        with pytest.raises(SystemExit):
            feed.next_plan()
        feed.stop()
        assert time.monotonic() - started < 20 and feed.planned.done()
    finally:
        signal.signal(number, before)


def test_after_the_last_step_the_plan_made_ahead_is_discarded_and_counts_nowhere(make_feed):
    """Two of three steps are taken, as with max_steps=2; the third's too old sample and its tokens count neither as dropped nor as consumed."""
    feed = make_feed([sized(BUDGET, 0), sized(BUDGET, 1, version=1), *(sized(40, g, version=g // 2) for g in (2, 3, 4)), None], max_staleness=0)
    plan_ahead(feed)
    assert [plan.last_group for plan in itertools.islice(taken(feed), 2)] == [0, 1]
    until(feed.planned.done)
    assert feed.ahead == 2 and feed.shared.consumed.value == 2 * BUDGET + 40
    feed.stop()
    assert feed.window.result().get("sample/dropped_stale_count", 0) == 0 and not feed.planner._threads.copy().pop().is_alive()


def test_the_partial_last_step_is_trained_and_the_end_is_told_once_and_again(make_feed):
    """Five samples of which two fit a row, two rows a step: the last step is one sample beside filler."""
    feed = make_feed([*(sized(30, g) for g in range(5)), None], gradient_accumulation_steps=2)
    plan_ahead(feed)
    assert [plan.num_samples for plan in taken(feed)] == [4, 1]
    assert feed.next_plan() is None


def test_an_empty_end_logs_nothing(make_feed):
    """The window stays empty after the last step, so that no line is logged for a step that was none."""
    feed = make_feed([sized(BUDGET, 0), None])
    plan_ahead(feed)
    feed.next_plan()
    feed.window.result()
    assert feed.next_plan() is None and feed.window.values == {}


@pytest.mark.parametrize("every,steps", [(3, [3, 6, 9]), (3.0, [3, 6, 9]), (0.5, [5, 10]), (0.25, [3, 6, 9]), (0.01, list(range(1, 11))), (None, [])])
def test_what_happens_every_so_many_steps_or_share_of_them_is_due_then(every, steps):
    assert [step for step in range(1, 11) if due(every, step, 10)] == steps
