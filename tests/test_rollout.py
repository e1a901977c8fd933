"""The rollout loop against a server with scripted faults: what arrives, what is asked for, what is retried, and how it ends."""
import asyncio
import queue
import threading
import time
from collections import Counter, defaultdict
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import tiny_config
from fake_server import EOS, FakeServer, by_seed, choice

import client
import rollout
from config import ConfigError
from metrics import Window
from replies import parse_generate
from rollout import AsyncRolloutLoop, Rollout, Shared
from tools import TurnRecord


class Tokenizer:
    """The conversation 'n' is the ids 1 2 n; text is ids with blanks between them."""

    def apply_chat_template(self, messages, add_generation_prompt, return_dict, tail=()):
        return [1, 2, int(messages[-1]["content"]), *tail]

    def decode(self, ids, skip_special_tokens):
        return " ".join(str(i) for i in ids if i != EOS)


def rows(count, **columns):
    """Prompt i is the ids 1 2 10+i."""
    prompts = [[dict(role="user", content=str(10 + i))] for i in range(count)]
    return [dict(zip(["prompt", *columns], row)) for row in zip(prompts, *columns.values())]


def odd(completion_ids, **columns):
    return [float(ids[0] % 2) for ids in completion_ids]


def odd_unless_flat(completion_ids, flat, **columns):
    return [0.25 if f else float(ids[0] % 2) for ids, f in zip(completion_ids, flat)]


def broken_reward(**columns):
    raise LookupError("no such column")


def drive(server, dataset, loop_cls=AsyncRolloutLoop, allowance=100_000, max_model_len=64, start_group=0, stop_after=None,
          may_consume=lambda loop: True, shared=None, tokenizer=None, eos=EOS, **changes):
    """Run the loop to its end (or until `stop_after` samples), taking a sample while `may_consume(loop)`."""
    config = tiny_config(**dict(vllm_server_base_url=server.url, reward_funcs=odd, num_generations=4, max_completion_length=8,
                                num_sampler_logprobs=2, num_train_epochs=1) | changes)
    shared = shared or Shared.create()
    shared.allowance.value = allowance
    loop = loop_cls(config, dataset, tokenizer or Tokenizer(), [eos], max_model_len, shared, start_group)
    samples, window, tables = [], Window(), []

    async def consume():
        while stop_after is None or len(samples) < stop_after:
            try:
                sample = shared.samples.get_nowait() if may_consume(loop) else queue.Empty
            except queue.Empty:
                sample = queue.Empty
            if sample is queue.Empty:
                await asyncio.sleep(0.005)
                continue
            if sample is None:
                return
            samples.append(sample)
            shared.consumed.value += len(sample.input_ids)

    async def work():
        running = asyncio.create_task(loop.run())
        consuming = asyncio.create_task(consume())
        await asyncio.wait([running, consuming], return_when=asyncio.FIRST_EXCEPTION if stop_after is None else asyncio.FIRST_COMPLETED)
        if running.done():
            await running
        else:
            running.cancel()
        await consuming
    try:
        asyncio.run(asyncio.wait_for(work(), 60))
    finally:
        shared.metrics.put(None)
        while (report := shared.metrics.get(timeout=60)) is not None:
            window.merge(report[0])
            tables.append(report[1])
        shared.samples.cancel_join_thread()
    groups = defaultdict(list)
    for sample in samples:
        groups[sample.group_id].append(sample)
    return SimpleNamespace(samples=samples, groups=groups, metrics=window.result(), tables=tables, loop=loop, shared=shared)


def complaint(*args, **kwargs):
    """The sentence of the ConfigError that ends the run."""
    with pytest.raises(Exception) as caught:
        drive(*args, **kwargs)
    error = caught.value
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, ConfigError), repr(error)
    return str(error)


def prompts_of(server):
    """How often each prompt was sent, by its last token."""
    return Counter(body["token_ids"][-1] for body in server.bodies)


@pytest.fixture
def server():
    with FakeServer() as server:
        yield server


# What arrives

def test_samples_hold_exactly_what_the_server_sampled(server):
    out = drive(server, rows(3))
    asked = sorted((body["token_ids"], [20 + seed % 5, 30 + seed % 5, EOS]) for body, seed in zip(server.bodies, server.seeds()))
    assert sorted((s.input_ids[:3].tolist(), s.input_ids[3:].tolist()) for s in out.samples) == asked and len(asked) == 12
    for sample in out.samples:
        first, second, _ = sample.input_ids[3:].tolist()
        assert sample.trained_index.tolist() == [3, 4, 5] and sample.sampler_logprobs.tolist() == [-0.5, -1.0, -1.5]
        assert sample.topk_ids.tolist() == [[first, first + 1], [second, second + 1], [EOS, EOS + 1]]
        assert sample.topk_logprobs.tolist() == [[-0.5, -1.5], [-1.0, -2.0], [-1.5, -2.5]]


