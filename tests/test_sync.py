"""Weights to the server, in the right order, bit for bit, or an error that names the phase; and a run against a server that records."""
import asyncio
import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from aiohttp import web
from conftest import ROOT, tiny_config, tiny_lm, tiny_lora, tiny_moe
from fake_server import FakeServer, by_seed
from resume_worker import run as run_here
from safetensors.torch import load_file

import sync as sync_module
import train
import transport
from config import ConfigError
from metrics import Window
from model import Policy
from sync import Control, make_sync
from weights import gathered_weights


class FakeVllm(FakeServer):
    """The endpoints that training needs; `calls` in order, weights as they lay on disk when told to reload, `failing` paths answer 500."""

    def __init__(self, answer=by_seed, failing=(), missing=(), keep=True, model="", length=128, hanging=(), served=dict()):
        super().__init__(answer)
        self.model, self.length, self.served = model, length, served
        self.calls, self.received, self.failing, self.missing, self.keep, self.hanging = [], [], failing, missing, keep, hanging

    async def _generate(self, request):
        self.calls.append("generate")
        return await super()._generate(request)

    async def _control(self, request):
        path = request.path
        self.calls.append(path + ("?" + request.query_string if request.query_string else ""))
        if path in self.hanging:
            await asyncio.sleep(30)
        if path in self.failing or path in self.missing:
            return web.Response(status=500 if path in self.failing else 404, text="no memory left")
        if path == "/collective_rpc":
            body = await request.json()
            assert body["method"] == "reload_weights"
            if self.keep:
                self.received.append(load_file(Path(body["kwargs"]["weights_path"]) / "model.safetensors"))
        if path == "/update_weight_version":
            self.calls[-1] += f":{(await request.json())['new_version']}"
        return web.json_response({})

    async def _start(self):
        app = web.Application(client_max_size=1 << 30)
        app.router.add_post("/inference/v1/generate", self._generate)
        app.router.add_get("/metrics", self._get)
        for path in ("/pause", "/collective_rpc", "/reset_prefix_cache", "/update_weight_version", "/resume"):
            app.router.add_post(path, self._control)
        info = dict(vllm_config=dict(model_config=dict(dtype="torch.float32", logprobs_mode="processed_logprobs", max_logprobs=20) | self.served))
        for path, body in {"/health": {}, "/v1/models": dict(data=[dict(id=self.model, root=None, max_model_len=self.length)]), "/server_info": info}.items():
            async def answer(request, body=body):
                return web.json_response(body)
            app.router.add_get(path, answer)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        return runner


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


ORDER = ["/pause?mode=keep", "/collective_rpc", "/reset_prefix_cache?reset_running_requests=true", "/update_weight_version:7", "/resume"]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_server_receives_every_parameter_in_its_dtype_a_tied_one_under_both_names_and_the_masters_keep_theirs(tmp_path, group, tied, dtype):
    policy = Policy(tiny_lm(tied=tied), 1.0, "sdpa")
    before = {name: p.detach().clone() for name, p in policy.lm.named_parameters(remove_duplicate=False)}
    with FakeVllm() as server:
        make_sync(tiny_config(output_dir=str(tmp_path), vllm_server_base_url=server.url), policy, dtype).push(7, Window())
        assert server.calls == ORDER
        received = server.received[0]
    assert received.keys() == before.keys() and "lm_head.weight" in received       # vLLM on a CPU keeps a head of its own
    assert tied == (policy.lm.lm_head.weight is policy.lm.model.embed_tokens.weight)
    assert all(torch.equal(received[name], before[name].to(dtype)) and received[name].dtype == dtype for name in before)
    assert all(torch.equal(p, before[name]) and p.dtype == torch.float32 for name, p in policy.lm.named_parameters())
    assert list((tmp_path / ".weights").iterdir()) == []


def test_names_carry_no_prefix_of_a_wrapper(group):
    policy = Policy(tiny_lm(), 1.0, "sdpa")
    policy.lm.gradient_checkpointing_enable(dict(use_reentrant=False))
    assert list(gathered_weights(policy, torch.float32)) == [name for name, _ in tiny_lm().named_parameters()]


def test_experts_go_out_under_the_names_of_the_checkpoint(tmp_path, group):
    """transformers fuses experts in memory; what is sent is what `save_pretrained` writes."""
    policy = Policy(tiny_moe(), 1.0, "sdpa")
    policy.lm.save_pretrained(tmp_path)
    saved, sent = load_file(tmp_path / "model.safetensors"), gathered_weights(policy, torch.float32)
    assert sent.keys() == saved.keys() and all(torch.equal(sent[name], saved[name]) for name in saved)


