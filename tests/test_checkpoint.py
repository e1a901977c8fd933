"""However often a run is killed, every prompt is trained once an epoch; and no rollout comes before the restored weights."""
import asyncio
import json
import os
import queue
import random
import re
import shutil
import threading
import time
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import make_sample, tiny_config, tiny_lm
from fake_server import EOS, FakeServer, choice
from resume_worker import in_background
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from checkpoint import Checkpoints, Counters
from config import ConfigError
from export import save_model
from feed import Progress, RolloutFeed
from folders import newest, set_aside
from metrics import Window
from model import Policy, make_optimizer
from planning import plan_steps
from rollout import AsyncRolloutLoop

ROWS, SIZE, EPOCHS = 17, 4, 2


class Tokenizer:
    def apply_chat_template(self, messages, **options):
        return [1, 2, int(messages[-1]["content"]) + 3]

    def decode(self, ids, **options):
        return " ".join(map(str, ids))


class Picky(AsyncRolloutLoop):
    def filter_prompt(self, row_index, row, epoch):
        return row_index != 5


async def reward(prompts, completion_ids, **columns):
    """Prompts 3, 9 and 15 carry no signal."""
    await asyncio.sleep(random.random() * 0.01)
    return [0.0 if int(prompt[0]["content"]) % 6 == 3 else float(i % 2) for i, prompt in enumerate(prompts)]


def answer(body):
    """Between 2 and 9 tokens."""
    rng = random.Random(body["sampling_params"]["seed"])
    return choice([rng.randrange(100, 140) for _ in range(rng.randrange(1, 9))] + [EOS], asked=body["sampling_params"]["logprobs"])


class ThreadFeed(RolloutFeed):
    """A feed whose rollout process is a thread, so that it costs nothing to start and to kill."""

    def start(self, version, allowance):
        self.shared.samples, self.shared.metrics, self.shared.resolved = queue.Queue(), queue.Queue(), queue.Queue()
        self.shared.version.value, self.shared.allowance.value = version, allowance
        self.process = SimpleNamespace(exitcode=None, pid=None)
        rows = [dict(prompt=[dict(role="user", content=str(i))]) for i in range(ROWS)]
        self.engine = Picky(self.config, rows, Tokenizer(), [EOS], 64, self.shared, self.first, frozenset(self.beyond))
        self.engine_loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self):
        self.work = self.engine_loop.create_task(self.engine.run())
        try:
            self.engine_loop.run_until_complete(self.work)
        except asyncio.CancelledError:
            pass

    def kill(self):
        self.engine_loop.call_soon_threadsafe(self.work.cancel)
        self.thread.join()
        self.engine_loop.close()
        self.stop()


def lives(config, rng, kills):
    """What was trained, by the steps that count, and what the checkpoints said, through so many deaths at random moments."""
    progress, saved_step, trained, version, epochs_seen = Progress(), 0, {}, 0, []
    for life in range(kills + 1):
        feed = ThreadFeed(config, [], 64, Window(), progress=progress)
        feed.start(version, 150)
        feed.plan_ahead(plan_steps(config, feed, 1, 60, 1, saved_step))
        step, last = saved_step, saved_step + rng.randrange(1, 6) if life < kills else 10**6
        trained = {number: samples for number, samples in trained.items() if number <= saved_step}
        while step < last and (plan := feed.next_plan()) is not None:
            step += 1
            trained[step] = plan.trained
            time.sleep(rng.random() * 0.02)
            if step % config.weight_sync_steps == 0:
                feed.shared.version.value += 1
            feed.collect_metrics()
            if rng.random() < 0.5:
                progress, saved_step, version = feed.progress(), step, feed.version
                epochs_seen.append(progress.first / ROWS)
        feed.kill()
    return [sample for samples in trained.values() for sample in samples], progress, epochs_seen