def test_a_group_has_a_sample_for_each_generation_and_its_advantages_are_the_standardised_rewards(server):
    out = drive(server, rows(5))
    assert [len(out.groups[g]) for g in range(5)] == [4] * 5
    for group in out.groups.values():
        assert len({s.input_ids[2] for s in group}) == 1 and len({s.rollout_id for s in group}) == 4
        rewards = np.array([s.input_ids[3] % 2 for s in group], dtype=float)
        assert [s.reward for s in group] == rewards.tolist()
        assert np.allclose([s.advantage for s in group], (rewards - rewards.mean()) / rewards.std(), atol=1e-6)
        assert abs(sum(s.advantage for s in group)) < 1e-6


def test_columns_and_completions_reach_the_reward_function_row_by_row(server):
    seen = []

    def reward(prompts, completions, completion_ids, answer, **columns):
        seen.append((prompts[0][0]["content"], answer))
        assert columns == {} and completions == [[dict(role="assistant", content=f"{ids[0]} {ids[1]}")] for ids in completion_ids]
        return odd(completion_ids)
    drive(server, rows(2, answer=["a", "b"]), reward_funcs=reward)
    assert sorted(seen) == [("10", ["a"] * 4), ("11", ["b"] * 4)]


def test_rewards_are_summed_over_functions_and_the_rollouts_own(server):
    class Judged(AsyncRolloutLoop):
        async def generate_one(self, prompt, tools, group_id=0):
            one = await super().generate_one(prompt, tools, group_id)
            return Rollout(one.completion, one.completion_ids, one.turns, reward=100.0 if one.completion_ids[0] == 21 else None)

    def ten(completion_ids, **columns):
        return [None if ids[0] == 22 else 10.0 for ids in completion_ids]
    out = drive(server, rows(3), Judged, reward_funcs=[odd, ten])
    expected = {20: 10.0, 21: 111.0, 22: 0.0, 23: 11.0, 24: 10.0}
    assert len(out.samples) == 12 and all(s.reward == expected[int(s.input_ids[3])] for s in out.samples)


def test_a_rollout_nothing_scored_gets_advantage_zero_and_its_siblings_are_standardised_without_it(server):
    rewards = {5: None, 6: 1.0, 7: 0.0, 8: 1.0}
    server.answer = lambda body: choice([[5, 6, 7, 8][body["sampling_params"]["seed"] % 4], EOS])
    out = drive(server, rows(1), reward_funcs=lambda completion_ids, **columns: [rewards[ids[0]] for ids in completion_ids])
    assert {int(s.input_ids[3]): round(s.advantage, 4) for s in out.samples} == {5: 0.0, 6: 0.7071, 7: -1.4142, 8: 0.7071}


@pytest.mark.parametrize("versions, expected", [([4, 3, 3], 3), ([], 2)])
def test_a_sample_has_the_version_of_its_oldest_token_or_else_of_its_request(server, versions, expected):
    server.answer = lambda body: choice(by_seed(body)["token_ids"], versions=versions)
    shared = Shared.create()
    shared.version.value = 2
    assert {s.version for s in drive(server, rows(1), shared=shared).samples} == {expected}


def test_recorded_candidate_sets_reach_the_samples(server):
    server.answer = lambda body: by_seed(body) | dict(sampling_mask=[[5, 6], [7], [8, 9, 10]])
    sample = drive(server, rows(1), top_k=3).samples[0]
    assert sample.candidate_ids.tolist() == [5, 6, 7, 8, 9, 10] and sample.candidate_counts.tolist() == [2, 1, 3]


def test_a_top_token_without_a_log_prob_is_left_out_of_the_head(server):
    def answer(body):
        reply = by_seed(body)
        reply["logprobs"]["content"][0]["top_logprobs"][1]["logprob"] = -9999.0
        return reply
    server.answer = answer
    sample = drive(server, rows(1), num_sampler_logprobs=2).samples[0]
    sampled = int(sample.input_ids[3])
    assert sample.topk_ids[0].tolist() == [sampled, sampled + 2] and sample.topk_logprobs[0].tolist() == [-0.5, -2.5]


def test_token_ids_written_as_text_are_read_like_numbers(server):
    def as_text(entry):                                         # servers before vLLM 0.32
        return {name: value for name, value in entry.items() if name != "token_id"} | dict(token=f"token_id:{entry['token_id']}")

    def answer(body):
        reply = by_seed(body)
        content = reply["logprobs"]["content"]
        content = [as_text(entry) | dict(top_logprobs=list(map(as_text, entry["top_logprobs"]))) for entry in content]
        return reply | dict(logprobs=dict(content=content))
    numbers = drive(server, rows(1)).samples
    server.answer = answer
    texts = drive(server, rows(1)).samples
    assert len(texts) == 4 and [s.trained_index.tolist() for s in texts] == [[3, 4, 5]] * 4
    for number, text in zip(*(sorted(samples, key=lambda s: s.key()) for samples in (numbers, texts))):
        assert number.topk_ids.tolist() == text.topk_ids.tolist() and number.topk_logprobs.tolist() == text.topk_logprobs.tolist()


