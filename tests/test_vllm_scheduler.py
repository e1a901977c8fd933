"""The packed log-probs without an engine: whose rows they are, that others are served as ever, and that the client reads back the very floats."""
import json
from types import SimpleNamespace

import numpy as np
import pytest
import vllm_scheduler
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.outputs import LogprobsLists

from replies import TopLogprobs, parse_generate
from tools import TurnRecord, _top_arrays, turns_to_samples
from vllm_scheduler import FIELD, PackedLogprobs, Rows

WIDTH = 1 + 6            # of a step's arrays: the largest K in the batch


class Base:
    """What vLLM's scheduler does with a step's log-probs. A request ends after `left` tokens, with what its connector says of it."""

    def __init__(self, vllm_config):
        self.vllm_config, self.requests, self.given = vllm_config, {}, []

    def add_request(self, request):
        self.requests[request.request_id] = request

    def update_from_output(self, scheduler_output, model_runner_output):
        self.given.append(model_runner_output.logprobs)
        outputs = {}
        for name in scheduler_output.num_scheduled_tokens:
            if (request := self.requests.get(name)) is None:
                continue
            index, logprobs = model_runner_output.req_id_to_index[name], None
            tokens = model_runner_output.sampled_token_ids[index][:request.left]
            request.left -= len(tokens)
            if request.sampling_params.num_logprobs is not None and model_runner_output.logprobs:
                logprobs = model_runner_output.logprobs.slice_request(index, len(tokens))
            if tokens:
                ended = request.left == 0
                outputs.setdefault(request.client, []).append(EngineCoreOutput(
                    name, tokens, logprobs, finish_reason=FinishReason.LENGTH if ended else None, kv_transfer_params=request.connector if ended else None,
                    prefill_stats=vars(request).pop("prefill_stats", None), events=vars(request).pop("events", None)))
                if ended:
                    del self.requests[name]
        return {client: EngineCoreOutputs(outputs=of_client) for client, of_client in outputs.items()}


class Scheduler(PackedLogprobs, Base):
    pass


class Engine:
    """Feeds steps of random numbers to the scheduler; `rows[name]` are those of a request's tokens in order."""

    def __init__(self):
        self.scheduler = Scheduler(SimpleNamespace(model_config=SimpleNamespace(max_logprobs=20)))
        self.rng, self.rows, self.outputs = np.random.default_rng(0), {}, {}

    def add(self, name, wanted, left=5, client=0, connector=None, **params):
        params = SamplingParams(extra_args=None if wanted is None else {FIELD: wanted}, **params)
        self.scheduler.add_request(SimpleNamespace(request_id=name, sampling_params=params, left=left, client=client, connector=connector))
        self.rows[name] = ([], [])
        return params

    def step(self, names, accepted=None, logprobs=True, width=WIDTH):
        """One token for each of these requests, in this order, or as many as `accepted` says of three sampled; all their outputs by name."""
        rows, accepted = 3 if accepted else 1, accepted or [1] * len(names)
        ids, values = self.rng.integers(0, 1000, (rows * len(names), width)), self.rng.normal(-3, 1, (rows * len(names), width)).astype(np.float32)
        step = LogprobsLists(ids, values, np.zeros(len(ids), np.int64), [rows * i for i in range(len(names) + 1)] if rows > 1 else None) if logprobs else None
        for index, (name, n) in enumerate(zip(names, accepted)):
            for kept, array in zip(self.rows[name], (ids, values)):
                kept.extend(array[rows * index:rows * index + n].copy() if logprobs else [])
        got = self.scheduler.update_from_output(
            SimpleNamespace(num_scheduled_tokens=dict.fromkeys(reversed(names), rows)),
            SimpleNamespace(logprobs=step, req_id_to_index={name: i for i, name in enumerate(names)},
                            sampled_token_ids=[ids[rows * i:rows * i + n, 0].tolist() if logprobs else [] for i, n in enumerate(accepted)]))
        self.sent = {output.request_id: output.new_token_ids for of in got.values() for output in of.outputs}
        self.plain = {output.request_id: output.new_logprobs and (output.new_logprobs[0].copy(), output.new_logprobs[1].copy()) for of in got.values() for output in of.outputs}
        ids[:], values[:] = -7, 7.0                              # vLLM's pinned memory is written again
        self.outputs |= {output.request_id: output for of_client in got.values() for output in of_client.outputs}
        return self.outputs

    def turn(self, name, tokens=None, **choice):
        """What the client makes of the reply."""
        ids = [int(row[0]) for row in self.rows[name][0]] if tokens is None else tokens
        return parse_generate(json.dumps(dict(choices=[dict(token_ids=ids, logprobs=None) | choice], kv_transfer_params=self.outputs[name].kv_transfer_params)).encode(), [1], 4)

    def assert_packed(self, name, wanted):
        """Its reply holds its own rows and none of another's, the first 1 + K columns, bit for bit."""
        ids, values = (np.array([row[:wanted + 1] for row in rows]) for rows in self.rows[name])
        packed, turn = self.outputs[name].kv_transfer_params[FIELD], self.turn(name)
        assert packed["count"] == len(ids) and turn.output_log_probs == values[:, 0].tolist()
        assert turn.output_sampler_logprobs == [dict(zip(*row)) for row in zip(ids.tolist(), values.tolist())]