@pytest.mark.parametrize("seed", range(10))
def test_a_run_killed_at_three_random_moments_trains_every_prompt_once_an_epoch(seed):
    """Whole groups, those that were finished and queued too; a filtered prompt and groups without a signal are resolved, not waited for."""
    rng = random.Random(seed)
    with FakeServer(answer, delay=0.005) as server:
        config = tiny_config(reward_funcs=reward, num_generations=SIZE, vllm_server_base_url=server.url, max_completion_length=16, num_sampler_logprobs=2,
                             num_train_epochs=float(EPOCHS), max_concurrent_rollouts=12, max_staleness=50, weight_sync_steps=rng.choice([1, 2]), token_budget=60)
        trained, progress, positions = lives(config, rng, kills=3)
    counts = Counter(group for group, _ in trained)
    assert set(counts.values()) == {SIZE} and len(set(trained)) == len(trained)
    assert len(counts) == EPOCHS * (ROWS - 4)            # all but the filtered one and the three without a signal
    assert positions == sorted(positions)


@pytest.fixture
def feed():
    made = RolloutFeed(tiny_config(), [], 64, Window())
    made.shared.samples, made.shared.resolved = queue.Queue(), queue.Queue()
    made.shared.heartbeat.value = float("inf")
    yield made
    made.stop()


def put_group(feed, group_id, count=2, received=None):
    samples = [make_sample([1, 2, 3, 10 + i], 3, group_id) for i in range(count)]
    for sample in samples[:received]:
        object.__setattr__(sample, "group_samples", count)
        feed.shared.samples.put(sample)


def test_a_dropped_group_does_not_hold_the_saved_position_back(feed):
    """Group 2 of 150 comes to nothing: at group 100 the position is 100, not 2, and nothing below it is generated again."""
    for group_id in range(100):
        feed.shared.resolved.put(group_id) if group_id == 2 else put_group(feed, group_id)
    drawn = feed.samples(0)
    feed.plan_ahead(iter([[next(drawn) for _ in range(198)], None]))
    feed.next_plan()
    assert feed.progress() == Progress(100)


def test_groups_in_flight_are_known_and_finished_samples_are_kept_in_their_order(feed):
    """Group 1 is still generated; of group 2 one sample is trained and one drawn ahead; 3 waits."""
    for group_id in (0, 2, 3):
        put_group(feed, group_id)
    stream = feed.samples(0)
    feed.plan_ahead(iter([[next(stream) for _ in range(3)], None]))
    feed.next_plan()
    left = next(stream)
    progress = feed.progress()
    assert (progress.first, progress.done, progress.in_flight) == (1, {2, 3}, [1])
    assert [sample.group_id for sample in progress.samples] == [2, 3, 3] and progress.samples[0] is left
    again = RolloutFeed(tiny_config(), [], 64, Window(), progress=progress)
    assert again.shared.consumed.value == -12            # the allowance counts them as queued
    assert [next(again.samples(0)) for _ in range(3)] == list(progress.samples)
    assert again.shared.consumed.value == 0


def test_a_group_of_which_a_part_is_on_its_way_is_waited_for(feed):
    put_group(feed, 0, count=3, received=2)
    late = make_sample([1, 2, 3, 9], 3, 0)
    object.__setattr__(late, "group_samples", 3)
    threading.Timer(0.4, feed.shared.samples.put, (late,)).start()
    assert len(feed.progress().samples) == 3


@pytest.mark.parametrize("damage,words", [
    (dict(trained_index=np.array([3, 9], np.int32)), "trained positions"), (dict(sampler_logprobs=np.zeros(5, np.float32)), "one log-prob for each"),
    (dict(input_ids=np.array([1, -2, 3, 4], np.int32)), "below 0")])
def test_a_damaged_sample_in_the_queue_ends_the_run_by_its_group(feed, damage, words):
    sample = make_sample([1, 2, 3, 4], 3, group_id=7)
    for name, value in damage.items():
        object.__setattr__(sample, name, value)
    feed.shared.samples.put(sample)
    with pytest.raises(RuntimeError, match=f"a sample of group 7 is damaged .*{words}.*resume_from_checkpoint"):
        next(feed.samples(0))


def test_a_message_that_cannot_be_read_ends_the_run_in_a_sentence(feed):
    class Damaged(queue.Queue):
        def get(self, timeout):
            return json.loads("\x80garbage")
    feed.shared.samples = Damaged()
    with pytest.raises(RuntimeError, match="a sample from the rollout process cannot be read"):
        next(feed.samples(0))


# Saving has no effect

