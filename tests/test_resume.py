"""A run that was killed and resumed is the run that was not, bit for bit; whatever a checkpoint lacks is refused in a sentence."""
import json
import math
import shutil
import signal
import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT, random_group
from resume_worker import in_background, run

import folders
import train
from checkpoint import Checkpoints
from recording import RolloutWriter, read_groups, recorded_sample, sample_record

GROUPS, SIZE = 64, 4
CONFIG = """
from config import Config
config = Config(model={model!r}, reward_funcs=len, use_cpu=True, bf16=False, gradient_checkpointing=False, replay={replay!r}, token_budget=60,
                learning_rate=1e-3, weight_decay=0.1, lr_scheduler_type="linear", warmup_steps=3, max_steps=10, disable_tqdm=True, max_staleness=20,
                train_dataset=lambda: [dict(prompt=[dict(role="user", content=str(i))]) for i in range({groups})])
"""


def scored(group_id, rng):
    """What rollout.py writes of a group: every fourth carries no signal."""
    samples = random_group(rng, group_id, [1, 2, 3, 4 + group_id % 7], SIZE, 9)
    for sample in samples:                               # near the tiny model's 1 / 49152, so that ratios stay inside the bounds
        sample.sampler_logprobs[:] = rng.normal(-10.8, 0.2, len(sample.sampler_logprobs))
        sample.topk_logprobs[:] = rng.normal(-10.8, 0.2, sample.topk_logprobs.shape)
    rewards = np.array([1.0] * SIZE if group_id % 4 == 3 else [0.0, 1.0] * (SIZE // 2))
    return SimpleNamespace(group_id=group_id, row_index=group_id % GROUPS, model_version=0, prompts=[[dict(role="user", content=str(group_id))]] * SIZE,
                           completions=[[dict(role="assistant", content="reply")]] * SIZE, rewards=rewards, completions_sequences=[[s] for s in samples])


@pytest.fixture(scope="module")
def config_path(tmp_path_factory, tiny_folder):
    folder, rng = tmp_path_factory.mktemp("recorded"), np.random.default_rng(0)
    writer = RolloutWriter(SimpleNamespace(output_dir=folder))
    for group_id in rng.permutation(GROUPS):             # as they are scored, not as they were started
        group = scored(int(group_id), rng)
        writer.write(group, group.rewards[None], group.rewards - group.rewards.mean(), group_id % 4 != 3)
    writer.file.close()
    (folder / "x.py").write_text(CONFIG.format(model=tiny_folder, replay=str(folder / "rollouts"), groups=GROUPS))
    return str(folder / "x.py")


def start(config_path, folder, *overrides):
    return run([config_path, f"output_dir={folder}", *overrides])


class Killed(Exception):
    """As by kill -9: nothing is saved or told any more."""


def killed(config_path, folder, after, *overrides):
    """A run that ends in the middle of the step after `after`."""
    steps, plain = [], train.forward_backward

    def forward_backward(*args):
        steps.append(1)
        if len(steps) > after:
            raise Killed
        return plain(*args)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "forward_backward", forward_backward)
        with pytest.raises(Killed):
            start(config_path, folder, *overrides)


def assert_same(a, b):
    for kind in ("parameters", "moments"):
        assert a[kind].keys() == b[kind].keys() and all(torch.equal(a[kind][name], b[kind][name]) for name in a[kind]), kind
    assert a["rates"] == b["rates"] and torch.equal(a["draw"], b["draw"])


def logged(folder):
    """The metrics, but for those measured in seconds and the queue's length, which depends on them."""
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in step.items() if not name.startswith(("perf/", "rollout/", "verdict/")) and not name.endswith("_s")} for step in steps]


@pytest.fixture(scope="module")
def unkilled(config_path, tmp_path_factory):
    folder = tmp_path_factory.mktemp("unkilled")
    return SimpleNamespace(state=start(config_path, folder, "save_strategy=no"), metrics=logged(folder), folder=folder)