def test_the_log_prob_of_another_token_is_not_taken_for_the_sampled_one(server):
    def answer(body):
        reply = choice(by_seed(body)["token_ids"], [-0.5, -1.0, -1.5])
        reply["logprobs"]["content"][1]["token_id"] = 99
        return reply
    server.answer = answer
    out = drive(server, rows(1))
    assert [s.trained_index.tolist() for s in out.samples] == [[3, 5]] * 4 and out.metrics["sampling/invalid_logprob_count"] == 4


@pytest.mark.parametrize("missing", [None, -9999.0], ids=["null", "vllm_floor"])
def test_a_missing_log_prob_is_context_and_counted(server, missing):
    server.answer = lambda body: choice(by_seed(body)["token_ids"], [-0.5, missing, -1.5])
    out = drive(server, rows(2))
    assert all(s.trained_index.tolist() == [3, 5] and s.sampler_logprobs.tolist() == [-0.5, -1.5] for s in out.samples)
    assert len(out.samples) == 8 and out.metrics["sampling/invalid_logprob_count"] == 8


def test_a_rollout_without_any_usable_log_prob_ends_the_run_with_the_servers_address(server):
    server.answer = lambda body: choice([7, EOS], [None, None])
    error = complaint(server, rows(1))
    assert f"the server at {server.url} returned no usable log-prob" in error and "prompt 0" in error


def test_no_rollout_sees_what_another_appended_to_its_prompt_and_the_rows_stay_as_they_are(server):
    class Appending(AsyncRolloutLoop):
        async def generate_one(self, prompt, tools, group_id=0):
            prompt[0]["note"] = "mine"
            prompt.append(dict(role="user", content=prompt[-1]["content"]))
            return await super().generate_one(prompt, tools, group_id)
    seen, dataset = [], rows(2)

    def reward(prompts, completion_ids, **columns):
        seen.extend(map(len, prompts))
        return odd(completion_ids)
    drive(server, dataset, Appending, num_train_epochs=2, reward_funcs=reward)
    assert seen == [2] * 16 and dataset == rows(2)


# Dropped groups

def test_a_group_of_equal_rewards_is_dropped_and_counted(server):
    out = drive(server, rows(4, flat=[True, False, True, False]), reward_funcs=odd_unless_flat)
    assert {s.input_ids[2] for s in out.samples} == {11, 13} and len(out.samples) == 8
    assert out.metrics["frac_reward_zero_std"] == 0.5 and out.metrics["reward_dropped"] == 0.25
    kept = np.mean([s.reward for s in out.samples])
    assert out.metrics["reward_kept"] == pytest.approx(kept) and out.metrics["reward"] == pytest.approx((kept + 0.25) / 2)


def test_a_dropped_group_gives_its_allowance_back(server):
    out = drive(server, rows(5, flat=[True] * 5), reward_funcs=odd_unless_flat, allowance=1)
    assert out.samples == [] and len(server.bodies) == 20 and server.most_active() <= 4
    assert (out.loop.reserved_groups, out.loop.submitted, out.metrics["frac_reward_zero_std"]) == (0, 0, 1.0)


# Metrics

def test_lengths_ends_and_duplicates_of_a_group(server):
    outputs = [[5, 6, EOS], [7, EOS], [8, 5, 5, 5], [8, 5, 5, 5]]
    server.answer = lambda body: choice(outputs[body["sampling_params"]["seed"] % 4])
    metrics = drive(server, rows(1)).metrics
    expected = dict(mean_length=3.25, min_length=2, max_length=4, mean_terminated_length=2.5, min_terminated_length=2,
                    max_terminated_length=3, clipped_ratio=0.5, duplicate_frac=0.25)
    assert {name: metrics[f"completions/{name}"] for name in expected} == expected
    assert (metrics["reward"], metrics["rewards/odd/mean"], metrics["reward_group_std"]) == (0.5, 0.5, 0.5)
    assert (metrics["rollout/turns_mean"], metrics["rollout/samples_per_rollout"]) == (1, 1)


def test_the_reported_std_is_the_one_the_advantage_is_divided_by(server):
    outputs = [[5, EOS], [6, EOS], [8, EOS], []]                # the last has nothing to train and a reward of 9
    server.answer = lambda body: choice(outputs[body["sampling_params"]["seed"] % 4])
    out = drive(server, rows(1), reward_funcs=lambda completion_ids, **columns: [ids[0] % 2 if ids else 9 for ids in completion_ids])
    assert sorted(round(s.advantage, 4) for s in out.samples) == [-0.7071, -0.7071, 1.4142]
    assert out.metrics["reward_group_std"] == pytest.approx(2 ** 0.5 / 3)


def test_completions_travel_only_when_asked_for(server):
    assert not any(drive(server, rows(1)).tables)
    (table,) = filter(None, drive(server, rows(1), log_completions=True).tables)
    assert [entry["prompt"] for entry in table] == ["10"] * 4
    assert [entry["reward"] for entry in table] == [int(entry["completion"].split()[0]) % 2 for entry in table]