def test_a_persistent_buffer_is_sent_as_it_is_and_a_derived_one_is_not(group):
    lm = tiny_lm()
    lm.model.register_buffer("bias_of_a_router", torch.tensor([1.5, 2.5]))
    sent = gathered_weights(Policy(lm, 1.0, "sdpa"), torch.bfloat16)
    assert torch.equal(sent["model.bias_of_a_router"], torch.tensor([1.5, 2.5])) and not any("inv_freq" in name for name in sent)


@pytest.mark.parametrize("path,phase", [("/pause", "pause"), ("/collective_rpc", "reload"), ("/reset_prefix_cache", "prefix cache"), ("/resume", "resume")])
def test_a_failing_phase_is_an_error_that_names_it_and_the_servers_words(tmp_path, group, path, phase):
    with FakeVllm(failing=(path,)) as server:
        sync = make_sync(tiny_config(output_dir=str(tmp_path), vllm_server_base_url=server.url), Policy(tiny_lm(), 1.0, "sdpa"), torch.float32)
        with pytest.raises(RuntimeError, match=rf"phase '.*{phase}'.*no memory left"):
            sync.push(1, Window())
        if path == "/pause":
            assert server.calls[-1] == "/resume", "it has all of its old weights and may serve on"
        else:
            assert server.calls[-1].startswith(path), "nothing is asked of a server whose update failed, so it stays paused"


def test_a_server_that_does_not_pause_in_time_ends_the_sync_long_before_the_servers_timeout(tmp_path, group, monkeypatch):
    """One that waits in the broadcast of a killed trainer answers /health as ever."""
    monkeypatch.setattr(sync_module, "ENGINE_SECONDS", 0.3)
    with FakeVllm(hanging=("/pause", "/resume")) as server:
        weights = make_sync(tiny_config(output_dir=str(tmp_path), vllm_server_base_url=server.url, vllm_server_timeout=60.0), Policy(tiny_lm(), 1.0, "sdpa"), torch.float32)
        started = time.monotonic()
        with pytest.raises(RuntimeError, match="phase 'pause' at .*no answer in 0 s.*start the run again, or the server"):
            weights.push(1, Window())
        assert time.monotonic() - started < 30 and "/collective_rpc" not in server.calls


def test_an_nccl_run_ends_at_its_start_where_a_server_waits_in_another_trainers_broadcast(tmp_path, group, monkeypatch):
    monkeypatch.setattr(transport, "ENGINE_SECONDS", 0.3)
    with FakeVllm(hanging=("/collective_rpc",)) as server, pytest.raises(ConfigError, match=f"{server.url} did not answer /collective_rpc.*was killed: start it again"):
        make_sync(tiny_config(output_dir=str(tmp_path), vllm_server_base_url=server.url, vllm_server_timeout=60.0, weight_sync_backend="nccl"), Policy(tiny_lm(), 1.0, "sdpa"), torch.float32)


def test_a_server_of_ours_that_ends_during_what_is_asked_once_is_told_by_its_log_though_its_process_outlives_the_connection():
    """That of an update by nccl, which is not repeated, was once told as a server that cannot be reached."""
    checks = []

    def check():
        checks.append(1)
        if len(checks) == 3:
            raise ConfigError("the vLLM server exited; the end of its log")
    with pytest.raises(ConfigError, match="the end of its log"):
        Control(["http://127.0.0.1:9"], 20.0, check).post(0, "update", "/collective_rpc", {}, once=True)


def test_a_server_without_per_token_versions_is_synced_all_the_same(tmp_path, group):
    with FakeVllm(missing=("/update_weight_version",)) as server:
        make_sync(tiny_config(output_dir=str(tmp_path), vllm_server_base_url=server.url), Policy(tiny_lm(), 1.0, "sdpa"), torch.float32).push(7, Window())
        assert server.calls == ORDER[:3] + ["/update_weight_version:7".split(":")[0], "/resume"]


def test_merged_adapters_go_with_the_whole_model_at_first_and_to_a_server_that_is_back_and_else_with_what_changes(tmp_path, group):
    """Another run may have trained on the same server what this one leaves frozen; in bf16 its leftovers passed the proof of sync."""
    policy, shared, everything = tiny_lora(target_modules=["q_proj"]), SimpleNamespace(lost=[0, 0], restored=[0, 0]), tiny_lm().state_dict().keys()
    with FakeVllm() as a, FakeVllm(model="tiny") as b:
        sync = make_sync(tiny_config(output_dir=str(tmp_path), vllm_server_base_url=[a.url, b.url]), policy, torch.float32, shared)
        for version in range(4):
            shared.lost[1] += version == 2
            sync.push(version, Window())
        whole = [received.keys() == everything for received in a.received]
        assert whole == [True, False, True, False] and len(b.received) == 4 and torch.equal(a.received[0]["model.embed_tokens.weight"], tiny_lm().model.embed_tokens.weight)
        assert {name.split(".")[-2] for name in a.received[1]} == {"q_proj", "k_proj", "v_proj", "o_proj"}


