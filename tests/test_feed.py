"""The trainer's side of the rollout process: samples arrive, its failures arrive too, and stopping leaves nothing behind."""
import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest
from conftest import ROOT, SMALL_MODEL, until
from fake_server import FakeServer, by_seed, choice

from config import ConfigError, load_config
from feed import RolloutFeed
from metrics import Window

CONFIG = """
import sys, time
sys.path.insert(0, {tests!r})
from config import Config
def reward(completion_ids, **columns):
    {body}
    return [float(i % 2) for i, _ in enumerate(completion_ids)]
config = Config(model={model!r}, reward_funcs=lambda **kw: reward(**kw), use_cpu=True, num_generations=4, max_completion_length=8,
                num_sampler_logprobs=2, num_train_epochs=1.0, vllm_server_base_url={url!r}, output_dir="unused", {more}
                train_dataset=lambda: [dict(prompt=[dict(role="user", content=str(i))]) for i in range(6)])
"""


def written(folder, server, body="pass", more=""):
    path = folder / "x.py"
    path.write_text(CONFIG.format(tests=os.path.dirname(__file__), body=body, model=str(SMALL_MODEL), url=server.url, more=more))
    return str(path)


@pytest.fixture
def feed(tmp_path):
    feeds = []

    def start(server, body="pass", more="", allowance=100_000, max_model_len=128):
        path = written(tmp_path, server, body, more)
        feeds.append(RolloutFeed(load_config([path]), [path], max_model_len, Window()))
        feeds[-1].start(0, allowance)
        return feeds[-1]
    yield start
    for made in feeds:
        made.stop()
        assert made.process.exitcode is not None


def test_every_prompt_of_the_epoch_arrives_once_and_then_the_samples_end(feed):
    """Lambdas in the config file work: the process loads the file itself."""
    with FakeServer() as server:
        made = feed(server)
        samples = list(made.samples(0))
        assert sorted(s.group_id for s in samples) == [g for g in range(6) for _ in range(4)]
        assert list(made.samples(0)) == [] and made.process.join(60) is None and made.process.exitcode == 0
        made.collect_metrics()
        assert made.window.result()["completions/mean_length"] == 3.0


def test_no_report_is_left_behind_for_one_that_is_still_on_its_way(tmp_path):
    """The pipe holds a few; as long as its writer has not filled it again, it is empty."""
    with FakeServer() as server:
        path = written(tmp_path, server)
        made = RolloutFeed(load_config([path]), [path], 128, Window())
    for _ in range(60):
        made.shared.metrics.put(({"reward": [1.0, 1.0]}, [dict(completion="c" * 20_000)]))
    made.shared.metrics.cancel_join_thread()                 # or a failure here would not end
    made.collect_metrics()
    assert made.window.values["reward"] == [60.0, 60.0] and made.shared.metrics.qsize() == 0


def test_every_evaluation_is_collected_by_itself_and_one_that_is_not_collected_is_made_again_by_a_resumed_run(tmp_path):
    """In one window the last of each name won: of three the log had the last, beside a reward function's mean that only the first had."""
    with FakeServer() as server:
        path = written(tmp_path, server)
        made = RolloutFeed(load_config([path]), [path], 128, Window())
    for step, more in ((2, {"eval/rewards/f/mean": [0.1, 1.0]}), (4, {}), (6, {})):
        made.evaluate(step)
        made.shared.metrics.put(({"eval/step": [step, 1.0], "eval/reward": [step / 10, 1.0]} | more, []))
    made.shared.evaluated.value = made.shared.evaluate.value
    made.shared.metrics.cancel_join_thread()
    assert made.progress().evaluating
    assert made.collect_metrics() == [{"eval/step": 2, "eval/reward": 0.2, "eval/rewards/f/mean": 0.1}, {"eval/step": 4, "eval/reward": 0.4}, {"eval/step": 6, "eval/reward": 0.6}]
    assert not made.progress().evaluating and not any("eval/" in name for name in made.window.values)


