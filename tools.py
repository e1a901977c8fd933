"""Chat rendering, tool calls, and turns → samples: what the server sampled becomes what is trained, token for token."""
import asyncio
import copy
import inspect
import json
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise

import numpy as np
from jinja2 import TemplateError

from config import ConfigError
from metrics import Window
from packing import Sample
from rewards import in_thread
from tool_parsers import PARSERS, Call

KEPT_BYTES = 1 << 28     # in each Chat, of turns as text and ids: 500 conversations of 60,000 tokens. Where they do not fit, each costs the square of its turns


@dataclass
class TurnRecord:
    """One sampling request: the prompt sent to the server and the tokens it generated."""

    prompt_ids: list[int]
    output_ids: list[int]
    output_log_probs: list[float | None] = field(default_factory=list)   # one an output token
    output_mask: list[int] | None = None                                 # 1: train on it, 0: context; None: all 1
    output_sampling_mask: list[list[int]] | None = None                  # candidate set of each output token; None: whole vocabulary
    output_sampler_logprobs: Sequence[dict[int, float]] | None = None    # sampler's top log-probs by token id
    model_version: int = -1                                              # of the oldest output token; -1: the loop sets all three, to the rollout's first
    mean_version: float = -1.0                                           # over the output tokens
    max_version: int = -1                                                # of the newest
    version_told: bool = False                                           # by the server, else the one current at the request


def render(tokenizer, messages: list[dict], chat_template_kwargs: dict | None = None) -> list[int]:
    """Token ids of a conversation up to where the assistant speaks next."""
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, **(chat_template_kwargs or {}))


