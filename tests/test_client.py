"""Requests to one or several servers: what goes out, what comes back, who serves whom, and what happens when one fails."""
import asyncio
import json
import time
from array import array
from types import SimpleNamespace

import client
import pytest
from aiohttp import web
from client import LoadCap, Servers, arrived
from conftest import tiny_config
from fake_server import EOS, FakeServer, as_completion, choice

from config import ConfigError
from metrics import Window
from naming import NEVER, Naming
from replies import parse_completion, parse_generate, parse_metrics

SAMPLING = dict(temperature=1.0, max_tokens=8, logprobs=3, seed=1, detokenize=False)


def made(*servers, **changes):
    """The client of these servers, and its metrics."""
    window = Window()
    config = tiny_config(vllm_server_base_url=[server.url for server in servers], **changes)
    lost, restored = array("q", [0] * len(servers)), array("q", [0] * len(servers))
    return Servers(config, config.server_urls, lost, restored, lambda: 3, window), window


def ask(servers, prompts=((1, 2),), before=lambda servers: None, sampling=SAMPLING):
    """One turn for each prompt, at once."""
    async def work():
        async with servers:
            before(servers)
            return await asyncio.gather(*(servers.generate(list(prompt), sampling) for prompt in prompts))
    return asyncio.run(work())


def body(made_choice):
    return json.dumps(dict(choices=[made_choice])).encode()


def test_the_token_endpoint_and_completions_give_the_same_turn():
    tokens, text = FakeServer(), FakeServer(token_endpoint=False)
    with tokens, text:
        first, second = (ask(made(server)[0])[0] for server in (tokens, text))
    assert first == second and first.output_ids == [21, 31, EOS] and first.output_log_probs == [-0.5, -1.0, -1.5]
    assert first.output_sampler_logprobs[0] == {21: -0.5, 22: -1.5, 23: -2.5} and first.model_version == 3
    asked = text.bodies[0]
    assert asked["prompt"] == [1, 2] and asked["return_token_ids"] and asked["return_tokens_as_token_ids"] and "detokenize" not in asked


@pytest.mark.parametrize("token_endpoint", [True, False])
def test_with_adapters_every_request_names_that_of_its_version_and_the_oldest_named_is_known(token_endpoint):
    """Requests that named the base model would sample from it for the whole run."""
    adapters, oldest = SimpleNamespace(value=1), SimpleNamespace(value=NEVER)
    during = []
    with FakeServer(lambda body: during.append(oldest.value) or choice([21, EOS]), token_endpoint=token_endpoint) as server:
        servers, _ = made(server)
        servers.naming = Naming("tiny", adapters, oldest)
        ask(servers, [(1,), (2,)])
        adapters.value = 0
        ask(servers)
    assert {body["model"] for body in server.bodies[:2]} == {"policy-v3"} and server.bodies[-1]["model"] == "tiny"
    assert set(during) == {3} and oldest.value == NEVER


class Anew(FakeServer):
    """A server that was started anew and lost the adapter."""

    async def _generate(self, request):
        return web.json_response(dict(error=dict(message="The model `policy-v3` does not exist.")), status=404)


def test_a_server_that_lost_the_adapter_is_left_for_another_and_ends_the_run_where_there_is_none(monkeypatch):
    monkeypatch.setattr(client, "ATTEMPTS", 2)
    with Anew() as anew, FakeServer() as good:
        servers, _ = made(anew, good)
        assert len(ask(servers)) == 1 and servers.in_use() == [1]
        with pytest.raises(ConfigError, match="policy-v3. does not exist"):
            ask(made(anew)[0])


def test_a_server_without_the_token_endpoint_is_asked_for_it_once():
    with FakeServer(token_endpoint=False) as server:
        servers, window = made(server)
        ask(servers, [(1,), (2,)])
        assert servers.token_endpoint == [False] and "rollout/vllm_retry_count" not in window.result()
        assert len(server.bodies) == 2


def test_versions_are_those_of_the_tokens_where_the_server_tells_them():
    turn = parse_generate(body(choice([5, 6, 7], versions=(2, 2, 5))), [1], version=9)
    assert (turn.model_version, turn.mean_version, turn.version_told) == (2, 3.0, True)
    turn = parse_generate(body(choice([5, 6, 7])), [1], version=9)
    assert (turn.model_version, turn.mean_version, turn.version_told) == (9, 9.0, False)
    assert parse_completion(body(as_completion(choice([5, 6]))), [1], 4).mean_version == 4