def of_version_zero(body):
    return by_seed(body) | dict(weight_versions=[dict(version="0", start=0, end=3)])


def first_failure(made, within):
    started = time.monotonic()
    with pytest.raises((ConfigError, RuntimeError)) as caught:
        for _ in made.samples(0):
            pass
    assert time.monotonic() - started < within
    return caught


def test_a_reward_function_that_raises_reaches_the_trainer_as_a_sentence(feed):
    with FakeServer() as server:
        caught = first_failure(feed(server, "raise KeyError('no such answer')"), 300)
    assert caught.type is ConfigError and "reward function <lambda> raised KeyError: 'no such answer'" in str(caught.value)


def test_a_reward_function_of_the_wrong_length_reaches_the_trainer_as_a_sentence(feed):
    with FakeServer() as server:
        caught = first_failure(feed(server, "return [1.0]"), 300)
    assert "returned 1 rewards for 4 completions" in str(caught.value)


def test_a_hook_that_raises_reaches_the_trainer_with_its_traceback(feed):
    more = "loop_cls=type('Broken', (__import__('rollout').AsyncRolloutLoop,), dict(filter_prompt=lambda self, *a: 1 / 0)),"
    with FakeServer() as server:
        caught = first_failure(feed(server, more=more), 300)
    assert caught.type is RuntimeError and "ZeroDivisionError" in str(caught.value) and "filter_prompt" in str(caught.value)


def test_a_killed_process_is_noticed_within_seconds(feed):
    with FakeServer(faults={n: [90.0, None] for n in range(4, 24)}) as server:        # only the first group comes
        made = feed(server)
        stream = made.samples(0)
        next(stream)
        os.kill(made.process.pid, signal.SIGKILL)
        started = time.monotonic()
        with pytest.raises(RuntimeError, match=r"died with exit code -9 \(killed"):
            for _ in stream:
                pass
        assert time.monotonic() - started < 30


def long_answer(body):
    """Samples of over 64 KB: more than a pipe holds, so writing one takes the reader's help."""
    return choice([1 + body["sampling_params"]["seed"] % 2] * 4000, asked=3)


def test_a_process_killed_in_the_middle_of_writing_a_sample_is_noticed_too(feed):
    with FakeServer(long_answer) as server:
        made = feed(server, "return [float(ids[0]) for ids in completion_ids]", max_model_len=8192)
        until(lambda: made.shared.samples._reader.poll(0.1), 300)
        os.kill(made.process.pid, signal.SIGKILL)
        first_failure(made, 30)


def test_a_finished_process_may_wait_for_a_slow_trainer_longer_than_the_workers_timeout(feed):
    with FakeServer(long_answer) as server:
        made = feed(server, "return [float(ids[0]) for ids in completion_ids]", more="rollout_worker_timeout=0.5,", max_model_len=8192)
        until(lambda: made.shared.heartbeat.value == float("inf"), 300)
        time.sleep(1)
        assert len(list(made.samples(0))) == 24
        made.process.join(60)
        assert made.process.exitcode == 0


