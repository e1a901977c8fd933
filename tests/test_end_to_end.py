"""train.py as a user runs it: a real vLLM server on this machine, real gradients of the real model, and real failures (of runs with a tiny one)."""
import asyncio
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest
import torch
from conftest import ROOT, tiny_config
from safetensors.torch import load_file

from client import Servers
from metrics import Window
from serve import answers
from tools import _top_arrays

COMMON = ["disable_tqdm=true", "max_completion_length=8", "token_budget=96", "max_concurrent_rollouts=16"]


def start(folder, port, *overrides, launcher=("-u",), config="configs/smollm_cpu.py"):
    command = [sys.executable, *launcher, "train.py", str(config), *COMMON, f"output_dir={folder}", f"vllm_server_base_url=http://127.0.0.1:{port}", *overrides]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)


def family(process):
    me = psutil.Process(process.pid)
    return [me, *me.children(recursive=True)]


def left_over(processes):
    return [p for p in psutil.wait_procs(processes, timeout=15)[1] if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def server(tmp_path_factory, small_model):
    """The port of a server as `serve.py` runs it, in fp32, shared by the tests that do not kill it."""
    log = (tmp_path_factory.mktemp("server") / "log").open("w+")
    process = subprocess.Popen([sys.executable, "serve.py", "configs/smollm_cpu.py", "bf16=false", "vllm_server_base_url=http://127.0.0.1:8171"],
                               cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    deadline = time.monotonic() + 400
    while not answers("http://127.0.0.1:8171"):
        log.seek(0)
        assert process.poll() is None and time.monotonic() < deadline, log.read()[-3000:]
        time.sleep(0.5)
    everyone = family(process)
    yield 8171
    process.terminate()
    left_over(everyone)
    for survivor in [p for p in everyone if p.is_running()]:
        survivor.kill()


PROMPT, K = list(range(1000, 1012)), 8


def turns(port, model, requests, packed):
    """The server's turns for these changes to a request, all at once; `packed` where it finds out by itself how to ask."""
    config, window = tiny_config(model=model, vllm_server_base_url=f"http://127.0.0.1:{port}", vllm_server_timeout=300.0), Window()
    sampling = dict(temperature=1.0, max_tokens=12, logprobs=K + 1, seed=1, detokenize=False, ignore_eos=True)

    async def work():
        async with Servers(config, config.server_urls, [0], [0], lambda: 0, window) as servers:
            servers.packs[0] = None if packed else False
            made = await asyncio.gather(*(servers.generate(PROMPT, sampling | changes) for changes in requests))
            assert servers.packs == [packed] and "rollout/vllm_retry_count" not in window.result()
            return made
    return asyncio.run(work())


def assert_same(turn, plain, candidates, tolerance):
    """The same tokens, log-probs and most likely tokens, up to ties."""
    assert turn.output_ids == plain.output_ids and len(turn.output_log_probs) == len(plain.output_ids) and None not in turn.output_log_probs
    assert turn.output_log_probs == pytest.approx(plain.output_log_probs, abs=tolerance)
    (ids, values), (plain_ids, plain_values) = (_top_arrays(t.output_sampler_logprobs, K) for t in (turn, plain))
    assert (np.isfinite(values).sum(1) == candidates).all() and np.array_equal(np.isfinite(values), np.isfinite(plain_values))
    assert np.allclose(values, plain_values, rtol=0, atol=tolerance)
    alone = np.pad(abs(np.diff(np.nan_to_num(plain_values))) > 2 * tolerance, ((0, 0), (1, 1)), constant_values=True)       # no tie with a neighbour
    clear = alone[:, 1:] & alone[:, :-1] & (np.arange(K) < K - 1)          # the last one's equal may lie outside
    assert np.array_equal(ids[clear], plain_ids[clear]) and clear.mean() > 0.5


@pytest.mark.parametrize("changes,candidates", [(dict(), K), (dict(top_k=5, temperature=0.7, seed=2), 5)])
def test_packed_logprobs_are_those_that_vllm_sends_unpacked(small_model, server, changes, candidates):
    """One after the other, so that each is alone in its batch; the first computes the prompt for both."""
    _, [plain], [packed] = (turns(server, small_model, [changes], packed) for packed in (True, False, True))
    assert len(packed.output_ids) == 12 and packed.version_told == plain.version_told and packed.model_version == plain.model_version
    assert_same(packed, plain, candidates, 0.0)


def test_packed_logprobs_stay_with_their_request_while_others_come_and_end(small_model, server):
    requests = [dict(seed=n, max_tokens=2 + 3 * (n % 4), top_k=5) for n in range(10)]
    for turn, plain in zip(turns(server, small_model, requests, True), turns(server, small_model, requests, False)):
        assert_same(turn, plain, 5, 1e-4)


def test_three_steps_train_the_real_model_against_real_vllm_which_samples_from_the_trained_policy_after_every_sync(tmp_path, small_model, server):
    """fp32 on both sides: the server's log-probs are the trainer's, also from its output head (vLLM on a CPU holds a copy of a tied one, which once
    stayed at its first value); the weights move, and the saved model is the trained one."""
    run = start(tmp_path / "run", server, "max_steps=3", "bf16=false", "launch_server=false", "log_completions=true", "learning_rate=3e-4", "max_staleness=0",
                launcher=("-m", "torch.distributed.run", "--standalone"))
    out, _ = run.communicate(timeout=600)
    assert run.returncode == 0, out[-3000:]
    steps = metrics(tmp_path / "run")
    assert [s["step"] for s in steps] == [s["model_version"] for s in steps] == [1, 2, 3] and all(s["sample/staleness_max"] == 0 for s in steps)
    assert all(s["sampling/sampling_logp_difference/mean"] < 1e-3 for s in steps), [s["sampling/sampling_logp_difference/mean"] for s in steps]
    assert all(s["grad_norm"] > 0 and 0 < s["sampling/sampler_mass"] <= 1 and s["sampling/importance_sampling_ratio/mean"] == pytest.approx(1, abs=1e-3) for s in steps)
    assert steps[2]["num_tokens"] == sum(s["batch/forwarded_tokens_per_step"] for s in steps)
    before, after = load_file(f"{small_model}/model.safetensors"), load_file(tmp_path / "run" / "model" / "model.safetensors")
    assert before.keys() == after.keys() and any((before[k].float() - after[k].float()).abs().max() > 0 for k in before)
    from transformers import AutoModelForCausalLM, AutoTokenizer
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model", dtype="float32")
    assert torch.equal(saved.get_output_embeddings().weight, after["model.embed_tokens.weight"].float())
    assert AutoTokenizer.from_pretrained(tmp_path / "run" / "model").chat_template
    recorded = json.loads((tmp_path / "run" / "config.json").read_text())
    assert recorded["config"]["max_steps"] == 3 and recorded["versions"]["vllm"] and recorded["world_size"] == 1
    assert "completion" in out and not list((tmp_path / "run" / ".weights").iterdir())


def wait_for_a_step(run, folder):
    deadline = time.monotonic() + 600
    while not ((folder / "metrics.jsonl").exists() and metrics(folder)):
        assert run.poll() is None and time.monotonic() < deadline, run.communicate()[0][-3000:]
        time.sleep(0.5)
    return family(run)


def end_within_30_seconds(run, everyone, words):
    """The run has just been hurt: it ends with the cause printed, a non-zero exit and no process of it left."""
    started = time.monotonic()
    try:
        out, _ = run.communicate(timeout=60)
        assert time.monotonic() - started < 30 and run.returncode != 0 and words in out, out[-3000:]
        assert not left_over(everyone)
    finally:
        for process in (family(run) if run.poll() is None else []):
            process.kill()


def test_a_killed_rollout_process_ends_the_run_and_leaves_somebody_elses_server_alone(tmp_path, server):
    run = start(tmp_path / "run", server, "max_steps=50", "bf16=false", "launch_server=false")
    everyone = wait_for_a_step(run, tmp_path / "run")
    next(p for p in everyone if "multiprocessing.spawn import spawn_main" in " ".join(p.cmdline())).kill()
    end_within_30_seconds(run, everyone, "the rollout process died with exit code -9")
    assert answers(f"http://127.0.0.1:{server}")


@pytest.fixture
def quick(tmp_path, untied_folder):
    """The quick start's config for a model whose first step comes soon after its server: tiny, and every group rewarded unlike."""
    (tmp_path / "x.py").write_text(f"""
import sys
from dataclasses import replace
sys.path.insert(0, {str(ROOT / "configs")!r})
from smollm_cpu import config
config = replace(config, model={untied_folder!r}, reward_funcs=lambda completion_ids, **columns: [i % 2.0 for i in range(len(completion_ids))])
""")
    return tmp_path / "x.py"


def test_killed_vllm_ends_the_run_with_the_end_of_its_log(tmp_path, quick):
    run = start(tmp_path / "run", 8173, "max_steps=5000", config=quick)
    everyone = wait_for_a_step(run, tmp_path / "run")
    next(p for p in everyone if "vllm.entrypoints" in " ".join(p.cmdline())).kill()
    end_within_30_seconds(run, everyone, "the vLLM server exited")


def test_ctrl_c_under_torchrun_stops_the_server_too(tmp_path, quick):
    run = start(tmp_path / "run", 8174, "max_steps=5000", "save_strategy=no", launcher=("-m", "torch.distributed.run", "--standalone"), config=quick)
    everyone = wait_for_a_step(run, tmp_path / "run")
    os.killpg(run.pid, signal.SIGINT)
    end_within_30_seconds(run, everyone, "Ctrl-C")


@pytest.mark.parametrize("overrides,words", [
    (["learning_rat=1"], "did you mean 'learning_rate'?"), (["train_dataset=missing.jsonl"], "train_dataset missing.jsonl is not a file"), (["model=missing"], "model='missing' could not be loaded"),
    (["launch_server=false", "vllm_server_timeout=2"], "no vLLM server answered")])
def test_bad_input_is_one_sentence_and_a_non_zero_exit_within_30_seconds(tmp_path, small_model, overrides, words):
    run, started = start(tmp_path / "run", 8175, *overrides), time.monotonic()
    out, _ = run.communicate(timeout=60)
    assert run.returncode not in (0, None) and time.monotonic() - started < 30
    assert words in out and "Traceback" not in out and not (tmp_path / "run" / "model").exists()
