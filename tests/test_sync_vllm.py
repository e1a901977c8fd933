"""Against real vLLM servers on this machine: bit for bit what was sent, adapters, and a proof of sync that sees what did not arrive."""
import json
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import peft
import pytest
import requests
import torch
import torch.distributed as dist
from conftest import ROOT, tiny_config

import sync as sync_module
from metrics import Window
from model import load_policy
from naming import NEVER
from proof import Proof
from serve import answers
from sync import make_sync
from transport import Nccl

TIED, UNTIED = "http://127.0.0.1:8330", "http://127.0.0.1:8331"


@pytest.fixture(scope="module", autouse=True)
def servers(tmp_path_factory, small_model, untied_folder):
    """In fp32: the small model, whose weights vLLM leaves unpacked as on a GPU; and the untied one, which takes adapters."""
    folder = tmp_path_factory.mktemp("servers")
    environment = os.environ | dict(VLLM_SERVER_DEV_MODE="1", VLLM_CPU_KVCACHE_SPACE="1", OMP_NUM_THREADS="1", VLLM_ALLOW_RUNTIME_LORA_UPDATING="1",
                                    PYTHONPATH=f"{ROOT}{os.pathsep}{ROOT / 'tests'}")
    flags = {TIED: (small_model, ["--worker-extension-cls", "plain_linear.PlainCopyPlan"]),
             UNTIED: (untied_folder, ["--enable-lora", "--max-lora-rank", "8", "--max-loras", "4"])}
    processes = []
    for url, (model, more) in flags.items():
        argv = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--host", "127.0.0.1", "--port", url[-4:], "--dtype", "float32",
                "--logprobs-mode", "processed_logprobs", "--enable-scale-out", "--max-model-len", "256", "--enforce-eager", *more]
        with (folder / url[-4:]).open("w") as log:
            processes.append(subprocess.Popen(argv, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True))
    deadline = time.monotonic() + 600
    while not all(map(answers, flags)):
        assert time.monotonic() < deadline and all(p.poll() is None for p in processes), [(folder / url[-4:]).read_text()[-2000:] for url in flags]
        time.sleep(0.5)
    yield
    for process in processes:
        os.killpg(process.pid, 15)
    for process in processes:
        process.wait(60)


@pytest.fixture(scope="module", autouse=True)
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def trainer(folder, model, url, shared=None, **changes):
    config = tiny_config(model=model, output_dir=str(folder), vllm_server_base_url=url, verify_sync_steps=1, vllm_server_timeout=300.0, **changes)
    policy = load_policy(config, torch.device("cpu"))
    sync = make_sync(config, policy, torch.float32, shared)
    return policy, sync, Proof(config, policy, sync, torch.float32)


def change(policy, seed):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in policy.parameters():
            if p.requires_grad:
                p += 0.02 * max(p.std().item(), 0.1) * torch.randn(p.shape, generator=generator)


def distance(proof, version):
    return float(abs(proof.server_scores(0, version) - proof.scores[version]).mean())


def checksums(url):
    return requests.post(url + "/weight_checker", json=dict(action="checksum"), timeout=300).json()["checksums"]


@pytest.fixture(scope="module")
def arrived(tmp_path_factory, small_model, servers):
    """A policy at version 1, its syncs by buffer and by disk, a proof that has held twice."""
    folder = tmp_path_factory.mktemp("run")
    policy, sync, proof = trainer(folder, small_model, TIED, weight_sync_backend="ipc")
    disk = make_sync(tiny_config(model=small_model, output_dir=str(folder), vllm_server_base_url=TIED), policy, torch.float32)
    for version in (0, 1):
        change(policy, version)
        sync.push(version, Window())
        proof.check(version, Window())
    yield policy, sync, disk, proof


