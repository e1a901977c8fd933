"""train.py as a user runs it: a real model, a real vLLM server on this machine, real gradients, and real failures."""
import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch
from conftest import ROOT
from safetensors.torch import load_file

COMMON = ["configs/smollm_cpu.py", "disable_tqdm=true", "max_completion_length=8", "token_budget=96", "max_concurrent_rollouts=16"]


def start(folder, port, *overrides, launcher=("-u",)):
    command = [sys.executable, *launcher, "train.py", *COMMON, f"output_dir={folder}", f"vllm_server_base_url=http://127.0.0.1:{port}", *overrides]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)


def family(process):
    me = psutil.Process(process.pid)
    return [me, *me.children(recursive=True)]


def left_over(processes):
    return [p for p in psutil.wait_procs(processes, timeout=5)[1] if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_two_steps_train_the_real_model_against_real_vllm(tmp_path, small_model):
    """fp32 on both sides: the server's log-probs are the trainer's, the weights move, and the saved model is the trained one."""
    run = start(tmp_path / "run", 8171, "max_steps=2", "bf16=false", "log_completions=true", launcher=("-m", "torch.distributed.run"))
    out, _ = run.communicate(timeout=280)
    assert run.returncode == 0, out[-3000:]
    steps = metrics(tmp_path / "run")
    assert [s["step"] for s in steps] == [1, 2] and steps[0]["sample/staleness_max"] == 0
    assert steps[0]["sampling/sampling_logp_difference/mean"] < 1e-3 and steps[0]["sampling/importance_sampling_ratio/mean"] == pytest.approx(1, abs=1e-3)
    assert all(s["grad_norm"] > 0 and 0 < s["sampling/sampler_mass"] <= 1 and 0.9 < s["sampling/importance_sampling_ratio/mean"] < 1.1 for s in steps)
    assert steps[1]["num_tokens"] == sum(s["batch/forwarded_tokens_per_step"] for s in steps) and steps[1]["model_version"] == 2
    before, after = load_file(f"{small_model}/model.safetensors"), load_file(tmp_path / "run" / "model" / "model.safetensors")
    assert before.keys() == after.keys() and any((before[k].float() - after[k].float()).abs().max() > 0 for k in before)
    from transformers import AutoModelForCausalLM, AutoTokenizer
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model", dtype="float32")
    assert torch.equal(saved.get_output_embeddings().weight, after["model.embed_tokens.weight"].float())
    assert AutoTokenizer.from_pretrained(tmp_path / "run" / "model").chat_template
    recorded = json.loads((tmp_path / "run" / "config.json").read_text())
    assert recorded["config"]["max_steps"] == 2 and recorded["versions"]["vllm"] and recorded["world_size"] == 1
    assert "completion" in out and not list((tmp_path / "run" / ".weights").iterdir())


def test_with_a_learning_rate_of_zero_every_sync_leaves_the_server_on_the_trainers_policy(tmp_path, small_model):
    run = start(tmp_path / "run", 8172, "max_steps=2", "bf16=false", "learning_rate=0")
    out, _ = run.communicate(timeout=280)
    assert run.returncode == 0, out[-3000:]
    assert [s["model_version"] for s in metrics(tmp_path / "run")] == [1, 2]
    assert all(s["sampling/sampling_logp_difference/mean"] < 0.01 for s in metrics(tmp_path / "run"))


@pytest.mark.parametrize("victim,words", [("vllm", "the vLLM server exited"), ("rollout", "the rollout process died with exit code -9"), ("ctrl-c", "Ctrl-C")])
def test_a_killed_part_or_ctrl_c_ends_the_run_within_30_seconds_with_the_cause_and_no_process_left(tmp_path, small_model, victim, words):
    launcher = ("-m", "torch.distributed.run") if victim == "ctrl-c" else ("-u",)
    run = start(tmp_path / "run", 8173, "max_steps=50", launcher=launcher)
    try:
        deadline = time.monotonic() + 200
        while not ((tmp_path / "run" / "metrics.jsonl").exists() and metrics(tmp_path / "run")):
            assert run.poll() is None and time.monotonic() < deadline, run.communicate()[0][-3000:]
            time.sleep(0.5)
        everyone = family(run)
        started = time.monotonic()
        if victim == "ctrl-c":
            os.killpg(run.pid, signal.SIGINT)
        else:
            marker = {"vllm": "vllm.entrypoints", "rollout": "multiprocessing.spawn import spawn_main"}[victim]
            next(p for p in everyone if marker in " ".join(p.cmdline())).send_signal(signal.SIGKILL)
        out, _ = run.communicate(timeout=60)
        assert time.monotonic() - started < 30 and run.returncode != 0 and words in out, out[-3000:]
        assert not left_over(everyone)
    finally:
        for process in (family(run) if run.poll() is None else []):
            process.kill()


@pytest.mark.parametrize("overrides,words", [
    (["learning_rat=1"], "did you mean 'learning_rate'?"), (["max_steps=many"], "max_steps=many: the value must be int"),
    (["train_dataset=missing.jsonl"], "train_dataset missing.jsonl is not a file"), (["model=missing"], "model='missing' could not be loaded"),
    (["launch_server=false", "vllm_server_timeout=2"], "no vLLM server answered")])
def test_bad_input_is_one_sentence_and_a_non_zero_exit_within_30_seconds(tmp_path, small_model, overrides, words):
    run, started = start(tmp_path / "run", 8174, *overrides), time.monotonic()
    out, _ = run.communicate(timeout=60)
    assert run.returncode not in (0, None) and time.monotonic() - started < 30
    assert words in out and "Traceback" not in out and not (tmp_path / "run" / "model").exists()
