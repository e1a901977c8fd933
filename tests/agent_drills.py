"""The agent examples against real vLLM on the CPU, three steps each, apart from the test run:  pytest -s tests/agent_drills.py  (about 10 minutes).

Everything a run leaves is in runs/agent_drills. A proxy in front of the server writes down what it sampled, the trainer what it trains: each sampled token of a trained rollout is trained
once, in order, after the tokens it was sampled after.
"""
import ctypes
import json
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter

import aiohttp
import pytest
from aiohttp import web
from conftest import ROOT
from drills import stop, until
from proxy import Proxy

from serve import answers

PORT = 8401
FOLDER = ROOT / "runs" / "agent_drills"
RECORDING = '''
import sys
from dataclasses import replace
sys.path.insert(0, {tests!r})
from configs.{name} import config
from agent_examples import *
config = replace(config, launch_server=False{changes})
if hasattr(sys.modules["__main__"], "plan_steps"):  # in the trainer: write down what is packed for training
    import json
    import planning
    plain = planning.pack_row
    def recording(samples, multiple=1):
        with open({trained!r}, "a") as file:
            file.writelines(json.dumps([s.rollout_id, s.input_ids.tolist(), s.trained_index.tolist()]) + "\\n" for s in samples)
        return plain(samples, multiple)
    planning.pack_row = recording
'''


EXAMPLES = {
    "tools": ("calculator_tools", ", tools=[multiply, async_add], reward_funcs=length_reward"),
    "environment_that_owns_the_data": ("increment_env", ""),
    "environment_with_a_dataset": ("increment_env", ", environment_factory=DatasetIncrementEnv, train_dataset=targets"),
    "environment_and_reward_function": ("increment_env", ", reward_funcs=format_reward"),
    "several_environments": ("two_environments", ", environment_factory=dict(coding=CodingEnv, game=GameEnv), reward_funcs=length_reward, "
                                                 "train_dataset=[dict(environment=name) for name in ('coding', 'game')]"),
    "tools_and_environment": ("increment_env", ", tools=[multiply], reward_funcs=length_reward"),
    "config_two_environments": ("two_environments", ""),
    "config_external_agent": ("external_agent", ", reward_funcs=length_reward")}


class Recorder(Proxy):
    """In front of the server: notes (prompt ids, output ids) of every reply."""

    def __init__(self, target):
        super().__init__(target, PORT + 1)
        self.sampled = []

    async def handle(self, request):
        try:
            status, content, kind = await self.forward(request)
        except aiohttp.ClientError:
            request.transport.abort()
            return web.Response()
        if status == 200 and request.path.endswith(("/generate", "/chat/completions")):
            said = json.loads(content)
            prompt = said.get("prompt_token_ids") or (await request.json())["token_ids"]
            self.sampled.append((tuple(prompt), tuple(said["choices"][0]["token_ids"])))
        return web.Response(body=content, status=status, content_type=kind)


@pytest.fixture(scope="module")
def recorder(small_model):
    FOLDER.mkdir(parents=True, exist_ok=True)
    server = subprocess.Popen([sys.executable, "serve.py", "configs/increment_env.py", "vllm_max_model_length=1024", f"vllm_server_base_url=http://127.0.0.1:{PORT}"],
                              cwd=ROOT, stdout=(FOLDER / "vllm.log").open("w"), stderr=subprocess.STDOUT, start_new_session=True,
                              preexec_fn=lambda: ctypes.CDLL(None).prctl(1, signal.SIGTERM))         # it dies with the drill, however that dies
    try:
        until(lambda: answers(f"http://127.0.0.1:{PORT}"), 240)
        with Recorder(f"http://127.0.0.1:{PORT}") as recorder:
            yield recorder
    finally:
        print((FOLDER / "vllm.log").read_text()[-1000:] if server.poll() is not None else "")
        stop(server)


@pytest.mark.parametrize("example", EXAMPLES)
def test_over_several_turns_every_trained_token_is_what_the_server_sampled_in_order_and_once(recorder, example):
    (name, changes), folder = EXAMPLES[example], FOLDER / example
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    path, trained, recorder.sampled = folder / "example.py", folder / "trained", []
    path.write_text(RECORDING.format(tests=str(ROOT / "tests"), name=name, changes=changes, trained=str(trained)))
    started = time.monotonic()
    run = subprocess.run([sys.executable, "train.py", str(path), f"vllm_server_base_url=http://127.0.0.1:{PORT + 1}", f"output_dir={folder}/run", "disable_tqdm=true",
                          "max_steps=3", "num_generations=4", "vllm_max_model_length=1024", "token_budget=512", "max_completion_length=32"],
                         cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, (run.stdout + run.stderr)[-3000:]
    steps = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    samples = [json.loads(line) for line in trained.read_text().splitlines()]
    taken = Counter()
    for rollout_id, ids, index in samples:
        starts = [i for i in index if i - 1 not in set(index)]
        for start, after in zip(starts, [*starts[1:], None]):
            count = sum(start <= i and (after is None or i < after) for i in index)
            taken[tuple(ids[:start]), tuple(ids[start:start + count])] += 1
    sampled = Counter(recorder.sampled)
    assert taken and not taken - sampled, "something was trained that the server did not sample after those tokens, or twice"
    turns = Counter(rollout_id for rollout_id, ids, index in samples for i in index if i - 1 not in set(index))
    print(json.dumps(dict(example=example, steps=len(steps), samples=len(samples), trained_turns=sum(taken.values()), sampled_turns=sum(sampled.values()),
                          turns_of_a_rollout=max(turns.values()), seconds=round(time.monotonic() - started),
                          **{key: round(steps[-1][key], 3) for key in ("tools/call_frequency", "rollout/turns_mean", "rollout/fork_frac") if steps[-1].get(key) is not None})))
    assert len(steps) == 3