class Chat:
    """A chat template with one set of tools: what it does is found out once, by rendering probes, then it is asked for prompts.

    Where the template leaves the earlier part of a conversation as it is when messages are added (`preserves`), the next prompt is the
    tokens held so far, exactly as sampled, and the new messages rendered alone: nothing is decoded and encoded again, and a turn
    costs what it adds. Elsewhere the whole conversation is rendered anew, and the turn becomes a fork.
    """

    def __init__(self, tokenizer, template_kwargs: dict | None, tools: list[Callable], eos_token_ids: list[int], parser=None):
        self.tokenizer, self.eos_token_ids, self.schemas = tokenizer, eos_token_ids, [tool_schema(tool) for tool in tools]
        self.kwargs, self.known = dict(template_kwargs or {}, tools=self.schemas), {}
        self.ids_of = lambda text: tokenizer(valid(text), add_special_tokens=False)["input_ids"]
        self.turns, self.held = {}, 0                # text -> (T,) token ids, the latest asked for last; their bytes
        self.ends = re.compile("|".join(re.escape(token) for token in tokenizer.convert_ids_to_tokens(eos_token_ids)))
        self.probe = Call(self.schemas[0]["function"]["name"], dict(probe="value"))
        written = self._probe_calls()
        self.shows_calls, self.several = self.probe.name in written, False
        with suppress(TemplateError):                # Llama 3's raises at a second call in a message, which would cost the rollout
            self.several = bool(self._text([*ASK, assistant_message("", [self.probe] * 2), *(tool_message(n, self.probe.name, "hear") for n in range(2))], True))
        self.parser = parser if callable(parser) else PARSERS[parser or self._parser_of(written)]
        if self._text(ASK, True) == tokenizer.apply_chat_template(ASK, tokenize=False, add_generation_prompt=True, **(template_kwargs or {})):
            print("warning: the chat template does not show the model its tools: describe them in the prompt, or give a template that "
                  "does with chat_template_kwargs={'chat_template': …}.", flush=True)

    def prompt(self, messages: list[dict]) -> list[int]:
        """Token ids of a whole conversation up to where the assistant speaks next."""
        return self._encode(self._text(messages, True))

    def next_prompt(self, messages: list[dict], new: list[dict], turn: TurnRecord) -> list[int]:
        """Token ids after `turn`, whose reply is messages[-1], and the `new` messages, which are all of one role."""
        if not self.preserves(new[0]["role"]):
            return self.prompt(messages + new)
        ids = self._encode(self._after(messages[-1], new), keep=False)
        return turn.prompt_ids + turn.output_ids + ids[ended(turn.output_ids, self.eos_token_ids):]      # its end, where it was not sampled

    def preserves(self, role: str) -> bool:
        """Whether what was rendered and said stays as it is when messages of this role follow."""
        if role not in self.known:
            self.known[role] = all(self._keeps(role, thought) for thought in ("", "<think>\nwhy{}\n</think>\n\n"))
        return self.known[role]

    def reply(self, output_ids: list[int], calls_before: int = 0) -> tuple[dict, list[Call]]:
        """The message that sampled tokens are, and its calls: none from a turn that was cut off."""
        if not ended(output_ids, self.eos_token_ids):
            return dict(role="assistant", content=self.tokenizer.decode(output_ids, skip_special_tokens=True)), []
        text = self.tokenizer.decode(output_ids[:-1], skip_special_tokens=False)
        thought, tag, spoken = text.rpartition("</think>")
        content, calls = self.parser(spoken.partition("<think>")[0], self.schemas)      # a call that is only thought about is none
        if not calls:
            return dict(role="assistant", content=self.tokenizer.decode(output_ids, skip_special_tokens=True)), []
        if len(calls) > 1 and not self.several:      # and as plain text the template takes it
            calls = [replace(call, error=call.error or "make one call at a time") for call in calls]
        if any(call.error for call in calls):
            return dict(role="assistant", content=text), calls
        return assistant_message(thought + tag + content if self.shows_calls else text, calls, calls_before), calls

    def _text(self, messages: list[dict], generate: bool = False) -> str:
        if self.arguments_as_text:
            messages = json.loads(json.dumps(messages))
            for call in (call for message in messages for call in message.get("tool_calls") or []):
                call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generate, **self.kwargs)

    def _encode(self, text: str, keep: bool = True) -> list[int]:
        """Token ids. Each turn's by itself, for its end splits the text anyway: a turn that is rendered again is not encoded again."""
        cuts = [0, *(match.start() for match in self.ends.finditer(text)), len(text)]
        return list(chain.from_iterable((self._encode_turn if keep else self.ids_of)(text[start:end]) for start, end in pairwise(cuts)))

    def _encode_turn(self, text: str) -> list[int]:
        known = text in self.turns
        self.turns[text] = ids = self.turns.pop(text) if known else np.array(self.ids_of(text), np.int32)      # as a list nine times as large
        self.held += 0 if known else text.__sizeof__() + ids.__sizeof__()
        while self.held > KEPT_BYTES:
            self.held -= (oldest := next(iter(self.turns))).__sizeof__() + self.turns.pop(oldest).__sizeof__()
        return ids.tolist()

    def _after(self, reply: dict, new: list[dict]) -> str:
        """What the template writes after a reply's text: its end-of-turn token, separators, the new messages, and the assistant's opening."""
        turns_ended = len(self.ends.findall(self._text([*ASK, reply])))
        whole = self._text([*ASK, reply, *new], True)
        return whole[[match.start() for match in self.ends.finditer(whole)][turns_ended - 1]:]

    def _keeps(self, role: str, thought: str) -> bool:
        messages, prompts, replies = ASK, [self._text(ASK, True)], [f"{thought.format(n)}say{n}" for n in range(2)]
        for n, text in enumerate(replies):
            reply, new = dict(role="assistant", content=text), [dict(role=role, content=f"hear{n}")]
            if role == "tool":
                reply, new = assistant_message(text, [self.probe], n), [tool_message(n, self.probe.name, f"hear{n}")]
            messages = [*messages, reply, *new]
            prompts.append(self._text(messages, True))
        last = self._text([*ASK, reply])             # beside calls some templates show no text at all: then none can be lost
        return (all(later.startswith(earlier) for earlier, later in pairwise(prompts))
                and ("say1" not in last or all(text in prompts[-1] for text in replies))
                and self.ends.search(last) is not None and prompts[-1].endswith(self._after(reply, new)))

    def _probe_calls(self) -> str:
        """How the template writes a call, having found out which form of arguments it takes. Raises ConfigError."""
        exchange = [*ASK, assistant_message("", [self.probe]), tool_message(0, self.probe.name, "hear")]
        for self.arguments_as_text in (False, True):
            try:
                self._text(exchange, True)
                opening, whole = self._text(ASK, True), self._text(exchange[:2])
                written = whole.removeprefix(opening if whole.startswith(opening) else self._text(ASK))
                return written[:max((match.start() for match in self.ends.finditer(written)), default=len(written))]
            except (TypeError, TemplateError) as error:      # it joins the arguments to a string, or expects a dict
                problem = error
        raise ConfigError(f"the chat template cannot render a tool call and its result ({problem}): use a model whose template can, or give "
                          "one with chat_template_kwargs={'chat_template': …}.")

    def _parser_of(self, written: str) -> str:
        """The parser that reads the template's own call back. Raises ConfigError."""
        for name, parse in PARSERS.items():
            if parse(written, self.schemas)[1] == [self.probe]:
                return name
        raise ConfigError(f"no known tool-call format matches the chat template, which writes a call as {written[:200]!r}: set tool_parser to one of "
                          f"{', '.join(PARSERS)}, or to a function (text, schemas) -> (content, calls).")