@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def parts(folder, **changes):
    config = tiny_config(output_dir=str(folder), learning_rate=0.1, weight_decay=0.5, lr_scheduler_type="linear", max_steps=20, **changes)
    policy = Policy(tiny_lm(), 1.0, "sdpa")
    optimizer = make_optimizer(config, policy)
    import train
    scheduler = train.make_scheduler(config, optimizer)
    tokenizer = SimpleNamespace(save_pretrained=lambda folder: None)
    return policy, optimizer, scheduler, Checkpoints(config, policy, optimizer, scheduler, torch.amp.GradScaler(enabled=False), tokenizer, torch.float32)


def steps(policy, optimizer, scheduler, first, last):
    for step in range(first, last):
        for i, p in enumerate(policy.parameters()):
            p.grad = torch.full_like(p, 0.01 * (step + 1) * (-1) ** i)
        optimizer.step(), scheduler.step()
    return [p.detach().clone() for p in policy.parameters()], [float(state["step"]) for state in optimizer.state.values()], scheduler.get_last_lr(), torch.rand(2)


@pytest.mark.parametrize("at", [0, 3])
@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adamw_torch", "sgd"])
def test_never_saved_equals_saved_and_continued_equals_resumed_also_before_the_optimizer_has_a_state(tmp_path, group, at, optim):
    """torch's own helper makes that state by a step: with decay 0.5 the weights would move, and `step` would be 1."""
    results, feed = [], SimpleNamespace(progress=Progress)
    for way in ("never", "continued", "resumed"):
        torch.manual_seed(7)
        policy, optimizer, scheduler, checkpoints = parts(tmp_path, optim=optim)
        steps(policy, optimizer, scheduler, 0, at)
        if way != "never":
            before = len(optimizer.state)
            checkpoints.save(Counters(at, at, 100, 9), {"loss": [1.5, 2.0]}, feed)
            assert len(optimizer.state) == before == (0 if at == 0 or optim == "sgd" else before)
        if way == "resumed":
            torch.manual_seed(0)
            policy, optimizer, scheduler, checkpoints = parts(tmp_path, optim=optim, resume_from_checkpoint=True)
            assert checkpoints.restore() == (Counters(at, at, 100, 9), {"loss": [1.5, 2.0]}, Progress())
        results.append(steps(policy, optimizer, scheduler, at, at + 2))
    for result in results[1:]:
        assert all(map(torch.equal, result[0], results[0][0])) and result[1:3] == results[0][1:3] and torch.equal(result[3], results[0][3])


def test_what_a_kill_in_the_middle_of_saving_leaves_is_cleared_and_never_resumed_from(tmp_path, group):
    policy, optimizer, scheduler, checkpoints = parts(tmp_path)
    checkpoints.save(Counters(2), {}, SimpleNamespace(progress=Progress))
    os.rename(tmp_path / "checkpoint-2", tmp_path / "checkpoint-4.partial")
    assert parts(tmp_path, resume_from_checkpoint=True)[3].restore()[0] == Counters()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("masters, dtype", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float32, torch.float32)])