def test_ids_written_as_text_are_read_as_ids():
    text = choice([5], [-1.0])
    for entry in (text["logprobs"]["content"][0], *text["logprobs"]["content"][0]["top_logprobs"]):
        entry["token"] = f"token_id:{entry.pop('token_id')}"
    turn = parse_generate(body(text), [1], 0)
    assert turn.output_log_probs == [-1.0] and set(turn.output_sampler_logprobs[0]) == {5, 6, 7}


@pytest.mark.parametrize("parse,wrap", [(parse_generate, lambda x: x), (parse_completion, as_completion)])
def test_what_stands_for_a_missing_logprob_is_none(parse, wrap):
    turn = parse(body(wrap(choice([5, 6, 7], [None, -9999.0, -2.0]))), [1], 0)
    assert turn.output_log_probs == [None, None, -2.0]


@pytest.mark.parametrize("fault", [(503, "busy"), (429, "slow down"), (500, "oops"), "close", "malformed"])
def test_what_may_pass_is_asked_again_and_counted(fault):
    with FakeServer(faults={0: fault, 1: fault}) as server:
        servers, window = made(server)
        assert ask(servers)[0].output_ids == [21, 31, EOS]
    assert len(server.bodies) == 3 and window.result()["rollout/vllm_retry_count"] == 2


def test_a_request_without_an_answer_in_time_is_asked_again():
    with FakeServer(faults={0: [60.0, (200, "late")]}) as server:
        servers, window = made(server, vllm_server_timeout=3.0)            # for the second attempt too, on a machine however busy
        assert ask(servers)[0].output_ids == [21, 31, EOS] and window.result()["rollout/vllm_retry_count"] == 1


def test_a_refusal_ends_the_run_at_once_with_the_servers_words():
    with FakeServer(faults={0: (400, "the prompt is longer than the maximum")}) as server:
        servers, window = made(server)
        with pytest.raises(ConfigError, match=r"refused a request \(400: the prompt is longer"):
            ask(servers)
    assert len(server.bodies) == 1


def test_a_server_that_stays_down_ends_the_run_after_one_deadline(monkeypatch):
    monkeypatch.setattr(client, "RETRY_SECONDS", 1.0)
    with FakeServer() as server:
        server.down = True
        servers, _ = made(server)
        started = time.monotonic()
        with pytest.raises(ConfigError, match="has not answered for 1 s"):
            ask(servers, [(1,)] * 5)
        assert time.monotonic() - started < 20 and len(server.bodies) <= 5 * 4    # one layer: 0, 0.25, 0.75 s


def test_a_server_that_takes_requests_and_answers_none_is_given_up_after_three_timeouts(monkeypatch):
    monkeypatch.setattr(client, "RETRY_SECONDS", 1.2)
    with FakeServer(delay=3600) as server:
        servers, _ = made(server, vllm_server_timeout=1.3)
        with pytest.raises(ConfigError, match="has not answered for"):
            ask(servers)
        assert len(server.bodies) == 3