ASK = [dict(role="user", content="ask")]


def tool_schema(tool: Callable) -> dict:
    """The JSON schema of a function, from its signature and Google docstring. Raises ConfigError."""
    from transformers.utils import chat_template_utils as hf           # here, because it takes seconds
    try:
        return hf.get_json_schema(tool)
    except (hf.DocstringParsingException, hf.TypeHintParsingException) as error:
        raise ConfigError(f"the tool {tool.__qualname__} needs type hints and a Google docstring that names each argument: {error}") from error


def tool_message(number: int, name: str | None, text: str) -> dict:
    return dict(role="tool", name=name or "unknown", tool_call_id=f"call{number:05d}", content=text)     # Mistral wants nine characters


def assistant_message(content: str, calls: list[Call], number: int = 0) -> dict:
    """A reply with calls; `number` counts the conversation's earlier ones. Arguments stay a dict: as text, templates encode them twice."""
    return dict(role="assistant", content=content, tool_calls=[
        dict(type="function", id=f"call{number + n:05d}", function=dict(name=call.name, arguments=call.arguments)) for n, call in enumerate(calls)])


def ended(output_ids: list[int], eos_token_ids: list[int]) -> bool:
    """Whether the model ended the turn itself."""
    return bool(output_ids) and output_ids[-1] in eos_token_ids


async def run_call(call: Call, tools: dict[str, Callable], metrics: Window) -> tuple[str, bool]:
    """What the model reads as the call's result, and whether the call failed; whatever a tool raises is text."""
    known, started = call.name in tools, time.monotonic()
    metrics.add("tools/unknown_name_count", int(call.name is not None and not known))
    text, failed = await _result_of(call, tools)
    if known:
        metrics.add_all({f"tools/{call.name}/call_count": 1, f"tools/{call.name}/failure_count": int(failed)})
    if known and not call.error:
        metrics.add_all({"tools/latency_s": time.monotonic() - started, f"tools/{call.name}/latency_s": time.monotonic() - started})
    return text, failed


async def _result_of(call: Call, tools: dict[str, Callable]) -> tuple[str, bool]:
    if call.error:
        return f"Error: {call.error}", True
    if call.name not in tools:
        return f"Error: there is no tool {call.name!r}; the tools are {', '.join(tools)}.", True
    try:
        return result_text(await call_function(tools[call.name], copy.deepcopy(call.arguments))), False      # the message keeps what was said
    except (Exception, KeyboardInterrupt, SystemExit, asyncio.CancelledError) as error:       # the last three would end more than the call
        if asyncio.current_task().cancelling():
            raise
        return f"Error: {type(error).__name__}: {valid(str(error))}", True


async def call_function(function: Callable, kwargs: dict):
    """function(**kwargs), sync or async. A sync one runs in a thread of its own: no more threads than rollouts, and none waits for another."""
    result = function(**kwargs) if inspect.iscoroutinefunction(function) else await in_thread(function, kwargs)
    return await result if inspect.isawaitable(result) else result


def result_text(result) -> str:
    """A tool's result as the content of a message."""
    if isinstance(result, bytes):
        result = result.decode(errors="replace")
    return valid(result if isinstance(result, str) else json.dumps(result, default=str, ensure_ascii=False))


def valid(text: str) -> str:
    """The text without half surrogate pairs, which models write as \\ud800 and no tokenizer takes."""
    return text.encode(errors="replace").decode()