def test_the_process_dies_with_a_trainer_that_is_killed_even_while_it_starts(tmp_path):
    with FakeServer(long_answer) as server:
        code = (f"import sys; sys.path.insert(0, {str(ROOT)!r})\nfrom config import load_config\nfrom feed import RolloutFeed\nfrom metrics import Window\n"
                f"import time\nif __name__ == '__main__':\n    argv = [{written(tmp_path, server)!r}]\n"
                "    for _ in range(2):\n        made = RolloutFeed(load_config(argv), argv, 8192, Window())\n"
                "        made.start(0, 100000)\n        print(made.process.pid, flush=True)\n        input()\n")
        (tmp_path / "trainer.py").write_text(code)
        trainer = subprocess.Popen([sys.executable, str(tmp_path / "trainer.py")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        working = psutil.Process(int(trainer.stdout.readline()))
        until(lambda: server.bodies, 300)
        print(file=trainer.stdin, flush=True)
        starting = psutil.Process(int(trainer.stdout.readline()))
        trainer.kill()
        trainer.wait()
        for child in (working, starting):
            child.wait(timeout=30)


def test_a_blocked_event_loop_is_noticed_after_the_workers_timeout(feed):
    more = ("loop_cls=type('Stuck', (__import__('rollout').AsyncRolloutLoop,), dict(filter_prompt=lambda self, *a: time.sleep(600))),"
            "rollout_worker_timeout=8.0,")
    with FakeServer() as server:
        caught = first_failure(feed(server, more=more), 300)
    assert "no sign of life" in str(caught.value)


def test_a_slow_server_is_not_the_end_of_the_data(feed):
    with FakeServer(delay=1.0) as server:
        assert len(list(feed(server, more="max_concurrent_rollouts=8,").samples(0))) == 24


def test_a_sample_too_old_is_dropped_and_counted_and_gives_its_tokens_back(feed):
    with FakeServer(of_version_zero) as server:
        made = feed(server, more="max_staleness=0,")
        next(made.samples(0))
        assert list(made.samples(1)) == [] and made.reports.result()["sample/dropped_stale_count"] == 23
        assert made.shared.consumed.value > 0


def test_a_sample_given_back_is_looked_at_again_when_it_may_have_grown_too_old(feed):
    with FakeServer(of_version_zero) as server:
        made = feed(server, more="max_staleness=0,")
        sample = next(made.samples(0))
        made.given_back.append(sample)
        assert next(made.samples(0)) is sample
        made.given_back.append(sample)
        assert sample not in list(made.samples(1))


def raised_by_next_plan(made, within):
    started = time.monotonic()
    with pytest.raises((ConfigError, RuntimeError)) as caught:
        made.next_plan()
    assert time.monotonic() - started < within
    return str(caught.value)


def test_a_process_killed_while_the_loop_waits_for_a_plan_wakes_it(feed):
    with FakeServer(delay=90.0) as server:
        made = feed(server)
        made.plan_ahead(made.samples(0))
        until(lambda: server.bodies, 300)
        threading.Timer(0.5, os.kill, (made.process.pid, signal.SIGKILL)).start()
        assert "died with exit code -9" in raised_by_next_plan(made, 30)


def test_a_process_that_died_while_a_plan_lay_ready_is_noticed_before_that_plan_is_used(feed):
    """The thread rests then, so it does not look; a step can take minutes."""
    with FakeServer() as server:
        made = feed(server, more="max_concurrent_rollouts=1,", allowance=1)
        made.plan_ahead(made.samples(0))
        assert made.next_plan() is not None
        until(made.planned.done)
        os.kill(made.process.pid, signal.SIGKILL)
        made.process.join(60)
        assert "died with exit code -9" in raised_by_next_plan(made, 30)


@pytest.mark.parametrize("after", ["at once", "with a full queue", "with all generated"])
def test_stopping_takes_seconds_and_leaves_no_child_even_with_a_full_queue(feed, after):
    """A queue's feeder thread blocks on a full pipe, and joining it would wait for ever."""
    with FakeServer(long_answer) as server:
        made = feed(server, "return [float(ids[0]) for ids in completion_ids]", max_model_len=8192)
        made.plan_ahead(made.samples(0))
        if after == "with a full queue":
            made.next_plan()
            until(lambda: made.shared.samples.qsize() > 1)
        if after == "with all generated":         # the process ends by itself as soon as its samples are read
            until(lambda: made.shared.heartbeat.value == float("inf"), 300)
        child = psutil.Process(made.process.pid)
        started = time.monotonic()
        made.stop()
        made.stop()
        assert time.monotonic() - started < 30 and not child.is_running()
        assert made.process.exitcode == 0 or after != "with all generated"            # it once had to be killed, after 5 s
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("planner")]