@pytest.mark.parametrize("other,words", [(dict(served=dict(logprobs_mode="raw_logprobs")), "logprobs_mode raw_logprobs"), (dict(length=64), "max_model_len 64, the run needs 128"),
                                         (dict(model="other"), "serves other")])
def test_a_server_that_is_back_as_another_stays_out_and_one_that_fits_is_taken_back_and_due_for_a_proof(tmp_path, group, capsys, other, words):
    shared = SimpleNamespace(lost=[0, 0], restored=[0, 0])
    with FakeVllm(keep=False) as a, FakeVllm(**dict(keep=False, model="tiny") | other) as b:
        sync = make_sync(tiny_config(output_dir=str(tmp_path), vllm_server_base_url=[a.url, b.url]), Policy(tiny_lm(), 1.0, "sdpa"), torch.float32, shared, max_model_len=128)
        for version in range(3):
            shared.lost[1] += version == 1
            sync.push(version, Window())
            assert sync.current == ([0, 1] if version == 0 else [0])
        said = capsys.readouterr().out
        assert f"still out of use: the server at {b.url}" in said and words in said and len(b.calls) == 5 and said.count("still") == 1, "asked again after REST_SECONDS"
    with FakeVllm(keep=False) as a, FakeVllm(keep=False, model="tiny") as b:
        sync.control.urls, sync.resting, sync.check_back = [a.url, b.url], {}, lambda server: None
        sync.push(3, Window())
        assert sync.current == [0, 1] and sync.whole
        sync.push(4, Window())
        assert not sync.whole


def test_a_server_that_came_back_and_failed_the_proof_is_left_alone_for_a_while(tmp_path, group):
    shared = SimpleNamespace(lost=[0, 1], restored=[0, 0])
    with FakeVllm(keep=False, model="tiny") as a, FakeVllm(keep=False, model="tiny") as b:
        sync = make_sync(tiny_config(output_dir=str(tmp_path), vllm_server_base_url=[a.url, b.url]), Policy(tiny_lm(), 1.0, "sdpa"), torch.float32, shared)
        sync.push(0, Window())
        assert sync.current == [0, 1]
        sync.leave_out(1, "wrong scores")
        calls = len(b.calls)
        sync.push(1, Window())
        assert sync.current == [0] and shared.restored == [0, -1] and len(b.calls) == calls, "asked again after REST_SECONDS"
        sync.resting.clear()
        sync.push(2, Window())
        assert sync.current == [0, 1]
        shared.lost[0], shared.restored[0] = 1, 1
        sync.push(3, Window())
        sync.leave_out(0, "silent")
        sync.push(4, Window())
        assert sync.current == [0, 1], "one that was long in use is asked at once"


@pytest.mark.parametrize("full,words", [(False, "phase 'reload' at .*no memory left"), (True, r"phase 'writing' .*No space left on device\)\. The server")])
def test_with_one_server_long_dead_the_runs_end_names_what_befell_the_other(tmp_path, group, monkeypatch, full, words):
    def no_space(*args):
        raise OSError(28, "No space left on device")
    shared = SimpleNamespace(lost=[1, 0], restored=[0, 0])
    with FakeVllm(keep=False, failing=() if full else ("/collective_rpc",)) as server:
        sync = make_sync(tiny_config(output_dir=str(tmp_path), vllm_server_base_url=["http://127.0.0.1:9", server.url]), Policy(tiny_lm(), 1.0, "sdpa"), torch.float32, shared)
        monkeypatch.setattr(sync_module, "write_weights", no_space) if full else None
        with pytest.raises(RuntimeError, match=words):
            sync.push(1, Window())