# What is asked for

def test_every_request_has_a_seed_of_its_own_also_after_a_resume(server):
    drive(server, rows(4), num_train_epochs=0.5)
    drive(server, rows(4), start_group=2)
    assert len(set(server.seeds())) == 16 and prompts_of(server) == {10: 4, 11: 4, 12: 4, 13: 4}


@pytest.mark.parametrize("seed", [0, 20_240_601, 2**31 - 1])
def test_a_seed_fits_the_64_bits_the_server_takes(server, seed):
    drive(server, rows(1), seed=seed)
    assert all(0 <= value < 2**63 for value in server.seeds())


def test_two_seeds_share_no_request_seed(server):
    drive(server, rows(2), seed=1)
    drive(server, rows(2), seed=2)
    assert len(set(server.seeds())) == 16


@pytest.mark.parametrize("changes, logprobs", [(dict(), 3), (dict(num_sampler_logprobs=8), 9), (dict(score_centering=False), 1)])
def test_one_more_log_prob_is_asked_for_than_is_kept(server, changes, logprobs):
    out = drive(server, rows(1), **changes)
    assert {body["sampling_params"]["logprobs"] for body in server.bodies} == {logprobs}
    assert {s.topk_ids.shape[1] for s in out.samples} == {logprobs - 1}


@pytest.mark.parametrize("changes, sent", [
    (dict(), dict(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0)),
    (dict(temperature=0.7, top_p=0.9, top_k=5, min_p=0.1), dict(temperature=0.7, top_p=0.9, top_k=5, min_p=0.1))])
def test_every_sampling_setting_is_sent_so_that_no_server_default_applies(server, changes, sent):
    drive(server, rows(1), **changes)
    for body in server.bodies:
        assert (body["model"], body["token_ids"]) == ("tiny", [1, 2, 10])
        assert body["sampling_params"].items() >= (sent | dict(repetition_penalty=1.0, stop_token_ids=[EOS], max_tokens=8)).items()


def test_template_arguments_reach_the_template(server):
    drive(server, rows(1), chat_template_kwargs=dict(tail=[8, 9]))
    assert server.bodies[0]["token_ids"] == [1, 2, 10, 8, 9]


def test_a_prompt_that_leaves_no_room_is_a_sentence_with_both_numbers(server):
    error = complaint(server, rows(1), max_model_len=10)
    assert all(words in error for words in ("3 tokens", "max_completion_length=8", "max_model_len 10"))
    assert server.bodies == []


def test_a_prompt_and_a_completion_may_fill_the_context_exactly(server):
    assert len(drive(server, rows(1), max_model_len=11).samples) == 4


def test_with_restricted_sampling_a_turn_is_cut_to_the_room_left(server):
    drive(server, rows(1), max_model_len=10, top_k=5)
    assert {body["sampling_params"]["max_tokens"] for body in server.bodies} == {7}
    error = complaint(server, rows(1), max_model_len=3, top_k=5)
    assert "max_model_len 3" in error


# Faults of the server

@pytest.mark.parametrize("fault", [(503, "busy"), (500, "oops"), (429, "slow down"), "close", "malformed"])
def test_a_passing_fault_is_retried_with_the_same_request_and_counted(server, fault):
    server.faults = {1: fault, 2: fault}
    out = drive(server, rows(2))
    assert out.metrics["rollout/vllm_retry_count"] == 2 and len(out.samples) == 8
    assert len(server.bodies) == 10 and sorted(Counter(server.seeds()).values()) == [1] * 6 + [2] * 2


def test_a_request_is_retried_until_the_server_is_back(server):
    server.faults = {n: (503, "loading") for n in range(4)}
    out = drive(server, rows(1), num_generations=2)
    assert out.metrics["rollout/vllm_retry_count"] == 4 and len(server.bodies) == 6 and len(out.samples) == 2


def test_a_request_the_server_refuses_fails_at_once_with_the_servers_words(server):
    server.faults = {0: (400, "prompt has 9000 tokens, at most 4096 are allowed")}
    error = complaint(server, rows(1))
    assert "400" in error and "prompt has 9000 tokens, at most 4096 are allowed" in error
    assert Counter(server.seeds()).most_common(1)[0][1] == 1


def test_a_server_that_stays_away_ends_the_run_with_its_address(server, monkeypatch):
    monkeypatch.setattr(client, "RETRY_SECONDS", 0.4)
    server.faults = {n: (503, "engine is dead") for n in range(100)}
    error = complaint(server, rows(1))
    assert server.url in error and "engine is dead" in error
    assert len(server.bodies) <= 8                              # two attempts a rollout in 0.4 s


def test_nobody_listening_ends_the_run_with_the_address(server, monkeypatch):
    monkeypatch.setattr(client, "RETRY_SECONDS", 0.1)
    error = complaint(SimpleNamespace(url="http://127.0.0.1:9"), rows(1))
    assert "http://127.0.0.1:9" in error


