"""The proof of sync, with servers that score by a model of their own: what is asked, when, of whom, and what a failed one says."""
import copy
import json
import re
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from conftest import tiny_config, tiny_lm

from config import ConfigError
from metrics import Window
from model import Policy
from sync import Control, Silent, SyncFailed
from proof import LENGTH, Proof


@pytest.fixture(autouse=True)
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Servers:
    """Two servers, each with a copy of the policy; stands in for a sync and its control."""

    urls, names_adapters, whole = ["http://a", "http://b"], False, False

    def __init__(self, policy, token_endpoint=True, tells=True):
        self.policy, self.token_endpoint, self.tells, self.control, self.current, self.asked = policy, token_endpoint, tells, self, [0, 1], []
        self.held, self.says, self.in_use = [policy.lm] * 2, ["default"] * 2, [True, True]

    def push(self, version, to=(0, 1)):
        for server in to:
            self.held[server], self.says[server] = copy.deepcopy(self.policy.lm), str(version)

    def watch_end(self):
        pass

    def weight_version(self, server):
        return self.says[server] if self.tells else None

    def reply(self, server, path, body):
        self.asked.append((server, path, body))
        if path == "/inference/v1/generate" and not self.token_endpoint:
            return SimpleNamespace(status_code=404, text="not found")
        flat = body.get("sampling_params", body)
        assert flat["prompt_logprobs"] == 0 and flat["max_tokens"] == 1
        ids = torch.tensor(body["token_ids" if "token_ids" in body else "prompt"])
        lm = self.held[server]
        lm.config._attn_implementation = "sdpa"
        with torch.no_grad():
            logprobs = lm(input_ids=ids[None]).logits[0].double().log_softmax(-1)
        lm.config._attn_implementation = "tree"
        rows = [None] + [{str(token): dict(logprob=float(row[token]), rank=1)} for row, token in zip(logprobs, ids[1:].tolist())]
        found = dict(prompt_logprobs=rows) if "token_ids" in body else dict(choices=[dict(prompt_logprobs=rows)])
        return SimpleNamespace(status_code=200, json=lambda: found, text="")


def made(temperature=0.7, every=10, **how):
    policy = Policy(tiny_lm(vocab=1000), temperature, "sdpa")
    sync = Servers(policy, **how)
    return policy, sync, Proof(tiny_config(verify_sync_steps=every), policy, sync, torch.float32)


def change(policy, scale=1.05):
    with torch.no_grad():
        for p in policy.parameters():
            p *= scale


@pytest.mark.parametrize("token_endpoint", [True, False])
def test_honest_servers_pass_at_any_temperature_over_either_endpoint(token_endpoint):
    """A prompt's log-probs are not divided by the temperature, so neither are the policy's here."""
    policy, sync, proof = made(token_endpoint=token_endpoint)
    for version in (0, 1):
        sync.push(version)
        window = Window()
        proof.check(version, window)
        assert window.result()["perf/verify_sync_s"] > 0
        change(policy)
    assert {server for server, *_ in sync.asked} == {0, 1} and len(proof.ids) == LENGTH and min(proof.ids) >= 256


def test_it_is_due_after_the_first_two_syncs_and_then_at_every_so_many():
    policy, sync, proof = made(every=10)
    for version in range(32):
        sync.push(version)
        proof.check(version, Window())
    assert len(sync.asked) == 2 * 5 and sorted(proof.scores) == [0, 1, 9, 10, 19, 20, 29, 30]
    for every, asked in ((0, 0), (10, 2)):
        policy, sync, proof = made(every=every)
        sync.push(0)
        proof.checks, sync.whole = 2, True
        sync.push(33)
        proof.check(33, Window())
        assert len(sync.asked) == asked, "one that was taken back may be another by now"


def test_one_server_of_two_that_kept_the_version_before_is_named_with_that_version():
    policy, sync, proof = made(every=1)
    sync.push(0)
    proof.check(0, Window())
    change(policy)
    sync.push(1, to=(0,))
    sync.says[1] = "1"
    with pytest.raises(RuntimeError, match="http://b does not serve version 1 .*it seems to serve version 0"):
        proof.check(1, Window())
    sync.current = [0]
    proof.check(1, Window())