def test_the_exported_folder_names_the_dtype_of_its_weights_and_the_policys_config_keeps_its_own(tmp_path, group, masters, dtype):
    lm = tiny_lm(dtype=masters)
    lm.config.dtype = masters
    before = lm.config.to_dict()
    save_model(Policy(lm, 1.0, "sdpa"), SimpleNamespace(save_pretrained=lambda folder: None), tmp_path / "model", dtype)
    assert {tensor.dtype for tensor in load_file(tmp_path / "model" / "model.safetensors").values()} == {dtype}
    assert json.loads((tmp_path / "model" / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model").dtype == dtype
    assert lm.config.to_dict() == before and lm.config.dtype == masters and {p.dtype for p in lm.parameters()} == {masters}


def files(folder):
    """But for those that name the folder; .metadata numbers the save too."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file() and path.name not in ("README.md", "manifest.json", ".metadata")}


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "sgd"])
def test_a_save_in_the_background_writes_the_bytes_that_a_save_at_once_writes_whatever_is_trained_meanwhile(tmp_path, group, capsys, optim):
    """Until it is written nothing bears a checkpoint's name, so a kill leaves the one before; the next save waits for it."""
    feed, window, written = SimpleNamespace(progress=lambda: Progress(5, frozenset([7]), (make_sample([1, 2, 3, 4], 2),))), {"loss": [1.5, 2.0]}, {}
    for way in ("at once", "background"):
        torch.manual_seed(7)
        policy, optimizer, scheduler, checkpoints = parts(tmp_path / way, optim=optim)
        steps(policy, optimizer, scheduler, 0, 2)
        checkpoints.save(Counters(2, 2, 100, 9), window, feed)
        assert checkpoints.written.done()
        steps(policy, optimizer, scheduler, 2, 3)
        if way == "background":
            with in_background() as release:
                checkpoints.save(Counters(3, 3, 150, 12), window, feed)
                window["loss"][0] = 99.0
                after = steps(policy, optimizer, scheduler, 3, 5)
                time.sleep(0.2)
                assert not checkpoints.written.done() and newest(tmp_path / way).name == "checkpoint-2"
                shutil.copytree(tmp_path / way, tmp_path / "killed")
                threading.Timer(1.5, release.set).start()
                checkpoints.save(Counters(5), window, feed)
                assert newest(tmp_path / way).name in ("checkpoint-3", "checkpoint-5")
                checkpoints.check(wait=True)
        else:
            checkpoints.save(Counters(3, 3, 150, 12), window, feed)
        written[way] = files(tmp_path / way / "checkpoint-3")
    assert written["background"] == written["at once"] and "samples.jsonl" in written["at once"]
    said = capsys.readouterr().out
    assert len(re.findall(r"step 5: waited \d+\.\d s until the checkpoint before was written", said)) == said.count("until the checkpoint") == 1
    assert len(re.findall(r"checkpoint-3 in \d+\.\d s \(training waited \d+\.\d s\)", said)) == 1
    for folder, step in (("background", 3), ("killed", 2)):
        torch.manual_seed(0)
        policy, optimizer, scheduler, checkpoints = parts(tmp_path / folder, optim=optim, resume_from_checkpoint=f"{tmp_path}/{folder}/checkpoint-{step}")
        assert checkpoints.restore()[0].step == step and not list((tmp_path / folder).glob("*.partial*"))
        again = steps(policy, optimizer, scheduler, step, 5)
        assert all(map(torch.equal, again[0], after[0])) and again[1:3] == after[1:3]
        assert step == 2 or torch.equal(again[3], after[3])


def test_what_another_run_left_beyond_this_ones_step_is_set_aside_and_nothing_is_lost(tmp_path):
    """A later step of an earlier run was once the newest checkpoint: it was resumed from, and this run's own was pruned before it."""
    for name in ("checkpoint-5", "checkpoint-9", "rollouts"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    set_aside(tmp_path, 5)
    assert newest(tmp_path).name == "checkpoint-5" and (tmp_path / "rollouts").exists()
    set_aside(tmp_path, 0)
    assert newest(tmp_path) is None
    assert {str(path.relative_to(tmp_path)): path.read_text() for path in tmp_path.rglob("file")} == {
        f"{folder}/{name}/file": name for folder, name in (("earlier_1", "checkpoint-9"), ("earlier_2", "checkpoint-5"), ("earlier_2", "rollouts"))}
    set_aside(tmp_path, 0)
    assert not (tmp_path / "earlier_3").exists()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_disk_that_does_not_even_let_itself_be_cleared_ends_the_run_instead_of_being_waited_for(tmp_path, group, monkeypatch):
    def stale(*_):
        raise OSError
    *_, checkpoints = parts(tmp_path)
    monkeypatch.setattr("checkpoint.write_model", stale), monkeypatch.setattr("checkpoint.clear", stale)
    with pytest.raises(RuntimeError, match="checkpoint-1 could not be written"):
        checkpoints.save(Counters(1), {}, SimpleNamespace(progress=Progress))
    monkeypatch.setattr("checkpoint.clear", lambda output: None)
    with pytest.raises(ConfigError, match=r"checkpoint-2 could not be written \(OSError\(\)\)"):
        parts(tmp_path)[-1].save(Counters(2), {}, SimpleNamespace(progress=Progress))