def test_an_outage_is_counted_from_the_servers_last_answer_not_from_a_requests_first_failure(monkeypatch):
    """A request that has failed for a while already is not given up because of a pause that others outlast."""
    clock, sleep = [0.0], asyncio.sleep

    async def pause(seconds):                                   # between two attempts 20 s pass and another request is answered
        if seconds:
            clock[0] += 20.0
            await servers.generate([2], SAMPLING)
        await sleep(0)
    monkeypatch.setattr(client, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(client, "asyncio", SimpleNamespace(**vars(asyncio) | dict(sleep=pause)))
    with FakeServer(faults=dict.fromkeys([0, 2, 4, 6], (503, "busy"))) as server:      # every request but those between, of the others
        servers, window = made(server)
        assert ask(servers)[0].output_ids[-1] == EOS and window.result()["rollout/vllm_retry_count"] == 4 and clock[0] > 3 * client.RETRY_SECONDS


def test_a_request_that_always_fails_at_a_server_that_answers_others_is_given_up_after_so_many_attempts(monkeypatch):
    monkeypatch.setattr(client, "ATTEMPTS", 3)
    with FakeServer(faults=dict.fromkeys(range(3), (500, "this prompt breaks me"))) as server:
        servers, _ = made(server)
        with pytest.raises(ConfigError, match="failed one request 3 times .500: this prompt breaks me"):
            ask(servers)
    assert len(server.bodies) == 3


# Packed log-probs

INFO = '{"vllm_config": {"scheduler_config": {"scheduler_cls": "vllm_scheduler.scheduler"}}}'


class Told(FakeServer):
    """Counts how often it is asked what it is; `status` is its first answer's."""
    told, status = 0, 200

    async def _get(self, request):
        self.told += request.path == "/server_info"
        return web.Response(status=self.status, text="not yet") if self.told == 1 and self.status != 200 else await super()._get(request)


def asked_packed(server):
    """Of each request: the K that it asked to have packed, None where it asked plainly; never both ways at once."""
    wanted = [((b["sampling_params"].get("extra_args") or {}).get("sampler_logprobs"), b["sampling_params"]["logprobs"]) for b in server.bodies]
    assert all((packed is None) != (plain is None) for packed, plain in wanted)
    return [packed for packed, _ in wanted]


def test_a_server_with_the_scheduler_is_asked_for_packed_logprobs_and_one_without_it_for_plain_ones():
    with Told(info=INFO) as has, Told(info='{"vllm_config": {"scheduler_config": {"scheduler_cls": null}}}') as lacks, FakeServer() as old:
        turns = []
        for server in (has, lacks, old):
            servers, window = made(server)
            turns.append(ask(servers, [(1, 2)] * 5)[0])
            assert "rollout/vllm_retry_count" not in window.result()
    assert asked_packed(has) == [2] * 5 and asked_packed(lacks) == asked_packed(old) == [None] * 5
    assert all(b["sampling_params"]["output_kind"] == 2 for server in (has, lacks, old) for b in server.bodies)
    assert (has.told, lacks.told) == (1, 1), "however many requests begin at once"
    first, second, third = turns
    assert second == third and first.output_sampler_logprobs[0] == {21: -0.5, 22: -1.5} and second.output_sampler_logprobs[0] == {21: -0.5, 22: -1.5, 23: -2.5}
    assert (first.output_ids, first.output_log_probs, first.model_version) == (second.output_ids, second.output_log_probs, 3)


@pytest.mark.parametrize("changes", [dict(stop=["\n"]), dict(n=2)])
def test_where_no_packed_logprobs_of_the_reply_could_come_back_it_is_asked_for_plain_ones(changes):
    with FakeServer(info=INFO) as server:
        assert ask(made(server)[0], sampling=SAMPLING | changes)[0].output_log_probs == [-0.5, -1.0, -1.5]
    assert asked_packed(server) == [None]


def test_a_server_that_does_not_pack_though_it_says_so_is_asked_for_plain_logprobs_from_then_on(capsys):
    def answer(body):
        made_choice = choice([21, EOS])
        return made_choice if body["sampling_params"]["logprobs"] else made_choice | dict(logprobs=None)
    with FakeServer(answer, info=INFO.replace(".scheduler", ".another")) as server:
        servers, window = made(server)
        assert ask(servers)[0].output_log_probs == [-0.5, -0.5] and window.result()["rollout/vllm_retry_count"] == 1
        ask(servers)
        assert asked_packed(server) == [2, None, None]
    assert capsys.readouterr().out.count("asked for plain ones from now on") == 1


@pytest.mark.parametrize("status", [503, 429])
def test_a_server_that_cannot_yet_say_whether_it_packs_is_asked_again(status):
    with Told(info=INFO) as server:
        server.status = status
        servers, window = made(server)
        ask(servers)
    assert asked_packed(server) == [2] and window.result()["rollout/vllm_retry_count"] == 1 and server.told == 2


def test_a_server_that_was_taken_out_is_asked_anew_whether_it_packs():
    with FakeServer(info=INFO) as first, FakeServer(info=INFO) as second:
        servers, _ = made(first, second)
        ask(servers)
        servers._take_out(0, "a test")
        first.info, servers.restored[0] = "{}", servers.lost[0]
        ask(servers)
    assert asked_packed(first) == [2, None]


def test_completions_see_no_field_of_the_token_endpoint_and_the_users_extra_args_survive():
    sampling = SAMPLING | dict(extra_args=dict(mine=1))
    with FakeServer(token_endpoint=False, info=INFO) as text, FakeServer(info=INFO) as tokens:
        for server in (text, tokens):
            assert ask(made(server)[0], sampling=sampling)[0].output_ids == [21, 31, EOS]
    assert not {"extra_args", "output_kind", "detokenize", "sampler_logprobs"} & set(text.bodies[0]) and text.bodies[0]["logprobs"] == 3
    assert tokens.bodies[0]["sampling_params"]["extra_args"] == dict(mine=1, sampler_logprobs=2) and sampling["extra_args"] == dict(mine=1)


# Several servers

def test_groups_go_to_the_least_loaded_server_and_stay_there():
    with FakeServer() as first, FakeServer() as second:
        servers, _ = made(first, second)

        async def group(load):
            servers.choose(load)
            await asyncio.gather(*(servers.generate([load[0]], SAMPLING) for _ in range(3)))

        async def work():
            async with servers:
                for load in ([0, 1], [2, 1], [1, 1]):
                    await asyncio.create_task(group(load))
        asyncio.run(work())
    assert [b["token_ids"] for b in first.bodies] == [[0]] * 3 + [[1]] * 3 and [b["token_ids"] for b in second.bodies] == [[2]] * 3


def test_a_dead_server_is_taken_out_and_its_requests_are_served_by_another(capsys):
    with FakeServer() as first, FakeServer() as second:
        first.down = True
        servers, window = made(first, second)
        turns = ask(servers, [(1,)] * 4)
        assert all(turn.output_ids[-1] == EOS for turn in turns) and len(second.bodies) == 4
        assert servers.in_use() == [1] and list(servers.lost) == [1, 0]
        first.down = False
        asked = len(first.bodies)
        ask(servers, [(1,)] * 4)
        assert len(first.bodies) == asked, "back, but with which weights? Not before the trainer has given it the current ones"
        servers.restored[0] = servers.lost[0]
        ask(servers, [(1,)] * 4)
        assert len(first.bodies) == asked + 4
    assert capsys.readouterr().out.count("is taken out") == 1


def test_a_passing_fault_takes_no_server_out():
    with FakeServer(faults={0: (503, "busy")}) as first, FakeServer() as second:
        servers, _ = made(first, second)
        ask(servers)
        assert servers.in_use() == [0, 1] and len(first.bodies) == 2 and not second.bodies


def test_with_no_server_left_in_use_the_run_ends(monkeypatch):
    monkeypatch.setattr(client, "RETRY_SECONDS", 0.6)
    with FakeServer() as first, FakeServer() as second:
        first.down = second.down = True
        servers, _ = made(first, second)
        with pytest.raises(ConfigError, match="has not answered"):
            ask(servers)
        servers.restored[0] = servers.restored[1] = -1
        with pytest.raises(ConfigError, match="no server has the current weights"):
            ask(servers)


def restarted(asked, told_until=8):
    """Answers with a version at first, and without one from the `told_until`-th request on."""
    asked.append(1)
    return choice([5, EOS], versions=(7, 7) if len(asked) <= told_until else ())


def test_no_reply_of_a_server_started_anew_passes_for_one_of_the_current_weights():
    """It answers again, with its checkpoint's weights; found by what it no longer tells."""
    first_asked, second_asked = [], []
    with FakeServer(answer=lambda b: restarted(first_asked)) as first, FakeServer(answer=lambda b: restarted(second_asked, 99)) as second:
        servers, _ = made(first, second)
        assert all(turn.version_told for turn in ask(servers, [(1,)] * 8)) and len(first_asked) == 8
        assert all(turn.version_told for turn in ask(servers, [(1,)] * 8)) and len(second_asked) == 8
        assert servers.in_use() == [1]


def test_an_only_server_started_anew_ends_the_run_at_once():
    asked = []
    with FakeServer(answer=lambda b: restarted(asked, 1)) as server:
        servers, _ = made(server)
        ask(servers)
        with pytest.raises(ConfigError, match="lost the trained weights. Start the run again"):
            ask(servers)


def test_a_server_that_is_healthy_but_fails_every_request_is_left_for_another(monkeypatch):
    monkeypatch.setattr(client, "ATTEMPTS", 3)
    with FakeServer(faults=dict.fromkeys(range(99), (500, "oops"))) as first, FakeServer() as second:
        servers, _ = made(first, second)
        assert ask(servers)[0].output_ids[-1] == EOS
        assert (len(first.bodies), len(second.bodies), servers.in_use()) == (3, 1, [1])


def test_requests_at_a_server_that_the_trainer_takes_out_go_on_elsewhere():
    """A sync that fails half-way leaves its server paused: what it was asked would never be answered."""
    with FakeServer(delay=90.0) as first, FakeServer() as second:
        servers, _ = made(first, second)

        async def work():
            async with servers:
                asked = asyncio.create_task(servers.generate([1], SAMPLING))
                while not first.bodies:
                    await asyncio.sleep(0.01)
                servers.restored[0] = -1
                return await asked
        started = time.monotonic()
        assert asyncio.run(work()).output_ids[-1] == EOS and time.monotonic() - started < 30 and len(second.bodies) == 1


# Load

METRICS = """# HELP vllm:kv_cache_usage_perc KV-cache usage
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.5
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
vllm:num_requests_waiting{engine="0",model_name="m"} 0.0
vllm:num_requests_waiting{engine="1",model_name="m"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 9.0
vllm:num_preemptions_total{engine="0",model_name="m"} 5.0
vllm:num_preemptions_total{engine="1",model_name="m"} 1.0
vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="0",num_gpu_blocks="100"} 1.0
vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="1",num_gpu_blocks="50"} 1.0
"""


def test_the_load_is_the_largest_usage_and_sums_over_engines():
    assert parse_metrics(METRICS) == dict(usage=0.5, running=7, waiting=2, preempted=6, kv_tokens=1600)
    told = METRICS.replace('block_size="16"', 'block_size="16",kv_cache_size_tokens="700"')
    assert parse_metrics(told)["kv_tokens"] == 1400, "the server's own count: a hybrid's blocks are of several kinds"
    assert parse_metrics("") == dict(usage=0, running=0, waiting=0, preempted=0, kv_tokens=0)


def test_the_cap_starts_at_what_fits_and_follows_the_rules():
    cap = LoadCap(100)
    assert cap.limit == 100
    cap.start(40)
    cap.update(0.1, 0)
    assert cap.limit == 40, "no cap's worth of rollouts has finished"
    cap.finished = 40
    cap.update(0.1, 1)
    assert cap.limit == 40, "requests wait"
    cap.update(0.6, 0)
    assert cap.limit == 40
    cap.update(0.59, 0)
    assert (cap.limit, cap.finished) == (50, 0)
    cap.update(0.59, 0)
    assert cap.limit == 50, "once a cap's worth"
    cap.update(0.81, 0)
    assert cap.limit == 35
    cap.running = 50
    cap.update(0.95, 0)
    assert cap.limit == 35, "the cut has not taken effect yet"
    for _ in range(20):
        cap.finished, cap.running = 10**6, 0
        cap.update(0.0, 0)
    assert cap.limit == 100
    for _ in range(40):
        cap.update(0.9, 5)
    assert cap.limit == 1


def test_a_cap_lets_no_more_run_and_wakes_those_that_wait():
    async def work():
        cap, most = LoadCap(8), 0
        cap.start(2)

        async def rollout():
            nonlocal most
            async with cap.place():
                most = max(most, cap.running)
                await asyncio.sleep(0.01)
        await asyncio.gather(*(rollout() for _ in range(9)))
        return most, cap.running, cap.finished
    assert asyncio.run(work()) == (2, 0, 9)


def test_a_place_given_up_early_is_another_rollouts_at_once_and_is_counted_once():
    async def work():
        cap, order, left = LoadCap(1), [], []

        async def rollout(n):
            async with cap.place(lambda: left.append(n)) as leave:
                order.append(n)
                leave()
                leave()
                await asyncio.sleep(0.01 * (3 - n))
        tasks = [asyncio.create_task(rollout(n)) for n in range(4)]
        await asyncio.sleep(0.005)
        begun = list(order)
        await asyncio.gather(*tasks)
        return begun, sorted(left), cap.running, cap.finished
    assert asyncio.run(work()) == ([0, 1, 2, 3], [0, 1, 2, 3], 0, 4)


def test_a_rollout_cancelled_while_it_waits_or_as_it_is_let_in_leaves_no_place_taken():
    async def work():
        cap, left = LoadCap(1), []

        async def rollout(n):
            async with cap.place(lambda: left.append(n)):
                await asyncio.sleep(60)
        first, second, third = (asyncio.create_task(rollout(n)) for n in range(3))
        await asyncio.sleep(0)
        second.cancel()
        await asyncio.sleep(0)
        assert (cap.running, left) == (1, [1])
        first.cancel()
        await asyncio.sleep(0)                                      # its place goes to the third, which is cancelled before it runs
        assert cap.running == 1
        third.cancel()
        await asyncio.gather(first, second, third, return_exceptions=True)
        return cap.running, sorted(left)
    assert asyncio.run(work()) == (0, [0, 1, 2])


@pytest.mark.parametrize("token_endpoint", [True, False])
def test_of_replies_that_come_together_all_free_their_places_before_one_is_read_in_each_turn_of_the_loop(token_endpoint, monkeypatch):
    """Reading 256 takes half a second: the requests that follow would wait for it."""
    events = []
    for name, read in (("parse_generate", parse_generate), ("parse_completion", parse_completion)):
        monkeypatch.setattr(client, name, lambda *arguments, read=read: events.append("read") or read(*arguments))
    with FakeServer(token_endpoint=token_endpoint) as server:
        servers, _ = made(server)

        async def turns():
            while True:
                events.append("turn")
                await asyncio.sleep(0)

        async def turn(n):
            arrived.set(lambda: events.append("free"))
            await servers.generate([n], SAMPLING)

        async def work():
            async with servers:
                await servers.generate([9], SAMPLING)               # knows the server now
                content, together = body(choice([21, EOS]) if token_endpoint else as_completion(choice([21, EOS]))), asyncio.Event()

                async def post(*_):
                    await together.wait()
                    return content
                monkeypatch.setattr(servers, "_post", post)
                tasks = [asyncio.create_task(turn(n)) for n in range(6)]
                await asyncio.sleep(0.05)
                events.clear()
                ticking = asyncio.create_task(turns())
                together.set()
                await asyncio.gather(*tasks)
                ticking.cancel()
        asyncio.run(work())
    reads = [at for at, event in enumerate(events) if event == "read"]
    assert events[:reads[0]].count("free") == len(reads) == 6
    assert all("turn" in events[a:b] for a, b in zip(reads, reads[1:]))


def test_watching_sets_the_cap_and_logs_the_load(monkeypatch):
    monkeypatch.setattr(client, "POLL_SECONDS", 0.05)
    with FakeServer(metrics=METRICS) as first, FakeServer(metrics=METRICS) as second:
        servers, window = made(first, second)

        async def work():
            cap = LoadCap(512)
            async with servers:
                watching = asyncio.create_task(servers.watch(cap, max_model_len=100))
                while cap.size is None:
                    await asyncio.sleep(0.01)
                first.metrics = METRICS.replace("num_preemptions_total{engine=\"0\",model_name=\"m\"} 5.0", "num_preemptions_total{engine=\"0\",model_name=\"m\"} 8.0")
                while window.values["rollout/vllm_preemption_count"][0] < 3:
                    await asyncio.sleep(0.01)
                watching.cancel()
            return cap.limit
        assert asyncio.run(asyncio.wait_for(work(), 60)) == 32
    logged = window.result()
    assert logged["rollout/vllm_kv_cache_usage_frac"] == 0.5 and logged["rollout/vllm_running_requests"] == 14
    assert logged["rollout/vllm_queued_requests"] == 4 and logged["rollout/vllm_preemption_count"] == 3


def test_without_metrics_the_cap_is_the_option():
    with FakeServer() as server:
        servers, _ = made(server)

        async def work():
            cap = LoadCap(7)
            async with servers:
                await servers.watch(cap, 100)
            return cap.limit
        assert asyncio.run(work()) == 7


def test_a_server_that_is_slow_to_tell_its_load_at_the_start_is_asked_again_while_rollouts_run_and_are_counted(monkeypatch):
    """One cut connection once ended load control: 512 rollouts where the cache holds 16."""
    monkeypatch.setattr(client, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(client, "PATIENCE_SECONDS", 0.3)

    async def work():
        with FakeServer(metrics=METRICS.replace("0.5", "0.7")) as server:
            servers, cap = made(server)[0], LoadCap(512)
            server.down = True
            async with servers:
                watching = asyncio.create_task(servers.watch(cap, 100))
                await cap.ready()            # not for ever
                assert cap.limit == 512 and cap.known.is_set() and not watching.done(), "rollouts run, and rollout/concurrency is logged"
                server.down = False
                while cap.size is None:
                    await asyncio.sleep(0.01)
                watching.cancel()
            return cap.limit
    assert asyncio.run(asyncio.wait_for(work(), 60)) == 16