@pytest.mark.parametrize("several", [False, True])
def test_each_request_gets_its_rows_in_order_while_the_batch_changes_under_it(several):
    """It is condensed, reordered, left out of a step, joined by others; steps without log-probs lie between. Several: as speculative decoding samples."""
    engine, most = Engine(), 3 if several else 1
    for name, wanted, left, client in (("a", 3, 4, 0), ("b", 6, 6, 1), ("c", 0, 3, 0)):
        engine.add(name, wanted, left * most, client)
    def step(*names, n):
        engine.step(list(names), [n + (i + n) % 2 for i in range(len(names))] if several else None)
    step("a", "b", "c", n=2)
    step("c", "a", n=1)
    engine.step(["b"], logprobs=False)
    step("b", "c", "a", n=2)
    engine.add("d", 5, 2)
    while engine.scheduler.requests:
        alive = list(engine.scheduler.requests)
        engine.step(alive[::-1], [min(1 + i, engine.scheduler.requests[name].left) for i, name in enumerate(alive[::-1])] if several else None)
    for name, wanted in (("a", 3), ("b", 6), ("c", 0), ("d", 5)):
        engine.assert_packed(name, wanted)
        assert len(engine.rows[name][0]) == dict(a=4 * most, b=6 * most, c=3 * most, d=2)[name] and engine.plain.get(name) is None
    assert not engine.scheduler.held and not any(engine.scheduler.given), "nothing is sliced where all asked for packed ones"


def test_over_many_steps_of_any_width_no_more_rows_are_kept_than_requests_need(monkeypatch):
    """Requests of 1 to 40 tokens come and end; one asks for more than the others, and some are aborted beside others that want no packed ones."""
    engine, rng, names = Engine(), np.random.default_rng(1), []
    monkeypatch.setattr(Rows, "SIZE", 256)
    engine.add("plain", None, left=10**6)
    engine.add("plain too", None, left=10**6)
    for n in range(1500):
        if n % 5 == 0:
            name, wanted = f"r{n}", 12 if n % 200 == 100 else 4
            engine.add(name, wanted, left=int(rng.integers(1, 41)) if n != 35 else 10**6)
            names.append((name, wanted))
        alive = list(engine.scheduler.requests)
        engine.step(rng.permutation(alive).tolist(), width=1 + max([4, *(wanted for name, wanted in names if name in alive)]))
        if n == 70:
            del engine.scheduler.requests["r35"]
    done = [(name, wanted) for name, wanted in names if name not in engine.scheduler.requests and name != "r35"]
    for name, wanted in done:
        engine.assert_packed(name, wanted)
    assert len(done) > 250 and len(engine.scheduler.rows.chunks) < 6, "1500 rows of some 15 000: an aborted one keeps none"


ONE_MESSAGE = dict(output_kind=RequestOutputKind.FINAL_ONLY, detokenize=False)


def test_tokens_of_a_reply_in_one_message_leave_at_its_end_and_the_first_with_what_the_prefill_tells(monkeypatch):
    monkeypatch.setattr(vllm_scheduler, "HOLDS", True)
    engine, sent = Engine(), []
    engine.add("late", 2, left=6, client=1, **ONE_MESSAGE)
    engine.add("plain", 2, left=6)
    engine.scheduler.requests["late"].prefill_stats = "of the prompt"
    for n in range(6):
        if n == 3:
            engine.scheduler.requests["late"].events = ["preempted"]
        engine.step(["late", "plain"] if n % 2 else ["plain", "late"])
        sent.append(engine.sent.get("late"))
        assert engine.sent["plain"] == [int(engine.rows["plain"][0][-1][0])]
    ids = [int(row[0]) for row in engine.rows["late"][0]]
    assert sent == [ids[:1], None, None, ids[1:4], None, ids[4:]]
    for name in ("late", "plain"):
        engine.assert_packed(name, 2)