def test_a_signal_that_stops_the_run_at_once_does_so_during_a_sync(tmp_path, group):
    """The threads that talk to the servers were once waited for, up to vllm_server_timeout."""
    def stop(number, frame):
        raise KeyboardInterrupt
    with FakeVllm(keep=False, hanging=("/collective_rpc",)) as server:
        sync, before, started = make_sync(tiny_config(output_dir=str(tmp_path), vllm_server_base_url=server.url), Policy(tiny_lm(), 1.0, "sdpa"), torch.float32), signal.signal(signal.SIGALRM, stop), time.monotonic()
        try:
            signal.setitimer(signal.ITIMER_REAL, 1.0)
            with pytest.raises(KeyboardInterrupt):
                sync.push(1, Window())
        finally:
            signal.signal(signal.SIGALRM, before)
        assert time.monotonic() - started < 20 and "/collective_rpc" in server.calls and all(thread.daemon for thread in threading.enumerate() if thread is not threading.main_thread())


def test_a_hung_server_out_of_use_costs_one_sync_its_pause_and_the_next_ones_nothing(tmp_path, group, monkeypatch):
    shared = SimpleNamespace(lost=[0, 1], restored=[0, 0])
    with FakeVllm(keep=False, model="tiny") as a, FakeVllm(keep=False, model="tiny", hanging=("/pause",)) as b:
        sync = make_sync(tiny_config(output_dir=str(tmp_path), vllm_server_base_url=[a.url, b.url], vllm_server_timeout=0.3), Policy(tiny_lm(), 1.0, "sdpa"), torch.float32, shared)
        for version in range(3):
            sync.push(version, Window())
        assert sync.current == [0] and b.calls.count("/pause?mode=keep") == 1
        monkeypatch.setattr(sync_module, "REST_SECONDS", 0.0)
        sync.resting.clear()
        sync.push(3, Window())
        assert b.calls.count("/pause?mode=keep") == 2
        sync.resting[1], shared.lost[0] = (time.monotonic() + 1000, RuntimeError("hung")), 1
        sync.push(4, Window())
        assert b.calls.count("/pause?mode=keep") == 3 and sync.current == [0], "where none is in use all are asked"


CONFIG = """
from config import Config
import rollout
class Broken(rollout.AsyncRolloutLoop):
    def compute_advantages(self, group):
        return super().compute_advantages(group) * {factor}
config = Config(model={model!r}, reward_funcs=lambda completion_ids, **kw: [float(ids[0] % 2) for ids in completion_ids], loop_cls=Broken,
                train_dataset=lambda: [dict(prompt=[dict(role="user", content=str(i))]) for i in range({prompts})], num_generations=4,
                max_completion_length=4, num_sampler_logprobs=2, bf16=False, use_cpu=True, disable_tqdm=True, max_staleness=2, verify_sync_steps=0, **(dict(token_budget=96) | dict({more})))
"""


def exit_code(argv):
    try:
        run_here(argv)
    except SystemExit as ended:
        return ended.code
    return 0


def run(tmp_path, server, factor="1", prompts=6, more="max_steps=2", ranks=1, capsys=None):
    """train.py as a process or, with `capsys`, its `main` in this one, which has long imported all it needs."""
    (tmp_path / "x.py").write_text(CONFIG.format(model=server.model, factor=factor, prompts=prompts, more=more))
    argv = [str(tmp_path / "x.py"), f"vllm_server_base_url={server.url}", f"output_dir={tmp_path}/run"]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)] if ranks > 1 else []
    if capsys:
        code, (out, err) = exit_code(argv), capsys.readouterr()
        done = SimpleNamespace(returncode=code, stdout=out, stderr=err)
    else:
        done = subprocess.run([sys.executable, *launcher, "train.py", *argv], cwd=ROOT, capture_output=True, text=True, timeout=600)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines() if (tmp_path / "run" / "metrics.jsonl").exists() else []
    return done, [json.loads(line) for line in lines]


def test_nothing_is_generated_before_the_first_sync_and_each_step_ends_in_one(tmp_path, tiny_folder):
    with FakeVllm(keep=False, model=tiny_folder) as server:
        done, steps = run(tmp_path, server)
        assert done.returncode == 0, done.stderr[-2000:]
        syncs = [call for call in server.calls if call.startswith("/update_weight_version")]
        assert syncs == [f"/update_weight_version:{version}" for version in (0, 1, 2)] and len(steps) == 2
        assert server.calls.index("generate") > server.calls.index("/resume")


def test_two_ranks_train_an_epoch_sync_and_save_like_one(tmp_path, tiny_folder):
    with FakeVllm(keep=False, model=tiny_folder) as server:
        done, steps = run(tmp_path, server, prompts=5, more="num_train_epochs=1.0", ranks=2)
        assert done.returncode == 0, done.stderr[-2000:]
        syncs = [call for call in server.calls if call.startswith("/update_weight_version")]
    assert syncs == [f"/update_weight_version:{version}" for version in range(len(steps) + 1)]
    assert sum(s["batch/samples_per_step"] for s in steps) == 20 and steps[-1]["epoch"] == 1.0
    before, after = load_file(f"{tiny_folder}/model.safetensors"), load_file(tmp_path / "run" / "model" / "model.safetensors")
    assert {name: tensor.shape for name, tensor in before.items()} == {name: tensor.shape for name, tensor in after.items()}