def test_a_copy_plan_leaves_the_server_with_the_same_bits_as_vllms_own_reload(arrived):
    policy, sync, disk, _ = arrived
    change(policy, 2)
    before = checksums(TIED)
    sync.push(2, Window())
    by_plan = checksums(TIED)
    last = requests.post(TIED + "/collective_rpc", json=dict(method="load_weights_chunk", kwargs=dict(chunk=0)), timeout=300).json()["results"][0]
    assert last["by_plan"] and all(by_plan[name] != before[name] for name in before)
    disk.push(2, Window())
    assert checksums(TIED) == by_plan


def spoiled(monkeypatch, arrived, version, spoil):
    """The sentence of the proof after a sync in which `spoil(name, tensor, old tensor)` went out instead."""
    policy, sync, _, proof = arrived
    change(policy, version - 1)
    sync.push(version - 1, Window())
    proof.check(version - 1, Window())
    old = {name: tensor.clone() for chunk in range(sync.transport.chunks) for name, tensor in sync.transport.staging.gather(chunk)}
    change(policy, version)
    fill = sync.transport.staging.fill
    with monkeypatch.context() as patch:
        patch.setattr(sync.transport.staging, "fill", lambda chunk, tensors: fill(chunk, [(name, spoil(name, tensor, old[name])) for name, tensor in tensors]))
        sync.push(version, Window())
    with pytest.raises(RuntimeError) as error:
        proof.check(version, Window())
    return str(error.value)


def test_the_proof_sees_one_layer_of_an_older_version(monkeypatch, arrived):
    words = spoiled(monkeypatch, arrived, 4, lambda name, tensor, old: old if ".layers.7." in name else tensor)
    assert f"{TIED} does not serve version 4" in words and "part of it did not arrive" in words


def test_the_proof_sees_a_tensor_on_a_wrong_scale(monkeypatch, arrived):
    words = spoiled(monkeypatch, arrived, 6, lambda name, tensor, old: tensor * 1.5 if name.endswith("layers.3.self_attn.o_proj.weight") else tensor)
    assert f"{TIED} does not serve version 6" in words


def test_the_proof_names_the_version_that_a_server_has_kept(monkeypatch, arrived):
    words = spoiled(monkeypatch, arrived, 8, lambda name, tensor, old: old)
    assert "it seems to serve version 7" in words


def test_the_proof_sees_one_tensor_that_was_not_sent(monkeypatch, arrived):
    policy, sync, disk, proof = arrived
    change(policy, 9)
    disk.push(9, Window())
    proof.check(9, Window())
    change(policy, 10)
    everything = sync_module.gathered_weights
    monkeypatch.setattr(sync_module, "gathered_weights", lambda *args, **how: {
        name: tensor for name, tensor in everything(*args, **how).items() if name != "model.layers.11.mlp.down_proj.weight"})
    disk.push(10, Window())
    with pytest.raises(RuntimeError, match="does not serve version 10"):
        proof.check(10, Window())


def test_the_proof_sees_a_server_that_was_started_anew_from_its_checkpoint(small_model, arrived):
    policy, sync, _, proof = arrived
    sync.push(12, Window())
    requests.post(TIED + "/collective_rpc", json=dict(method="reload_weights", kwargs=dict(weights_path=small_model)), timeout=300)
    requests.post(TIED + "/update_weight_version", json=dict(new_version="default"), timeout=300)
    with pytest.raises(RuntimeError, match="does not serve version 12.*says version 'default', as one that was started anew does"):
        proof.check(12, Window())


def test_five_honest_syncs_pass(arrived):
    policy, sync, _, proof = arrived
    for version in range(20, 25):
        change(policy, version)
        window = Window()
        sync.push(version, window)
        proof.check(version, window)
        assert distance(proof, version) < 1e-4 and window.result()["perf/verify_sync_s"] > 0