@pytest.mark.parametrize("changes", [dict(output_kind=RequestOutputKind.CUMULATIVE), dict(output_kind=RequestOutputKind.DELTA), dict(detokenize=True), dict(detokenize=True, stop=["x"]), "versions"])
def test_tokens_that_somebody_looks_at_before_the_end_leave_at_once(monkeypatch, changes):
    """A stream, one with stop words; and where a message tells the version of its tokens' weights."""
    monkeypatch.setattr(vllm_scheduler, "HOLDS", changes != "versions")
    engine = Engine()
    engine.add("a", 2, left=3, **ONE_MESSAGE | (changes if changes != "versions" else {}))
    for _ in range(3):
        engine.step(["a"])
        assert engine.sent["a"] == [int(engine.rows["a"][0][-1][0])]
    engine.assert_packed("a", 2)


def test_a_client_whose_tokens_all_wait_gets_a_message_only_for_what_else_it_carries(monkeypatch):
    monkeypatch.setattr(vllm_scheduler, "HOLDS", True)
    engine, more, plain = Engine(), {}, Base.update_from_output

    def with_more(*args):
        outputs = plain(*args)
        for name, value in more.items():
            setattr(outputs[3], name, value)
        return outputs
    monkeypatch.setattr(Base, "update_from_output", with_more)
    engine.add("a", 2, left=9, client=3, **ONE_MESSAGE)

    def step():
        logprobs = LogprobsLists(np.zeros((1, 3), int), np.zeros((1, 3), np.float32), np.zeros(1, int), None)
        return engine.scheduler.update_from_output(SimpleNamespace(num_scheduled_tokens=dict(a=1)), SimpleNamespace(logprobs=logprobs, req_id_to_index=dict(a=0), sampled_token_ids=[[7]]))
    assert step() == {}
    for name, value in (("finished_requests", {"b"}), ("scheduler_stats", "some")):
        more[name] = value
        (client, message), = step().items()
        assert client == 3 and message.outputs == [] and getattr(message, name) == value


def test_vllms_frontend_makes_the_same_reply_of_one_late_message():
    """Its real output processor, of the vLLM installed here."""
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.output_processor import OutputProcessor
    replies = []
    for messages in ([[5], [6], [7, 8], [9]], [[5], [6, 7, 8, 9]]):
        frontend, fields = OutputProcessor(None, log_stats=False), dict.fromkeys(EngineCoreRequest.__struct_fields__)
        request = EngineCoreRequest(**fields | dict(request_id="a", external_req_id="a", prompt_token_ids=[1, 2], arrival_time=0.0, sampling_params=SamplingParams(max_tokens=5, **ONE_MESSAGE)))
        frontend.add_request(request, None)
        for i, tokens in enumerate(messages):
            last = i == len(messages) - 1
            got = frontend.process_outputs([EngineCoreOutput("a", tokens, finish_reason=FinishReason.LENGTH if last else None, kv_transfer_params={FIELD: 1} if last else None)])
        reply, = got.request_outputs
        replies.append((list(reply.outputs[0].token_ids), reply.outputs[0].finish_reason, reply.kv_transfer_params, reply.finished))
    assert replies[0] == replies[1] == ([5, 6, 7, 8, 9], "length", {FIELD: 1}, True)


def test_tokens_that_vllm_drops_after_the_end_of_a_request_have_no_row():
    engine = Engine()
    engine.add("a", 2, left=4)
    engine.add("b", 2, left=9)
    engine.step(["b", "a"], [3, 3])
    output = engine.step(["a", "b"], [3, 2])["a"]
    assert len(output.new_token_ids) == 1 and output.kv_transfer_params[FIELD]["count"] == 4
    for rows in engine.rows["a"]:
        del rows[4:]
    engine.assert_packed("a", 2)