def test_a_connection_lost_after_a_long_generation_is_retried_like_any_other(server, monkeypatch):
    monkeypatch.setattr(client, "RETRY_SECONDS", 0.5)
    server.faults = {0: [0.8, "close"]}                         # the time-out is for an absent server, not for a slow reply
    out = drive(server, rows(1))
    assert out.metrics["rollout/vllm_retry_count"] == 1 and len(out.samples) == 4


# Where it ends

def test_two_epochs_generate_each_prompt_exactly_twice_and_then_end_the_queue(server):
    out = drive(server, rows(6), num_train_epochs=2)
    assert prompts_of(server) == {10 + i: 8 for i in range(6)}
    assert sorted(out.groups) == list(range(12)) and len(out.samples) == 48


class Forking(AsyncRolloutLoop):
    """Three turns to a rollout, none of which extends the one before."""

    async def generate_one(self, prompt, tools, group_id=0):
        turns = [await self.generate_one_turn([1, 2, int(prompt[-1]["content"]), n]) for n in (5, 6, 7)]
        return Rollout([], turns[0].output_ids, turns)


def test_an_epoch_is_a_pass_over_the_prompts_however_many_samples_a_rollout_forks_into(server):
    """Counted in samples, two epochs would be over after two thirds of one."""
    out = drive(server, rows(6), Forking, num_train_epochs=2)
    assert prompts_of(server) == {n: 48 for n in (5, 6, 7)} and sorted(out.groups) == list(range(12))
    assert all(len(samples) == 12 and len({sample.rollout_id for sample in samples}) == 4 for samples in out.groups.values())
    assert len(out.samples) == 144 and out.metrics["rollout/samples_per_rollout"] == 3


def test_a_rollout_of_several_turns_keeps_its_place_until_the_last(server):
    drive(server, rows(3), Forking, max_concurrent_rollouts=1)
    assert [body["token_ids"][-1] for body in server.bodies] == [5, 6, 7] * 12 and server.most_active() == 1


class Twice(AsyncRolloutLoop):
    """Keeps the second of two replies."""

    async def generate_one_turn(self, prompt_ids):
        await super().generate_one_turn(prompt_ids)
        return await super().generate_one_turn(prompt_ids)


class Late(AsyncRolloutLoop):
    async def setup(self):
        self.generate_one = self.two

    async def two(self, prompt, tools, group_id=0):
        await AsyncRolloutLoop.generate_one(self, prompt, tools, group_id)
        return await AsyncRolloutLoop.generate_one(self, prompt, tools, group_id)


@pytest.mark.parametrize("loop_cls", [Twice, Late])
def test_a_hook_that_asks_twice_stays_within_the_cap(server, loop_cls):
    drive(server, rows(3), loop_cls, max_concurrent_rollouts=1)
    assert len(server.bodies) == 24 and server.most_active() == 1


@pytest.mark.parametrize("loop_cls,early", [(AsyncRolloutLoop, True), (Twice, False)])
def test_a_rollout_of_one_request_gives_up_its_place_before_its_reply_is_read_others_at_their_end(server, loop_cls, early, monkeypatch):
    finished = []
    monkeypatch.setattr(client, "parse_generate", lambda *arguments: finished.append(loops[0].cap.finished) or parse_generate(*arguments))

    class Watched(loop_cls):
        async def setup(self):
            loops.append(self)
    loops = []
    drive(server, rows(3), Watched, max_concurrent_rollouts=1)
    assert finished == ([0, *range(2, 13)] if early else [n for n in range(12) for _ in range(2)])     # the first waits for a server's first good reply


def test_a_prompt_is_rendered_once_for_its_group_and_no_rollout_shares_its_ids(server):
    class Counting(Tokenizer):
        rendered = 0

        def apply_chat_template(self, *args, **kwargs):
            Counting.rendered += 1
            return super().apply_chat_template(*args, **kwargs)

    class Mutating(AsyncRolloutLoop):
        async def generate_one_turn(self, prompt_ids):
            prompt_ids.append(77)
            return await super().generate_one_turn(prompt_ids)
    drive(server, rows(5), Mutating, tokenizer=Counting())
    assert Counting.rendered == 5 and sorted(body["token_ids"] for body in server.bodies) == [[1, 2, 10 + i, 77] for i in range(5) for _ in range(4)]


def test_half_an_epoch_generates_half_of_the_prompts_once(server):
    drive(server, rows(6), num_train_epochs=0.5)
    assert sorted(prompts_of(server).values()) == [4, 4, 4]


def test_a_resumed_run_generates_only_the_prompts_that_are_left(server):
    out = drive(server, rows(6), start_group=4)
    assert sorted(out.groups) == [4, 5] and len(server.bodies) == 8