def test_broadcasts_to_the_workers_leave_the_same_bits_first_by_vllms_reload_and_then_by_plan(monkeypatch, tmp_path, small_model, arrived, capsys):
    """gloo carries them on a CPU; the model is sent in several chunks, and a second run opens another group."""
    monkeypatch.setattr(Nccl, "limit", 100 << 20)
    for run in range(2):
        policy, sync, proof = trainer(tmp_path, small_model, TIED, weight_sync_backend="nccl")
        assert sync.transport.by_plan and sync.transport.chunks > 3
        for version in range(2):
            change(policy, 40 + 2 * run + version)
            sync.push(version, Window())
            proof.check(version, Window())
            by_broadcast = checksums(TIED)
            make_sync(tiny_config(model=small_model, output_dir=str(tmp_path), vllm_server_base_url=TIED), policy, torch.float32).push(version, Window())
            assert checksums(TIED) == by_broadcast
        said = capsys.readouterr().out
        assert "the server takes the weights by its copy plan" in said, said


def test_merged_adapters_reach_a_server_that_fuses_their_layers(tmp_path, small_model, servers):
    """Only q_proj is adapted: sent alone, it would leave k and v to whatever lay in memory."""
    policy, sync, proof = trainer(tmp_path, small_model, TIED, peft_config=peft.LoraConfig(r=4, target_modules=["q_proj"]))
    requests.post(TIED + "/collective_rpc", json=dict(method="reload_weights", kwargs=dict(weights_path=small_model)), timeout=300)
    for version in (0, 1):
        change(policy, version)
        sync.push(version, Window())
        proof.check(version, Window())
        assert distance(proof, version) < 1e-4


def test_an_untied_model_arrives_by_disk(tmp_path, untied_folder, servers):
    policy, sync, proof = trainer(tmp_path, untied_folder, UNTIED)
    for version in (0, 1):
        change(policy, version)
        sync.push(version, Window())
        proof.check(version, Window())
        assert distance(proof, version) < 1e-4
    assert abs(proof.scores[1] - proof.scores[0]).mean() > 0.01
    requests.post(UNTIED + "/collective_rpc", json=dict(method="reload_weights", kwargs=dict(weights_path=untied_folder)), timeout=300)
    requests.post(UNTIED + "/update_weight_version", json=dict(new_version="default"), timeout=300)


def test_a_server_takes_each_version_of_the_adapters_and_keeps_as_many_as_requests_may_name(tmp_path, untied_folder, servers):
    shared = SimpleNamespace(adapters=SimpleNamespace(value=0), oldest_named=SimpleNamespace(value=NEVER), lost=[0], restored=[0])
    policy, sync, proof = trainer(tmp_path, untied_folder, UNTIED, shared, peft_config=peft.LoraConfig(r=4, target_modules="all-linear"), max_staleness=1)
    assert sync.names_adapters and shared.adapters.value == 1
    for version in range(5):
        change(policy, version)
        sync.push(version, Window())
        proof.check(version, Window())
        assert distance(proof, version) < 1e-4
    assert abs(proof.scores[4] - proof.scores[3]).mean() > 0.01, "the versions differ, so the right one was asked"
    assert float(abs(proof.server_scores(0, 3) - proof.scores[3]).mean()) < 1e-4, "an older version still serves those that name it"
    listed = {model["id"] for model in requests.get(UNTIED + "/v1/models", timeout=300).json()["data"]}
    assert listed - {untied_folder} == {"policy-v3", "policy-v4"}
    with pytest.raises(RuntimeError, match="404"):
        proof.server_scores(0, 2)


def test_two_ranks_train_three_steps_against_a_real_server_and_every_sync_is_proven(tmp_path, small_model, servers):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "train.py", "configs/smollm_cpu.py", f"output_dir={tmp_path}/run",
               f"vllm_server_base_url={TIED}", "launch_server=false", "bf16=false", "max_steps=3", "verify_sync_steps=1", "learning_rate=1e-4", "disable_tqdm=true",
               "max_completion_length=8", "token_budget=96", "max_concurrent_rollouts=16", "max_staleness=0"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [step["model_version"] for step in steps] == [1, 2, 3] and all(step["perf/verify_sync_s"] > 0 for step in steps)
    assert all(step["sampling/sampling_logp_difference/mean"] < 1e-3 for step in steps)