def test_a_request_that_did_not_ask_is_served_as_ever_beside_one_that_did():
    engine = Engine()
    engine.add("plain", None, left=3, logprobs=6, connector=dict(remote=1))
    engine.add("packed", 2, left=3, connector=dict(remote=2))
    engine.add("none", None, left=3)
    for n in range(3):
        outputs = engine.step(["none", "packed", "plain"] if n % 2 else ["plain", "none", "packed"])
        assert all(np.array_equal(got[0], rows[-1]) for got, rows in zip(engine.plain["plain"], engine.rows["plain"]))
        assert outputs["packed"].new_logprobs is None and outputs["none"].new_logprobs is None
    assert all(engine.scheduler.given)
    assert outputs["plain"].kv_transfer_params == dict(remote=1) and outputs["none"].kv_transfer_params is None
    assert outputs["packed"].kv_transfer_params.pop("remote") == 2, "what a connector says is kept"
    engine.assert_packed("packed", 2)


def test_an_aborted_request_is_forgotten_and_the_others_keep_their_rows():
    engine = Engine()
    for name in ("a", "b", "c"):
        engine.add(name, 2, left=3)
    engine.step(["a", "b", "c"])
    del engine.scheduler.requests["a"]
    engine.step(["a", "b", "c"])                 # it was in flight
    assert set(engine.scheduler.held) == {"b", "c"}
    del engine.scheduler.requests["b"]
    engine.step(["c"])
    engine.assert_packed("c", 2)
    assert not engine.scheduler.held and engine.outputs["b"].kv_transfer_params is None


@pytest.mark.parametrize("wanted", [-1, 21, "x", "3", True, 2.0, None, [1]])
@pytest.mark.parametrize("logprobs", [None, 4])
def test_a_request_for_nonsense_is_served_as_if_it_had_not_asked(wanted, logprobs):
    engine = Engine()
    params = engine.add("a", wanted, left=2, logprobs=logprobs)
    engine.add("b", 3, left=3)
    for _ in range(2):
        output = engine.step(["b", "a"])["a"]
        assert (engine.plain["a"] is None) == (logprobs is None) and output.kv_transfer_params is None
    engine.step(["b"])
    engine.assert_packed("b", 3)
    assert params.logprobs == logprobs and engine.turn("a") is None, "the client takes a reply without log-probs for none"


def test_a_server_without_a_limit_on_logprobs_packs_any_number():
    engine = Engine()
    engine.scheduler.vllm_config.model_config.max_logprobs = -1
    assert engine.add("a", 21).logprobs == 21 and engine.add("b", -1).logprobs is None


def test_a_request_for_both_gets_what_vllm_itself_knows():
    engine = Engine()
    params = engine.add("a", 3, left=1, logprobs=5)
    output = engine.step(["a"])["a"]
    assert params.logprobs == 5 and engine.plain["a"] is not None and output.kv_transfer_params is None


def test_a_request_that_ends_without_a_token_has_no_row_and_its_reply_is_read():
    """One that vLLM ends with an error."""
    engine = Engine()
    engine.outputs["a"] = EngineCoreOutput("a", [], kv_transfer_params={FIELD: Rows().pack(3, [])})
    turn = engine.turn("a", tokens=[])
    assert engine.outputs["a"].kv_transfer_params[FIELD]["count"] == 0 and turn.output_ids == turn.output_log_probs == turn.output_sampler_logprobs == []


def ended(values=(), wanted=4):
    """An engine whose request "a" has ended after three tokens, each row with the ids 0, 1, 2, …; the first row's values begin with these."""
    engine = Engine()
    engine.add("a", wanted, left=3)
    made = engine.rng.normal(-3, 1, (3, 1, WIDTH))
    made[0, 0, :len(values)] = values
    engine.rng = SimpleNamespace(integers=lambda low, high, shape: np.arange(WIDTH)[None], normal=lambda *_: next(steps))
    steps = iter(made)
    for _ in range(3):
        engine.step(["a"])
    return engine


def test_a_packed_reply_tells_versions_and_candidate_sets_as_a_plain_one_does():
    engine = ended()
    turn = engine.turn("a", weight_versions=[dict(version="2", start=0, end=2), dict(version="5", start=2, end=3)], sampling_mask=[[1], [2], [3]])
    assert (turn.model_version, turn.mean_version, turn.version_told, turn.output_sampling_mask) == (2, 3.0, True, [[1], [2], [3]])
    turn = engine.turn("a")
    assert (turn.model_version, turn.mean_version, turn.version_told, turn.prompt_ids) == (4, 4.0, False, [1])