def test_with_max_steps_the_prompts_are_cycled_until_the_trainer_stops(server):
    out = drive(server, rows(2), max_steps=5, stop_after=4 * 7, allowance=100)
    assert len(out.groups) >= 7 and set(prompts_of(server)) == {10, 11}


def test_a_reward_function_that_raises_ends_the_run_naming_it_and_the_prompt(server):
    error = complaint(server, rows(3), reward_funcs=broken_reward)
    assert all(words in error for words in ("broken_reward", "LookupError: no such column", "'content': '1"))


def test_hooks_run_once_each_around_the_whole_run(server):
    calls = []

    class Hooked(AsyncRolloutLoop):
        async def setup(self):
            self.client = asyncio.get_running_loop()
            calls.append(("setup", len(server.bodies)))

        async def close(self):
            assert self.client is asyncio.get_running_loop()
            calls.append(("close", len(server.bodies)))
    drive(server, rows(2), Hooked)
    assert calls == [("setup", 0), ("close", 8)]
    calls.clear()
    assert "broken_reward" in complaint(server, rows(1), Hooked, reward_funcs=broken_reward)
    assert [name for name, _ in calls] == ["setup", "close"]
    calls.clear()
    drive(server, rows(1), Hooked, max_steps=1, stop_after=1, allowance=100)
    assert [name for name, _ in calls] == ["setup", "close"]


class Told(AsyncRolloutLoop):
    """Says when its hooks ran, and how old the heartbeat was after a long wait in one."""

    async def setup(self):
        self.client = "open"
        await asyncio.sleep(2.0)
        self.age = time.monotonic() - self.shared.heartbeat.value

    async def close(self):
        assert self.client == "open"


def test_a_hook_that_awaits_for_long_leaves_the_heartbeat_going(server):
    assert drive(server, rows(1), Told).loop.age < 1.5                       # it beats twice a second


def test_where_setup_never_ran_close_does_not_either_and_the_sentence_stays(server):
    assert "reset" in complaint(server, rows(1), Told, environment_factory=SimpleNamespace, max_steps=1)


def returning(what):
    class Returning(AsyncRolloutLoop):
        async def generate_one(self, prompt, tools, group_id=0):
            return what(await super().generate_one(prompt, tools, group_id))
    return Returning


def advantages_of(what):
    class Own(AsyncRolloutLoop):
        def compute_advantages(self, group):
            return what(group)
    return Own


@pytest.mark.parametrize("loop_cls, words", [
    (returning(lambda rollout: None), "generate_one returned a NoneType"), (returning(lambda rollout: [rollout]), "generate_one returned a list"),
    (returning(lambda rollout: replace(rollout, reward=float("inf"))), "generate_one set the rewards [inf"),
    (advantages_of(lambda group: np.full(4, np.nan)), "compute_advantages returned [nan"), (advantages_of(lambda group: group.rewards[:3]), "compute_advantages returned ["),
    (advantages_of(lambda group: np.full(4, 1e39)), "one finite number for each rollout")])
def test_what_a_hook_returns_wrongly_is_a_sentence_that_names_the_hook(server, loop_cls, words):
    assert words in complaint(server, rows(1), loop_cls)


def test_a_message_without_content_that_a_hook_appends_to_its_prompt_ends_nothing(server):
    class Appending(AsyncRolloutLoop):
        async def generate_one(self, prompt, tools, group_id=0):
            rollout = await super().generate_one(prompt, tools, group_id)
            prompt.append(dict(role="assistant", tool_calls=[]))
            return rollout
    assert len(drive(server, rows(2), Appending).samples) == 8


def test_what_a_reward_function_does_to_a_column_reaches_neither_the_dataset_nor_another_rollout(server):
    def popping(completion_ids, tests, **columns):
        assert [len(own) for own in tests] == [2] * 4 and len({id(own) for own in tests}) == 4
        [own.pop() for own in tests]
        return [float(ids[0] % 2) for ids in completion_ids]
    dataset = rows(2, tests=[["a", "b"], ["c", "d"]])
    assert len(drive(server, dataset, reward_funcs=popping, num_train_epochs=2).groups) == 4
    assert [row["tests"] for row in dataset] == [["a", "b"], ["c", "d"]]


def test_the_length_of_a_rollout_under_way_is_estimated_from_the_latest_ones():
    loop = AsyncRolloutLoop(tiny_config(num_generations=4), [], Tokenizer(), [EOS], 64, Shared.create())

    def estimate_after(groups, tokens):
        for _ in range(groups):
            loop._record_rollouts([Rollout([], [1], [])] * 4, [[SimpleNamespace(input_ids=range(tokens))]] * 4)
        return loop.finished_tokens / loop.finished_rollouts
    assert estimate_after(1, 30) == 30 and estimate_after(1, 10) == 20       # at the start every one counts alike
    assert estimate_after(1000, 10) == pytest.approx(10)
    assert estimate_after(64, 100) == pytest.approx(100, rel=0.03) and estimate_after(64, 10) == pytest.approx(10, rel=0.3)