def test_the_reference_run_trains(unkilled):
    assert [step["step"] for step in unkilled.metrics] == list(range(1, 11)) and all(step["grad_norm"] > 0 for step in unkilled.metrics)
    assert not list(unkilled.folder.glob("checkpoint-*"))


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("after,options", [(5, []), (3, ["logging_steps=3", "gradient_accumulation_steps=2", "max_steps=6", "weight_sync_steps=2", "save_steps=3"])])
def test_killed_and_resumed_equals_unkilled_bitwise_in_parameters_moments_rates_and_metrics(config_path, unkilled, tmp_path, after, options, background):
    """Also in the middle of a logging window, between two syncs, and with checkpoints written while further steps are taken."""
    whole = unkilled if not options else SimpleNamespace(state=start(config_path, tmp_path / "whole", *options), metrics=logged(tmp_path / "whole"))
    with in_background(after - 1) if background else nullcontext():
        killed(config_path, tmp_path / "run", after, "save_steps=2", *options)
    again = start(config_path, tmp_path / "run", "resume_from_checkpoint=true", "save_steps=2", *options)
    assert_same(again, whole.state)
    assert logged(tmp_path / "run") == whole.metrics and whole.metrics[0]["learning_rate"] != whole.metrics[-1]["learning_rate"]


def test_saving_at_every_step_changes_nothing(config_path, unkilled, tmp_path):
    assert_same(start(config_path, tmp_path, "save_steps=1", "save_total_limit=2"), unkilled.state)
    assert logged(tmp_path) == unkilled.metrics
    assert sorted(folder.name for folder in tmp_path.glob("checkpoint-*")) == ["checkpoint-10", "checkpoint-9"]
    before = (tmp_path / "model" / "model.safetensors").read_bytes()
    start(config_path, tmp_path, "resume_from_checkpoint=true")
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == before, "a run that was at its last step takes no other"
    assert logged(tmp_path) == unkilled.metrics


@pytest.mark.parametrize("number,background", [(signal.SIGTERM, False), (signal.SIGUSR1, False), (signal.SIGINT, False), (signal.SIGTERM, True)])
def test_a_signal_saves_and_stops_after_the_step_and_the_resumed_run_is_the_unkilled_one(config_path, unkilled, tmp_path, number, background):
    steps = []

    def forward_backward(*args):
        steps.append(1)
        if len(steps) == 4:
            signal.raise_signal(number)
            signal.raise_signal(number)                  # torchrun passes it on at once: no second request
        return plain(*args)
    with in_background(4) if background else nullcontext(), pytest.MonkeyPatch.context() as patch:
        plain = train.forward_backward
        patch.setattr(train, "forward_backward", forward_backward)
        with pytest.raises(SystemExit) as caught:
            start(config_path, tmp_path)
    assert caught.value.code == 128 + number and len(steps) == 4 and [f.name for f in tmp_path.glob("checkpoint-*")] == ["checkpoint-4"]
    assert_same(start(config_path, tmp_path, "resume_from_checkpoint=true"), unkilled.state)
    assert logged(tmp_path) == unkilled.metrics


def test_a_signal_promises_neither_saving_nor_resuming_where_nothing_is_saved(config_path, tmp_path, monkeypatch, capfd):
    def forward_backward(*args, plain=train.forward_backward):
        signal.raise_signal(signal.SIGTERM)
        return plain(*args)
    monkeypatch.setattr(train, "forward_backward", forward_backward)
    with pytest.raises(SystemExit):
        start(config_path, tmp_path, "save_strategy=no")
    said = capfd.readouterr().err
    assert "SIGTERM: stopping without saving (save_strategy=no) after this step" in said and "stopped by a signal" in said and "resume" not in said
    assert not list(tmp_path.glob("checkpoint-*"))


def test_the_second_signal_stops_at_once_as_does_one_before_the_first_step():
    stop = train.StopRequest()
    with pytest.raises(KeyboardInterrupt):
        stop(signal.SIGINT, None)
    stop.deferred = True
    stop(signal.SIGTERM, None)
    assert stop.asked() and stop.number == signal.SIGTERM
    stop.at -= 3
    with pytest.raises(SystemExit):
        stop(signal.SIGUSR1, None)
    stop.ignored = True
    stop(signal.SIGINT, None)


# What is on the disk