def test_a_token_that_is_not_the_sampled_one_has_no_logprob():
    engine = ended()
    ids = np.array(engine.rows["a"][0])[:, 0].tolist()
    turn = engine.turn("a", tokens=[ids[0], ids[1] + 1, ids[2]])
    assert [value is None for value in turn.output_log_probs] == [False, True, False]


@pytest.mark.parametrize("values", [(-1.0, -1.0, -np.inf, -np.inf, -np.inf), (-1.0, np.nan, -1.0, -np.inf, -np.inf), (-np.inf, -1.0, -2.0, -np.inf, np.nan), (np.nan,) * 5])
def test_what_is_not_finite_is_no_candidate_of_the_sampler_and_no_logprob(values):
    turn, numbers = ended(values).turn("a"), np.float32(values)
    ids, found = _top_arrays(turn.output_sampler_logprobs, 4)
    finite = [i for i in range(5) if np.isfinite(numbers[i])][:4]
    assert sorted(ids[0][ids[0] >= 0].tolist()) == finite and sorted(found[0][ids[0] >= 0].tolist()) == sorted(numbers[finite].tolist())
    assert (found[0][ids[0] < 0] == -np.inf).all() and (ids[1:] >= 0).all()
    assert turn.output_log_probs[0] == (values[0] if np.isfinite(values[0]) else None) and None not in turn.output_log_probs[1:]


def test_packed_tops_can_be_used_as_the_list_of_dicts_that_hooks_expect():
    turn = ended((-1.0, -1.5, -2.0, -np.inf, np.nan)).turn("a")
    tops = turn.output_sampler_logprobs
    as_list = list(tops)
    assert tops == as_list and tops != as_list[1:] and (tops == None) is False      # noqa: E711
    assert list(as_list[0].values()) == [-1.0, -1.5, -2.0, None, None], "as an unpacked reply has them"
    assert tops + [{}] == [*as_list, {}] and [{}] + tops == [{}, *as_list] and tops[1:] == as_list[1:] and tops[-1] == as_list[-1]
    assert json.loads(json.dumps(list(tops)))


def test_packed_tops_and_the_same_as_dicts_make_the_same_sample():
    """The K most likely come best first, and the sampled token is one of them or less likely than all."""
    rng, steps = np.random.default_rng(0), 200
    values = -np.sort(rng.exponential(3, (steps, 6)), axis=1).astype(np.float32)
    ids, sampled = np.stack([rng.permutation(50)[:6] for _ in range(steps)]).astype(np.int32), rng.integers(0, 6, steps)
    tops = TopLogprobs(*(np.concatenate([np.take_along_axis(x, sampled[:, None], 1), x[:, :5]], 1) for x in (ids, values)))
    turns = [TurnRecord([1, 2], tops.ids[:, 0].tolist(), tops.values[:, 0].tolist(), output_sampler_logprobs=given) for given in (tops, list(tops))]
    for k in (0, 3, 5):
        (packed, _), (plain, _) = (turns_to_samples([turn], k, 0) for turn in turns)
        assert all(np.array_equal(getattr(packed[0], name), getattr(plain[0], name)) for name in ("topk_ids", "topk_logprobs", "sampler_logprobs", "trained_index"))


@pytest.mark.parametrize("tokens", [[0], [0, 0, 0, 0], []])
def test_packed_rows_that_are_not_one_a_token_count_as_none(tokens):
    """They would be another token's."""
    assert ended().turn("a", tokens=tokens) is None


def test_the_scheduler_is_of_the_kind_that_the_settings_need(monkeypatch):
    for name in ("PackedScheduler", "PackedAsyncScheduler"):
        assert issubclass(getattr(vllm_scheduler, name), PackedLogprobs) and getattr(vllm_scheduler, name).update_from_output is PackedLogprobs.update_from_output
        monkeypatch.setattr(vllm_scheduler, name, lambda vllm_config, kind=name, **more: (kind, more))
    for wanted, name in ((False, "PackedScheduler"), (True, "PackedAsyncScheduler")):
        config = SimpleNamespace(scheduler_config=SimpleNamespace(async_scheduling=wanted))
        assert vllm_scheduler.scheduler(vllm_config=config, log_stats=True) == (name, dict(log_stats=True))