def test_an_evaluation_without_candidate_sets_does_not_use_up_trainings_warning(capsys):
    loop = AsyncRolloutLoop(tiny_config(top_k=5), [], Tokenizer(), [EOS], 5000, Shared.create())

    async def generate(prompt_ids, sampling):
        return SimpleNamespace(output_sampling_mask=None)
    loop.servers.generate = generate

    async def turns():
        rollout.evaluating.set((dict(top_k=0), None, None))
        await loop.generate_one_turn([1])
        assert "warning" not in capsys.readouterr().out
        rollout.evaluating.set(({}, None, None))
        await loop.generate_one_turn([1])
        assert "warning: the server does not return the candidate sets" in capsys.readouterr().out
    asyncio.run(turns())


# Which prompts

@pytest.mark.parametrize("epochs, prompts, count", [(0.07, 100, 7), (2.2, 10, 22), (1.1, 3, 4)])
def test_a_share_of_an_epoch_is_rounded_up_but_not_for_an_error_of_rounding(server, epochs, prompts, count):
    drive(server, rows(prompts), num_train_epochs=epochs, num_generations=2)
    assert len(server.bodies) == 2 * count


class Picky(AsyncRolloutLoop):
    """Rejects the rows in `rejected`."""

    rejected: set = set()

    def filter_prompt(self, row_index, row, epoch):
        assert row["prompt"][0]["content"] == str(10 + row_index)
        return (row_index, epoch) not in self.rejected and row_index not in self.rejected


def picky(*rejected):
    return type("Picky", (Picky,), dict(rejected=set(rejected)))


def test_a_rejected_prompt_is_not_generated_and_counts_toward_the_epoch(server):
    drive(server, rows(4), picky(1, (2, 0)), num_train_epochs=2)
    assert prompts_of(server) == {10: 8, 12: 4, 13: 8}


@pytest.mark.parametrize("epochs", [1, 3])
def test_rejecting_every_prompt_of_an_epoch_ends_the_run(server, epochs):
    error = complaint(server, rows(3), picky(0, 1, 2), num_train_epochs=epochs)
    assert "filter_prompt rejected every prompt of epoch 0" in error


def test_an_epoch_that_was_resumed_near_its_end_is_not_taken_for_rejected(server):
    last = next(row for group, row, _ in rollout.prompt_order(4, 42) if group == 3)
    drive(server, rows(4), picky((last, 0)), num_train_epochs=2, start_group=3)
    assert prompts_of(server) == {10: 4, 11: 4, 12: 4, 13: 4}


# How much at once

def test_the_first_group_runs_alone_and_later_ones_together(server):
    server.delay = 0.4
    drive(server, rows(5))
    assert [kind for kind, _ in server.events[:8]] == ["in"] * 4 + ["out"] * 4 and len({prompt for _, prompt in server.events[:8]}) == 1
    assert server.most_active() > 4


def test_with_a_tiny_allowance_one_group_at_a_time_still_gets_through(server):
    server.delay = 0.05
    out = drive(server, rows(5), allowance=1)
    assert server.most_active() == 4 and len(out.samples) == 20


@pytest.mark.parametrize("allowance", [24, 60, 100])
def test_tokens_generated_and_not_yet_consumed_stay_within_the_allowance_and_use_it(server, allowance):
    shared, outstanding = Shared.create(), []

    def answer(body):                                           # 3 + 3 tokens a rollout, 24 a group
        outstanding.append(len(server.bodies) * 6 - shared.consumed.value)
        return by_seed(body)
    server.answer = answer

    def may_consume(loop):                                      # once it generates nothing and may not begin: all of the allowance is used
        return loop.reserved_groups == 0 and (not loop._may_start() or len(server.bodies) == 48)
    drive(server, rows(12), shared=shared, allowance=allowance, may_consume=may_consume)
    assert allowance - 24 < max(outstanding) <= allowance


def test_the_first_group_waits_until_the_servers_kv_cache_is_known():
    """A group of 16 was once sent at once to a server with room for two."""
    metrics = """vllm:cache_config_info{kv_cache_size_tokens="128"} 1.0
vllm:kv_cache_usage_perc 0.7
vllm:num_requests_running 1
vllm:num_requests_waiting 0
vllm:num_preemptions_total 0
"""
    with FakeServer(delay=0.05, metrics=metrics) as server:
        out = drive(server, rows(1), num_generations=16)
        assert server.most_active() == 2 and len(out.samples) == 16 and out.metrics.get("rollout/concurrency_cap", 2) == 2


def test_a_turn_that_does_not_name_its_weights_has_those_at_the_rollouts_start(server):
    """As the specification lists a TurnRecord; such samples once counted as those of version 0, and all were dropped as stale after a few syncs."""
    class Own(AsyncRolloutLoop):
        async def generate_one(self, prompt, tools, group_id=0):
            turn = await self.generate_one_turn([1, 2, 3])
            self.shared.version.value = 11
            return Rollout([], turn.output_ids, [TurnRecord(turn.prompt_ids, turn.output_ids, turn.output_log_probs, **told)])
    for told, version in (({}, 10), (dict(model_version=7), 7)):
        shared = Shared.create()
        shared.version.value = 10
        out = drive(server, rows(1), Own, shared=shared)
        assert [(sample.version, sample.mean_version) for sample in out.samples] == [(version, version)] * 4


