"""Long drills against real vLLM on the CPU, apart from the test run:  pytest tests/drills.py  (about 25 minutes)."""
import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace

import requests
import torch
import torch.distributed as dist
from aiohttp import web
from conftest import ROOT
from proxy import Proxy

from config import load_config
from export import save_model
from flags import server_command
from metrics import Window
from model import load_policy, load_tokenizer
from proof import Proof
from serve import answers
from shard import shard
from sync import make_sync
from tools import render

CONFIG = '''
import sys
from dataclasses import replace
sys.path.insert(0, {configs!r})
from smollm_cpu import config
config = replace(config, launch_server=False, max_completion_length=8, token_budget=192, vllm_server_timeout={timeout})
import planning
if hasattr(sys.modules["__main__"], "forward_backward"):        # in the trainer: write down what is trained
    plain = planning.pack_row
    def recording(samples, multiple=1):
        with open({trained!r}, "a") as file:
            file.writelines(f"{{sample.rollout_id}} {{sample.group_id}}\\n" for sample in samples)
        return plain(samples, multiple)
    planning.pack_row = recording
'''


def serve(port, folder):
    """A vLLM server of the drill's config."""
    with (folder / f"vllm_{port}.log").open("w") as log:
        return subprocess.Popen([sys.executable, "serve.py", "configs/smollm_cpu.py", f"vllm_server_base_url=http://127.0.0.1:{port}"],
                                cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)


def stop(process):
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def until(condition, seconds):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.5)


def start_training(folder, urls, timeout, **overrides):
    path = folder / "drill.py"
    path.write_text(CONFIG.format(configs=str(ROOT / "configs"), trained=str(folder / "trained"), timeout=timeout))
    command = [sys.executable, "train.py", str(path), f"vllm_server_base_url={','.join(urls)}", f"output_dir={folder}/run", "disable_tqdm=true",
               *(f"{key}={value}" for key, value in overrides.items())]
    with (folder / "train.log").open("w") as log:
        return subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)


def logged(folder):
    path = folder / "run" / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