def drift(turns: list[TurnRecord]) -> list[int]:
    """For each transition between turns, how many of the tokens held the next prompt does not begin with: 0 where it extends them."""
    counts = []
    for before, after in pairwise(turns):
        held = before.prompt_ids + before.output_ids
        same = len(held) if after.prompt_ids[:len(held)] == held else next(
            (i for i, (a, b) in enumerate(zip(held, after.prompt_ids)) if a != b), min(len(held), len(after.prompt_ids)))
        counts.append(len(held) - same)
    return counts


def turns_to_samples(turns: list[TurnRecord], top_k: int, group_id: int, rollout_id: str = "") -> tuple[list[Sample], int]:
    """The samples of a rollout, and how many sampled tokens had no usable log-prob (those are context, never trained).

    A turn whose prompt starts with the tokens held so far extends the same sample; any other turn starts a new one. Every
    sampled token is trained in exactly one sample; tokens the model did not sample are context. Samples without a trained
    token are left out. Their advantage is 0 until the group is scored.
    """
    runs: list[list[TurnRecord]] = []
    held: list[int] = []
    for turn in turns:
        if not runs or turn.prompt_ids[:len(held)] != held:
            runs.append([])
        runs[-1].append(turn)
        held = turn.prompt_ids + turn.output_ids
    made = [_run_to_sample(run, top_k, group_id, rollout_id) for run in runs]
    return [sample for sample, _ in made if len(sample.trained_index)], sum(invalid for _, invalid in made)


def _run_to_sample(run: list[TurnRecord], top_k: int, group_id: int, rollout_id: str) -> tuple[Sample, int]:
    parts, candidates, invalid = [], [], 0
    for turn in run:                                         # in arrays: this is most of the loop's own time
        asked = np.array(turn.output_mask or [1] * len(turn.output_ids), bool)
        given = np.full(len(asked), np.nan)
        given[:len(turn.output_log_probs)] = turn.output_log_probs[:len(asked)]              # None becomes NaN
        usable, tops = np.flatnonzero(asked & np.isfinite(given)), turn.output_sampler_logprobs
        invalid += int(asked.sum()) - len(usable)
        ids, values = tops.best(usable, top_k) if hasattr(tops, "best") else _top_arrays([tops[at] if tops else {} for at in usable], top_k)
        parts.append((len(turn.prompt_ids) + usable, given[usable], ids, values))
        candidates += [turn.output_sampling_mask[at] for at in usable] if turn.output_sampling_mask else [None] * len(usable)
    index, logprobs, ids, values = map(np.concatenate, zip(*parts))
    has_sets = any(candidate is not None for candidate in candidates)
    sample = Sample(
        input_ids=np.array(run[-1].prompt_ids + run[-1].output_ids, np.int32), trained_index=index.astype(np.int32),
        sampler_logprobs=logprobs.astype(np.float32), topk_ids=ids, topk_logprobs=values, advantage=0.0, group_id=group_id,
        version=min(turn.model_version for turn in run), rollout_id=rollout_id,
        mean_version=float(np.average([turn.mean_version for turn in run], weights=[max(len(turn.output_ids), 1) for turn in run])),
        candidate_ids=np.concatenate([np.array(c or [], np.int32) for c in candidates]) if has_sets else None,
        candidate_counts=np.array([len(c or []) for c in candidates], np.int32) if has_sets else None)
    return sample, invalid


def _top_arrays(tops: list[dict[int, float | None]], top_k: int) -> tuple[np.ndarray, np.ndarray]:
    """(T, K) ids and log-probs of the K most likely tokens of each dict, -1 and -inf where there are fewer."""
    ids, values = np.full((len(tops), top_k), -1, np.int32), np.full((len(tops), top_k), -np.inf, np.float32)
    counts = np.fromiter(map(len, tops), np.int64, len(tops))
    row = np.repeat(np.arange(len(tops)), counts)
    found_ids = np.fromiter(chain.from_iterable(tops), np.int64, len(row))
    found = np.array(list(chain.from_iterable(top.values() for top in tops)), np.float64)       # None becomes NaN, which sorts last
    order = np.lexsort((-found_ids, -found, row))
    rank = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    kept = (rank < top_k) & ~np.isnan(found[order])
    ids[row[kept], rank[kept]], values[row[kept], rank[kept]] = found_ids[order][kept], found[order][kept]
    return ids, values