@pytest.mark.parametrize("factor,failing,words", [("1", ("/collective_rpc",), "phase 'reload'"), ("(1 / 0)", (), "ZeroDivisionError")])
def test_when_rank_0_fails_the_other_rank_does_not_wait_for_it(tmp_path, tiny_folder, factor, failing, words):
    with FakeVllm(keep=False, failing=failing, model=tiny_folder) as server:
        started = time.monotonic()
        done, _ = run(tmp_path, server, factor, ranks=2)
    assert done.returncode != 0 and words in done.stderr and time.monotonic() - started < 300         # not the 1800 s of a collective


def test_a_gradient_that_is_not_finite_is_reported_and_leaves_the_weights_as_they_are(tmp_path, tiny_folder, capsys):
    with FakeVllm(keep=False, model=tiny_folder) as server:
        done, steps = run(tmp_path, server, factor="1e38", capsys=capsys,
                          more="max_steps=2, learning_rate=1.0, score_centering=False, vllm_importance_sampling_clip_min=0.0, vllm_importance_sampling_clip_max=1e30")
    assert done.returncode == 0, done.stderr[-2000:]
    assert [s["batch/nonfinite_gradient_count"] for s in steps] == [1, 1] and steps[0]["loss"] is None
    assert "the weights stay as they are" in done.stdout
    before, after = load_file(f"{tiny_folder}/model.safetensors"), load_file(tmp_path / "run" / "model" / "model.safetensors")
    assert all(torch.equal(before[name].float(), after[name].float()) for name in before)


def test_an_epoch_trains_every_prompt_once_and_the_last_step_may_be_small(tmp_path, tiny_folder, capsys):
    """5 prompts x 4 rollouts fit no whole number of rows: none is lost, and the run ends by itself."""
    with FakeVllm(keep=False, model=tiny_folder) as server:
        done, steps = run(tmp_path, server, prompts=5, more="num_train_epochs=1.0", capsys=capsys)
        assert done.returncode == 0, done.stderr[-2000:]
        assert server.calls.count("generate") == 20 and sum(s["batch/samples_per_step"] for s in steps) == 20
        assert steps[-1]["epoch"] == 1.0


def test_groups_of_equal_rewards_alone_end_in_a_sentence_and_no_model(tmp_path, tiny_folder):
    with FakeVllm(lambda body: by_seed(body | dict(sampling_params=body["sampling_params"] | dict(seed=0))), keep=False, model=tiny_folder) as server:
        done, steps = run(tmp_path, server, prompts=2, more="num_train_epochs=1.0, rollout_worker_timeout=60.0")
    assert done.returncode == 2 and "nothing was trained" in done.stderr and not steps and not (tmp_path / "run" / "model").exists()


def test_a_full_gpu_ends_the_run_with_what_to_change(tmp_path, monkeypatch, capsys):
    def full(*args):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    monkeypatch.setattr(train, "train", full)
    (tmp_path / "x.py").write_text("from config import Config\nconfig = Config(model='m', train_dataset=list, reward_funcs=len, use_cpu=True)")
    assert exit_code([str(tmp_path / "x.py"), f"output_dir={tmp_path}/run"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: the GPU is full: lower token_budget") and said.endswith("Tried to allocate 2.00 GiB.\n")


def test_under_a_budget_below_the_prompt_every_sample_is_dropped_with_a_warning_and_the_run_ends_in_a_sentence(tmp_path, tiny_folder, capsys):
    with FakeVllm(keep=False, model=tiny_folder) as server:
        done, steps = run(tmp_path, server, prompts=2, more="num_train_epochs=1.0, token_budget=16", capsys=capsys)
    assert done.returncode == 2 and "nothing was trained" in done.stderr and not steps and done.stdout.count("raise token_budget=16 to train on it") == 8


def test_a_sync_that_fails_ends_the_run_and_says_so(tmp_path, tiny_folder):
    with FakeVllm(keep=False, failing=("/collective_rpc",), model=tiny_folder) as server:
        done, steps = run(tmp_path, server)
        assert done.returncode == 2 and "phase 'reload'" in done.stderr and not steps and "generate" not in server.calls
        assert "Traceback" not in done.stderr and done.stderr.splitlines()[-1].startswith("error: weight sync failed")
