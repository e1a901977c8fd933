"""Evaluation beside training: its own settings and seeds, a share of the slots, pinned or told otherwise, and nothing of training changed."""
import asyncio
import json
import math
import threading
from itertools import combinations

import pytest
import torch
from conftest import tiny_config
from fake_server import EOS, FakeServer, choice
from resume_worker import run
from test_rollout import Tokenizer
from test_rollout import rows as rows_of_rollouts
from test_sync import FakeVllm

import train
from evaluate import evaluate, pass_at
from recording import read_groups
from rollout import AsyncRolloutLoop
from shared import Shared

PROMPTS, EVALUATED = 12, 5
CONFIG = """
import sys
sys.path.insert(0, {tests!r})
from config import Config
async def first_id(completion_ids, **columns):
    return [float(ids[0] % 2) for ids in completion_ids]
def rows(n, word):
    return lambda: [dict(prompt=[dict(role="user", content=f"{{word}} {{i}}")], answer=i) for i in range(n)]
config = Config(model={model!r}, reward_funcs=first_id, verify_sync_steps=0, use_cpu=True, bf16=False, gradient_checkpointing=False, num_generations=4, max_completion_length=8,
                num_sampler_logprobs=2, num_train_epochs=1.0, learning_rate=1e-2, token_budget=160, vllm_server_base_url={url!r}, disable_tqdm=True, max_staleness=100,
                max_concurrent_rollouts=48, save_rollouts=True, train_dataset=rows({prompts}, "train"), {more})
"""
EVALUATION = "eval_dataset=rows(5, 'evaluate'), eval_steps=2, eval_on_start=True, eval_num_generations=3, eval_sampling=dict(temperature=0.25, max_tokens=6)"


def answer(body):
    """First tokens of both kinds in every five seeds, and the version that was current."""
    n = body["sampling_params"]["seed"] % 5
    return choice([20 + n, 30 + n, EOS], [-10.8] * 3, body["sampling_params"]["logprobs"], versions=[answer.version] * 3)


class Server(FakeVllm):
    """Tells versions, as vLLM does. From the `held`-th on, by their seeds, rollouts come to no end."""

    held = math.inf

    async def _generate(self, request):
        if (await request.json())["sampling_params"]["seed"] % 2**40 >= self.held:
            await asyncio.sleep(3600)
        return await super()._generate(request)

    async def _control(self, request):
        reply = await super()._control(request)
        if request.path == "/update_weight_version":
            answer.version = int(self.calls[-1].rpartition(":")[2])
        return reply


def start(folder, server, tiny_folder, more="seed=42", overrides=()):
    folder.mkdir(exist_ok=True)
    path = folder / "x.py"
    path.write_text(CONFIG.format(tests=str(__import__("pathlib").Path(__file__).parent), model=tiny_folder, url=server.url, prompts=PROMPTS, more=more))
    return run([str(path), f"output_dir={folder}", *overrides])


def trained(folder):
    """The samples of each group in full, and what each step trained."""
    groups = {group["group_id"]: [rollout["samples"][0]["input_ids"] for rollout in group["rollouts"]] for group in read_groups(folder / "rollouts")}
    return groups, {step["step"]: step["trained"] for step in map(json.loads, (folder / "rollouts" / "steps.jsonl").read_text().splitlines())}


@pytest.fixture(scope="module")
def both(tmp_path_factory, tiny_folder):
    """The same seeded run without and with evaluation, and its server."""
    folder, servers = tmp_path_factory.mktemp("evaluated"), []
    for name, more in (("without", "seed=42"), ("with", EVALUATION + ", logging_steps=100")):
        with Server(answer, keep=False, model=tiny_folder) as server:
            server.delay = 0.02
            start(folder / name, server, tiny_folder, more)
            servers.append(server)
    return folder, servers


def is_evaluation(body):
    return body["sampling_params"]["temperature"] == 0.25


def test_evaluation_changes_no_training_sample(both):
    folder, _ = both
    without, with_it = trained(folder / "without"), trained(folder / "with")
    assert without[0] == with_it[0] and len(without[0]) == PROMPTS
    assert sorted(group for step in with_it[1].values() for group, _ in step) == sorted(group for step in without[1].values() for group, _ in step)


def test_it_samples_with_its_own_settings_and_the_same_seeds_each_time_none_of_trainings(both):
    _, (_, server) = both
    asked = [body["sampling_params"] for body in server.bodies if is_evaluation(body)]
    assert {params["max_tokens"] for params in asked} == {6} and len(asked) % (EVALUATED * 3) == 0
    seeds, training = {params["seed"] for params in asked}, {body["sampling_params"]["seed"] for body in server.bodies if not is_evaluation(body)}
    assert len(seeds) == EVALUATED * 3 and not seeds & training and len(training) == PROMPTS * 4


def test_it_takes_a_24th_of_the_slots_at_most(both):
    """2 of 48."""
    _, (_, server) = both
    kinds, running, most = {tuple(body["token_ids"]): is_evaluation(body) for body in server.bodies}, 0, 0
    for event, prompt in server.events:
        running += (1 if event == "in" else -1) if kinds[prompt] else 0
        most = max(most, running)
    assert most == 2