@pytest.fixture(scope="module")
def saved(config_path, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    start(config_path, folder, "save_steps=2", "max_steps=4")
    return folder


def refused(config_path, folder, capsys, *overrides):
    with pytest.raises(SystemExit) as caught:
        start(config_path, folder, *overrides)
    assert caught.value.code == 2
    return capsys.readouterr().err.strip().splitlines()[-1]


def shortened(folder):
    path = next((folder / "state").glob("*.distcp"))
    path.write_bytes(path.read_bytes()[:-10])


@pytest.mark.parametrize("hurt,words", [
    (shortened, "its state/__0_0.distcp has"), (lambda folder: (folder / "samples.jsonl").unlink(), "its samples.jsonl is missing"),
    (lambda folder: (folder / "manifest.json").unlink(), "it has no manifest.json"),
    (lambda folder: (folder / "manifest.json").write_text('{"config.js'), "its manifest.json is not whole")])
def test_a_damaged_checkpoint_is_refused_by_name_and_the_one_before_it_offered(config_path, saved, tmp_path, capsys, hurt, words):
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    hurt(tmp_path / "checkpoint-4")
    sentence = refused(config_path, tmp_path, capsys, "resume_from_checkpoint=true")
    assert f"{tmp_path}/checkpoint-4 cannot be resumed from" in sentence and words in sentence
    assert f"resume_from_checkpoint={tmp_path}/checkpoint-2" in sentence


def test_another_models_checkpoint_and_one_of_the_model_only_are_refused(config_path, saved, tmp_path, capsys, small_model):
    sentence = refused(config_path, tmp_path, capsys, f"model={small_model}", f"resume_from_checkpoint={saved}/checkpoint-4")
    assert "it is of another model" in sentence and "no whole one is before it" in sentence
    start(config_path, tmp_path, "save_only_model=true", "save_steps=2", "max_steps=2")
    assert not (tmp_path / "checkpoint-2" / "state").exists() and (tmp_path / "checkpoint-2" / "model.safetensors").exists()
    assert "it holds the model only" in refused(config_path, tmp_path, capsys, "resume_from_checkpoint=true")


def test_a_checkpoint_is_a_model_that_loads_with_a_card(saved):
    from transformers import AutoModelForCausalLM, AutoTokenizer
    policy = AutoModelForCausalLM.from_pretrained(saved / "checkpoint-4", dtype="float32")
    final = AutoModelForCausalLM.from_pretrained(saved / "model", dtype="float32")
    assert all(torch.equal(a, b) for a, b in zip(policy.parameters(), final.parameters(), strict=True))
    assert AutoTokenizer.from_pretrained(saved / "checkpoint-4").chat_template
    card = (saved / "model" / "README.md").read_text()
    assert "base_model:" in card and "| grad_norm |" in card and "| learning_rate | `0.001` |" in card and "hub_token" not in card


@pytest.mark.parametrize("at,background", [("safetensors", False), ("state", False), ("flush", False), ("state", True), ("flush", True)])
def test_a_full_disk_while_saving_is_a_sentence_within_a_step_and_leaves_the_checkpoint_before_it(config_path, saved, tmp_path, capsys, monkeypatch, at, background):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")
    shutil.copytree(saved / "checkpoint-2", tmp_path / "checkpoint-2")
    if at == "safetensors":
        monkeypatch.setattr("export.write_weights", full)
    elif at == "state":
        monkeypatch.setattr("torch.distributed.checkpoint.filesystem._write_item", full)
    else:
        monkeypatch.setattr(folders, "flush", full)
    with in_background(3, settle=True) if background else nullcontext():
        sentence = refused(config_path, tmp_path, capsys, "resume_from_checkpoint=true", "save_steps=4", "max_steps=8")
    assert [step["step"] for step in logged(tmp_path)] == ([3, 4, 5] if background else [3, 4])
    assert f"{tmp_path}/checkpoint-4 could not be written" in sentence and f"resume_from_checkpoint={tmp_path}/checkpoint-2 goes on" in sentence
    assert "No space left" in sentence and [folder.name for folder in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]


def test_a_clock_that_jumps_back_changes_nothing(config_path, unkilled, tmp_path, monkeypatch):
    hours = iter(range(10**6, 0, -1))
    monkeypatch.setattr("time.time", lambda: 3600.0 * next(hours))
    assert_same(start(config_path, tmp_path, "save_steps=4"), unkilled.state)


def test_samples_come_back_from_disk_bit_for_bit_and_a_line_cut_short_is_none(tmp_path):
    rng = np.random.default_rng(3)
    writer = RolloutWriter(SimpleNamespace(output_dir=tmp_path))
    groups = [scored(group_id, rng) for group_id in range(3)]
    odd = groups[0].completions_sequences[0][0]
    odd.topk_logprobs[0, 1] = -np.inf
    for group in groups:
        writer.write(group, np.array([[1.0, math.nan, 0.0, 0.0]]), group.rewards, True)
    second = RolloutWriter(SimpleNamespace(output_dir=tmp_path))         # a run that was resumed
    groups[1] = scored(1, rng)
    second.write(groups[1], np.ones((1, SIZE)), groups[1].rewards, True)
    second.file.write('{"group_id": 7, "rollou')
    second.file.flush()
    read = list(read_groups(tmp_path / "rollouts"))
    assert [group["group_id"] for group in read] == [0, 2, 1] and read[0]["rollouts"][1]["rewards"] == [None]
    for group, record in zip((groups[0], groups[2], groups[1]), read):
        for samples, rollout in zip(group.completions_sequences, record["rollouts"], strict=True):
            again = recorded_sample(rollout["samples"][0])
            for name in ("input_ids", "trained_index", "sampler_logprobs", "topk_ids", "topk_logprobs"):
                wanted = getattr(samples[0], name)
                assert np.array_equal(getattr(again, name), wanted) and getattr(again, name).dtype == wanted.dtype
            assert again.group_samples == SIZE and again.group_id == group.group_id and sample_record(again)["reward"] == rollout["reward"]


class FakeHub:
    """Stands for huggingface_hub.HfApi."""

    def __init__(self, token):
        self.calls = FakeHub.calls = [("token", token)]

    def create_repo(self, name, private, exist_ok):
        self.calls.append(("repo", name, private))
        return SimpleNamespace(repo_id=f"me/{name}")

    def upload_folder(self, repo_id, folder_path, ignore_patterns, run_as_future, **options):
        self.calls.append((repo_id, folder_path.name, options["commit_message"], "state/*" in ignore_patterns))
        return SimpleNamespace(done=lambda: options["commit_message"] != "step 1", result=lambda: self.calls.append("awaited"),
                               exception=lambda: ConnectionError("reset by peer"))


@pytest.mark.parametrize("strategy,steps,background", [("every_save", ["step 1"], False), ("every_save", ["step 1"], True), ("end", [], False)])
def test_models_go_to_the_hub_one_upload_at_a_time_without_the_state_and_the_end_always(config_path, tmp_path, monkeypatch, strategy, steps, background):
    monkeypatch.setattr("export.HfApi", FakeHub)
    with in_background(2) if background else nullcontext():
        start(config_path, tmp_path / "a-name", "push_to_hub=true", f"hub_strategy={strategy}", "hub_token=secret", "hub_private_repo=true", "save_steps=1", "max_steps=3")
    uploads = [call for call in FakeHub.calls if call[0] == "me/a-name"]
    assert FakeHub.calls[:2] == [("token", "secret"), ("repo", "a-name", True)] and [call[2] for call in uploads] == [*steps, "end of training"]
    assert uploads[-1] == ("me/a-name", "model", "end of training", True) and FakeHub.calls[-1] == "awaited"


# Other numbers of ranks

def on_two_ranks(folder, *argv, forward=()):
    """The final state of a run by two processes of its own: a second process group in the same ones could meet the first one's keys in torchrun's store."""
    (folder / "arguments.json").write_text(json.dumps(argv))
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run([sys.executable, *launcher, str(ROOT / "tests" / "resume_worker.py"), str(folder / "arguments.json"), str(folder / "out.pt"), *map(str, forward)],
                          capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return torch.load(folder / "out.pt")


def test_saved_with_two_ranks_and_resumed_with_one_and_the_other_way_round_the_state_is_equal_and_training_goes_on(config_path, tmp_path, monkeypatch):
    """The two ranks save in the background, step 2 not before step 4 is on its way. One rank saves that again as it is, and two go on from there as if nothing had been."""
    two = on_two_ranks(tmp_path, config_path, f"output_dir={tmp_path}/two", "save_steps=2", "max_steps=4", forward=[4])
    assert {name.split()[0] for name in two["moments"]} == set(two["parameters"]), "every parameter is the optimizer's"
    of_two = f"resume_from_checkpoint={tmp_path}/two/checkpoint-"
    assert_same(start(config_path, tmp_path / "one", of_two + "4", "max_steps=4"), two)
    further = start(config_path, tmp_path / "one", of_two + "4", "max_steps=6")
    assert any(not torch.equal(further["parameters"][name], two["parameters"][name]) for name in two["parameters"])

    def restore_and_save(self):
        counters, window, progress = restored = restore(self)
        self.save(counters, window, SimpleNamespace(progress=lambda: progress))
        return restored
    restore = Checkpoints.restore
    monkeypatch.setattr(Checkpoints, "restore", restore_and_save)
    start(config_path, tmp_path / "again", of_two + "2", "max_steps=2")
    of_one = f"resume_from_checkpoint={tmp_path}/again/checkpoint-2"
    assert len(list((tmp_path / "two" / "checkpoint-2" / "state").glob("*.distcp"))) == 2 and len(list((tmp_path / "again" / "checkpoint-2" / "state").glob("*.distcp"))) == 1
    after = on_two_ranks(tmp_path, config_path, f"output_dir={tmp_path}/after", of_one, "max_steps=4")
    assert_same(after, two)