def test_one_tensor_that_stayed_behind_is_seen_and_the_sentence_says_that_part_is_missing():
    policy, sync, proof = made(every=1)
    sync.push(0)
    proof.check(0, Window())
    old = policy.lm.model.layers[1].self_attn.v_proj.weight.detach().clone()
    change(policy, 1.3)
    sync.push(1)
    with torch.no_grad():
        sync.held[0].model.layers[1].self_attn.v_proj.weight.copy_(old)
    with pytest.raises(RuntimeError, match="http://a does not serve version 1 .*part of it did not arrive"):
        proof.check(1, Window())


def test_a_server_that_says_another_version_is_not_believed_even_where_its_scores_agree():
    policy, sync, proof = made(every=1)
    sync.push(0)
    sync.says[1] = "default"
    with pytest.raises(RuntimeError, match="http://b .*says version 'default', as one that was started anew does"):
        proof.check(0, Window())
    sync.tells = False
    proof.check(0, Window())


def test_a_server_whose_log_probs_are_not_numbers_does_not_pass():
    policy, sync, proof = made(every=1)
    sync.push(0)
    with torch.no_grad():
        sync.held[0].model.norm.weight.fill_(float("nan"))
    with pytest.raises(RuntimeError, match="http://a does not serve version 0"):
        proof.check(0, Window())


def test_a_server_that_cannot_score_the_probe_stops_the_run():
    policy, sync, proof = made(every=1)
    sync.reply = lambda server, path, body: SimpleNamespace(status_code=500, text="out of memory")
    with pytest.raises(RuntimeError, match="did not score the probe.*500: out of memory"):
        proof.check(0, Window())


ODD = dict(no_logprobs=dict(choices=[dict(prompt_logprobs=None)]), empty={}, a_list=[], short=dict(prompt_logprobs=[None, {}]), no_number=dict(prompt_logprobs=[None] + [None] * (LENGTH - 1)))


@pytest.mark.parametrize("odd", [*ODD, "page", "loading", "wrong"])
def test_a_failed_proof_is_that_servers_failure_which_ends_the_run_or_leaves_out_one_that_was_just_taken_back(odd):
    """200 without log-probs was once a traceback of rank 0 alone, and one that came back odd ended a run that others could serve."""
    policy, sync, proof = made(every=1)
    answered, left_out = sync.reply, []

    def reply(server, path, body):
        if server == 0 or odd == "wrong":
            return answered(server, path, body)
        return SimpleNamespace(status_code=503 if odd == "loading" else 200, text="loading", json=lambda: ODD[odd] if odd in ODD else json.loads("<html>"))

    def leave_out(server, problem):
        sync.current.remove(server)
        left_out.append((server, problem))
    sync.reply, sync.leave_out = reply, leave_out
    sync.push(0)
    if odd == "wrong":
        with torch.no_grad():
            sync.held[1].model.norm.weight.mul_(3.0)
    words = "http://b (does not serve version 0|did not score the probe)"
    with pytest.raises(SyncFailed, match=words):
        proof.check(0, Window())
    sync.in_use[1] = False
    proof.check(0, Window())
    assert sync.current == [0] and len(left_out) == 1 and left_out[0][0] == 1 and re.search(words, left_out[0][1])
    sync.current, proof.checks = [1], 0
    with pytest.raises(SyncFailed, match=words):
        proof.check(0, Window())


def test_a_server_that_has_gone_silent_is_out_of_use_and_the_last_one_left_stops_the_run():
    """It answered the sync a moment before; whoever dies then is drained like at any other time."""
    policy, sync, proof = made(every=1)
    answered, left_out = sync.reply, []

    def reply(server, path, body):
        if server in silent:
            raise Silent("http://a did not answer")
        return answered(server, path, body)

    def leave_out(server, problem):
        sync.current.remove(server)
        left_out.append((server, problem))
    sync.reply, sync.leave_out, silent = reply, leave_out, {0}
    sync.push(0)
    proof.check(0, Window())
    assert left_out == [(0, "http://a did not answer")] and sync.current == [1]
    silent.add(1)
    with pytest.raises(RuntimeError, match="did not answer"):
        proof.check(1, Window())

    asked = []

    def ended():
        asked.append(1)
        if len(asked) == 3:
            raise ConfigError("the end of its log")
    sync.watch_end = lambda: Control([], 1.0, ended).watch_end()
    with pytest.raises(ConfigError, match="the end of its log"):
        proof.check(2, Window())