def test_every_completion_is_written_with_its_versions_and_the_means_are_logged(both):
    folder, _ = both
    steps = [json.loads(line) for line in (folder / "with" / "metrics.jsonl").read_text().splitlines()]
    evaluated = {step["eval/step"]: step for step in steps if "eval/step" in step}
    files = {int(path.stem.removeprefix("step_")): [json.loads(line) for line in path.read_text().splitlines()] for path in (folder / "with" / "eval").iterdir()}
    last = max(step["step"] for step in steps)
    assert {0, last} <= set(files) == set(evaluated) and len(steps) == len(files) + 1, "one line each, and the one window of logging_steps=100"
    assert all(name.startswith("eval/") for line in evaluated.values() for name in line.keys() - {"step", "time_s"})
    assert sum("loss" in step for step in steps) == 1 and not any("eval/" in name for step in steps if "loss" in step for name in step)
    records, logged = files[last], evaluated[last]
    assert sorted(record["index"] for record in records) == sorted(list(range(EVALUATED)) * 3)
    rewards = [record["reward"] for record in records]
    assert logged["eval/reward"] == pytest.approx(sum(rewards) / 15) == logged["eval/rewards/first_id/mean"] and logged["eval/completions_count"] == 15
    assert logged["eval/completions/mean_length"] == 3 and logged["eval/completions/clipped_ratio"] == 1    # 0 ends no reply of this tokenizer
    assert logged["eval/pass@1"] == pytest.approx(sum(rewards) / 15) and logged["eval/pass@2"] >= logged["eval/pass@1"]
    assert {record["model_version"] for record in records} == {last} == {logged["eval/model_version_min"], logged["eval/model_version_max"]}
    assert {record["model_version"] for record in files[0]} <= set(range(last + 1))


@pytest.mark.parametrize("n,passed", [(4, 0), (4, 1), (5, 3), (6, 6)])
def test_pass_at_k_is_the_share_of_k_subsets_in_which_one_passes(n, passed):
    for k in range(1, n + 1):
        subsets = list(combinations([i < passed for i in range(n)], k))
        assert pass_at(k, n, passed) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_completions_that_nothing_scored_are_left_out_of_pass_at_k_as_they_are_of_the_reward(tmp_path):
    """They counted as failures: pass@1 was 0.375 here, where all that was scored passed."""
    def reward(completion_ids, answer, **columns):
        return [None if a is None or (a == 2 and i) else 1.0 for i, a in enumerate(answer)]
    with FakeServer() as server:
        rows, shared = rows_of_rollouts(4, answer=[1, 2, None, None]), Shared.create()
        config = tiny_config(vllm_server_base_url=server.url, reward_funcs=reward, max_completion_length=8, num_sampler_logprobs=2, eval_num_generations=2, eval_dataset=rows,
                             output_dir=str(tmp_path))
        loop = AsyncRolloutLoop(config, rows, Tokenizer(), [EOS], 64, shared, eval_dataset=rows)

        async def work():
            loop.scoring = asyncio.Semaphore(1)
            async with loop.servers:
                await evaluate(loop, 0)
        asyncio.run(work())
    values = {name: value for name, (value, _) in shared.metrics.get(timeout=60)[0].items()}
    assert (values["eval/reward"], values["eval/pass@1"], values["eval/pass@2"], values["eval/completions_count"]) == (1.0, 1.0, 1.0, 8)


# A live run that is killed, for which this file has the server

class Killed(Exception):
    pass


def test_a_killed_and_resumed_run_generates_nothing_before_the_restored_weights_and_trains_every_prompt_once(tmp_path, tiny_folder, monkeypatch):
    """And the evaluation of step 2, of which the kill let nothing end, is made again."""
    more, overrides = EVALUATION.replace("eval_on_start=True", "eval_on_start=False"), ["save_steps=1", "token_budget=60"]
    plain, calls = train.forward_backward, []

    def forward_backward(*args):
        calls.append(1)
        if len(calls) == 3:
            raise Killed
        return plain(*args)
    with Server(answer, model=tiny_folder) as server:
        server.held = 7 * 4                                     # groups 7 to 11 are in flight when it is killed
        monkeypatch.setattr(train, "forward_backward", forward_backward)
        with pytest.raises(Killed):
            start(tmp_path / "run", server, tiny_folder, more, overrides)
        assert not (tmp_path / "run" / "eval").exists() and threading.active_count() < 20
        server.held = math.inf
        before, received, asked = len(server.calls), len(server.received), len(server.bodies)
        monkeypatch.setattr(train, "forward_backward", plain)
        start(tmp_path / "run", server, tiny_folder, more, [*overrides, "eval_steps=100", "resume_from_checkpoint=true"])
        events = server.calls[before:]
        restored = server.received[received]
    assert events.index("/resume") < events.index("generate") and events.index("/update_weight_version:2") < events.index("generate")
    from safetensors.torch import load_file
    saved = load_file(tmp_path / "run" / "checkpoint-2" / "model.safetensors")
    assert all(torch.equal(restored[name], saved[name]) for name in saved)
    assert json.loads((tmp_path / "run" / "checkpoint-2" / "rollout_state.json").read_text())["model_version"] == 2
    assert sum(not is_evaluation(body) for body in server.bodies[asked:]) == 5 * 4
    evaluated = [json.loads(line) for line in (tmp_path / "run" / "eval" / "step_2.jsonl").read_text().splitlines()]
    assert len(evaluated) == EVALUATED * 3 and all(record["model_version"] >= 2 for record in evaluated)
    groups, steps = trained(tmp_path / "run")
    counted = [group for step in steps.values() for group, _ in step]
    assert sorted(counted) == sorted(list(range(PROMPTS)) * 4) and sorted(groups) == list(range(PROMPTS))
    assert len({rollout for step in steps.values() for _, rollout in step}) == PROMPTS * 4
    logged = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines() if "loss" in line]
    assert [step["model_version"] for step in logged] == list(range(1, len(logged) + 1)) and logged[-1]["epoch"] == 1.0