def test_rollouts_at_once_stay_within_max_concurrent_rollouts(server):
    server.delay = 0.1
    out = drive(server, rows(6), max_concurrent_rollouts=3)
    assert server.most_active() == 3 and len(out.samples) == 24


def test_a_group_starts_when_its_first_rollout_can_and_has_the_version_of_that_moment(server):
    shared, started = Shared.create(), []

    class Watching(AsyncRolloutLoop):
        def filter_prompt(self, row_index, row, epoch):
            started.append(len(server.bodies))
            return True

        def compute_advantages(self, group):
            assert group.model_version == min(sample.version for samples in group.completions_sequences for sample in samples)
            return super().compute_advantages(group)

    def answer(body):                                           # every reply is followed by a weight update
        shared.version.value += 1
        return choice(by_seed(body)["token_ids"])
    server.answer, server.delay = answer, 0.005
    drive(server, rows(8), Watching, shared=shared, max_concurrent_rollouts=4)
    assert all(4 * (n - 2) <= sent for n, sent in enumerate(started)), "prompts are chosen long before they are generated"


def test_a_slow_reward_function_does_not_hold_generation_back(server):
    released, in_time = threading.Event(), []

    def slow(completion_ids, **columns):
        in_time.append(released.wait(30))
        return odd(completion_ids)

    class Releasing(AsyncRolloutLoop):
        async def generate_one(self, prompt, tools, group_id=0):
            one = await super().generate_one(prompt, tools, group_id)
            if len(server.bodies) == 16:
                released.set()                                  # the first group's rewards come after every group's generation
            return one
    out = drive(server, rows(4), Releasing, reward_funcs=slow)
    assert in_time == [True] * 4 and len(out.samples) == 16


# A rollout that fails

class Failing(AsyncRolloutLoop):
    """Rollouts number `which` (in the order they begin) raise `error`."""

    which, error, begun = (), RuntimeError, 0

    async def generate_one(self, prompt, tools, group_id=0):
        number, self.begun = self.begun, self.begun + 1
        rollout = await super().generate_one(prompt, tools, group_id)
        if number in self.which:
            raise self.error("broken tool")
        return rollout


def failing(*which, error=RuntimeError):
    return type("Chosen", (Failing,), dict(which=which, error=error))


@pytest.mark.parametrize("k", range(4))
@pytest.mark.parametrize("error", [RuntimeError, asyncio.CancelledError, asyncio.TimeoutError, SystemExit, KeyboardInterrupt])
def test_a_rollout_that_fails_is_left_out_counted_and_its_group_scored_from_the_others(server, k, error, capsys):
    """A CancelledError that leaks from a tool's time-out is a failure too, not the end of the process."""
    out = drive(server, rows(3), failing(k, error=error), reward_funcs=lambda completion_ids, **columns: [float(ids[0]) for ids in completion_ids])
    assert len(out.groups[0]) == 3 and len(out.groups[1]) == len(out.groups[2]) == 4
    rewards = np.array([sample.reward for sample in out.groups[0]])
    assert [s.advantage for s in out.groups[0]] == pytest.approx(list((rewards - rewards.mean()) / (rewards.std() + 1e-8)))
    assert out.metrics["rollout/failed_count"] == 1 and "broken tool" in capsys.readouterr().out
    assert (out.loop.generating, out.loop.reserved_groups, out.loop.cap.running, out.loop.groups_at) == (0, 0, 0, [0])


def test_reward_columns_are_trimmed_to_the_rollouts_that_are_left(server):
    seen = []

    def record(prompts, completions, completion_ids, flat, **columns):
        seen.append((len(prompts), len(completions), len(completion_ids), len(flat)))
        return [float(ids[0]) for ids in completion_ids]
    drive(server, rows(2, flat=[0, 1]), failing(1, 2), reward_funcs=record)
    assert seen == [(2,) * 4, (4,) * 4]


def test_a_group_with_one_rollout_left_is_dropped_and_gives_its_allowance_back(server):
    out = drive(server, rows(3), failing(0, 1, 2))
    assert 0 not in out.groups and len(out.groups) == 2 and out.loop.reserved_groups == 0
    assert out.loop.submitted == out.shared.consumed.value == sum(len(s.input_ids) for s in out.samples)


def test_a_group_of_which_every_rollout_fails_ends_the_run_with_the_cause(server):
    with pytest.raises(ExceptionGroup) as caught:
        drive(server, rows(3), failing(*range(4)))
    assert isinstance(caught.value.exceptions[0], RuntimeError) and "broken tool" in str(caught.value.exceptions[0])