class FaultyProxy(Proxy):
    """In front of a server: 5 % of the sampling requests are refused, 5 % never answered, 2 % of the replies cut off, and one outage."""

    def __init__(self, target, seed=0):
        super().__init__(target)
        self.random, self.outage_until, self.faults = random.Random(seed), 0.0, Counter()

    async def handle(self, request):
        if time.monotonic() < self.outage_until:
            self.faults["outage"] += 1
            request.transport.abort()
            return web.Response()
        kind = self.random.choices(("refused", "silent", "cut", None), (5, 5, 2, 88))[0] if request.path.endswith("/generate") else None
        self.faults[kind] += 1
        if kind == "refused":
            request.transport.abort()
            return web.Response()
        if kind == "silent":
            await asyncio.sleep(3600)
        status, content, content_type = await self.forward(request)
        if time.monotonic() < self.outage_until:
            request.transport.abort()
        return web.Response(body=content[:len(content) // 2] if kind == "cut" else content, status=status, content_type=content_type)


def test_thirty_steps_finish_through_a_faulty_network_with_every_loss_counted_and_nothing_trained_twice(tmp_path):
    server = serve(8181, tmp_path)
    try:
        until(lambda: answers("http://127.0.0.1:8181"), 180)
        with FaultyProxy("http://127.0.0.1:8181") as proxy:
            run = start_training(tmp_path, [proxy.url], timeout=30, max_steps=30, learning_rate=2e-6)     # at 1e-5 the task is solved by step 20, and a step waits minutes for two different rewards
            try:
                until(lambda: len(logged(tmp_path)) >= 10 or run.poll() is not None, 900)
                proxy.outage_until = time.monotonic() + 20
                until(lambda: run.poll() is not None, 1500)
                faults = proxy.faults
            finally:
                run.kill()
    finally:
        stop(server)
    text, steps = (tmp_path / "train.log").read_text(), logged(tmp_path)
    assert run.returncode == 0 and len(steps) == 30, text[-3000:]
    lost = sum(faults[kind] for kind in ("refused", "silent", "cut", "outage"))
    counted = sum(step.get("rollout/vllm_retry_count", 0) + step.get("perf/weight_sync_retry_count", 0) for step in steps)
    trained = [line.split()[0] for line in (tmp_path / "trained").read_text().splitlines()]
    print(dict(faults=dict(faults), retries_counted=counted, trained=len(trained), steps=len(steps)))
    # Requests still being retried, and metrics not yet reported, when the run ends are the difference.
    assert 0.8 * lost <= counted <= lost + 40 and faults["outage"] > 0
    assert len(set(trained)) == len(trained) and all(re.fullmatch("[0-9a-f]{32}", name) for name in trained)


def test_with_two_servers_one_may_die_and_comes_back_with_current_weights(tmp_path):
    urls = ["http://127.0.0.1:8182", "http://127.0.0.1:8183"]
    servers = [serve(8182, tmp_path), serve(8183, tmp_path)]
    try:
        until(lambda: all(map(answers, urls)), 300)
        run = start_training(tmp_path, urls, timeout=600, max_steps=24, learning_rate=1e-4)
        until(lambda: len(logged(tmp_path)) >= 3, 600)
        stop(servers[0])
        until(lambda: len(logged(tmp_path)) >= 6 or run.poll() is not None, 600)
        assert run.poll() is None, (tmp_path / "train.log").read_text()[-3000:]
        servers[0] = serve(8182, tmp_path)
        until(lambda: "is back" in (tmp_path / "train.log").read_text() or run.poll() is not None, 900)
        back_at = len(logged(tmp_path))
        until(lambda: run.poll() is not None or len(logged(tmp_path)) >= back_at + 5, 900)
        served = requests.get(urls[0] + "/metrics", timeout=30).text
        until(lambda: run.poll() is not None, 900)
    finally:
        for server in servers:
            stop(server)
    text, steps = (tmp_path / "train.log").read_text(), logged(tmp_path)
    assert run.returncode == 0 and len(steps) == 24 and "is taken out" in text and "is back" in text, text[-3000:]
    requests_served = sum(float(value) for value in re.findall(r"^vllm:request_success_total{[^}]*} (\S+)$", served, re.MULTILINE))
    differences = [step["sampling/sampling_logp_difference/mean"] for step in steps]
    print(dict(back_at=back_at, requests_served_after=requests_served, logp_difference=[round(x, 5) for x in differences],
               staleness=[step["sample/staleness_mean"] for step in steps]))
    assert requests_served > 0
    # With old weights at this learning rate the difference would be that of as many steps' staleness.
    assert max(differences[back_at:]) < 3 * max(differences[1:back_at]) + 0.02


def test_fifty_honest_syncs_in_bf16_pass_the_proof(tmp_path):
    """The policy wanders as AdamW at a large learning rate would take it; the largest mean difference is printed beside the bound."""
    url = "http://127.0.0.1:8320"
    config = replace(load_config([str(ROOT / "configs/smollm_cpu.py")]), output_dir=str(tmp_path), vllm_server_base_url=url, bf16=True, weight_sync_backend="ipc",
                     verify_sync_steps=1)
    argv, environment = server_command(config)
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen(argv, env=os.environ | environment, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        until(lambda: answers(url), 180)
        policy = load_policy(config, torch.device("cpu"))
        shard(policy, dist.init_device_mesh("cpu", (1,)), torch.bfloat16)
        sync = make_sync(config, policy, torch.bfloat16)
        proof, theirs = Proof(config, policy, sync, torch.bfloat16), {}
        ask, noise = proof.server_scores, torch.randn(1 << 20).sign() * 3e-5
        proof.server_scores = lambda server, version: theirs.setdefault(version, ask(server, version))
        for version in range(50):
            window = Window()
            sync.push(version, window)
            proof.check(version, window)
            print(version, float(abs(theirs[version] - proof.scores[version]).mean()), window.result()["perf/verify_sync_s"], flush=True)
            with torch.no_grad():
                for i, p in enumerate(policy.parameters()):
                    p.view(-1).add_(noise.roll(version * 7919 + i).repeat(-(-p.numel() // len(noise)))[:p.numel()])
    finally:
        stop(server)
        dist.destroy_process_group()
    found = [float(abs(theirs[version] - proof.scores[version]).mean()) for version in range(50)]
    moved = float(abs(proof.scores[49] - proof.scores[0]).mean())
    print(dict(syncs=len(found), largest=max(found), mean=sum(found) / len(found), bound=proof.bound, moved=moved))
    assert len(found) == 50 and max(found) < proof.bound / 2 and moved > 0


def test_the_exported_folder_loads_in_vllm_and_continues_five_prompts_as_the_trainer_does(tmp_path, small_model):
    """After an update of every weight, greedily, in fp32 on both sides."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    config = load_config(["configs/smollm_cpu.py", "bf16=false", "vllm_server_base_url=http://127.0.0.1:8510", f"output_dir={tmp_path}"])
    policy, tokenizer = load_policy(config, torch.device("cpu")), load_tokenizer(config)
    torch.manual_seed(0)
    with torch.no_grad():
        for p in policy.parameters():
            p += 2e-3 * p.std() * torch.randn_like(p)
    save_model(policy, tokenizer, tmp_path / "model", torch.float32)
    dist.destroy_process_group()
    prompts = [render(tokenizer, [dict(role="user", content=f"What is {a} + {a + 1}? Answer with the number only.")]) for a in range(5)]
    policy.lm.config._attn_implementation = "sdpa"
    wanted = [policy.lm.generate(torch.tensor([ids]), max_new_tokens=16, do_sample=False)[0, len(ids):].tolist() for ids in prompts]
    policy.lm.config._attn_implementation = "tree"
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen([sys.executable, "serve.py", "configs/smollm_cpu.py", "bf16=false", f"model={tmp_path}/model",
                                   "vllm_server_base_url=http://127.0.0.1:8510"], cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        until(lambda: answers("http://127.0.0.1:8510"), 300)
        replies = [requests.post("http://127.0.0.1:8510/v1/completions", json=dict(
            model=f"{tmp_path}/model", prompt=ids, max_tokens=16, temperature=0, return_token_ids=True), timeout=60).json() for ids in prompts]
    finally:
        stop(server)
    served = [reply["choices"][0]["token_ids"] for reply in replies]
    print(dict(served=served))
    assert [ids[:len(other)] for ids, other in zip(wanted, served)] == served and all(len(ids) > 1 for ids in served)
