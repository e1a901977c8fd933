"""What a vLLM server's replies mean: completions with their log-probs, and its load."""
import re
from collections.abc import Sequence

import msgspec
import numpy as np

from tools import TurnRecord


def parse_metrics(text: str) -> dict[str, float]:
    """What /metrics says of load, over engines: usage the largest, the rest summed. kv_tokens: what the KV cache holds."""
    def values(name):
        return [float(value) for value in re.findall(rf"^vllm:{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)]
    def label(name, labels):
        found = re.search(rf'\b{name}="(\d+)"', labels)
        return int(found[1]) if found else 0
    caches = re.findall(r"^vllm:cache_config_info{([^}]*)}", text, re.MULTILINE)
    # Blocks times their size is wrong where layers differ in their caches, and each engine's series has the blocks of all.
    tokens = sum(label("kv_cache_size_tokens", c) for c in caches) or max((label("num_gpu_blocks", c) * label("block_size", c) for c in caches), default=0)
    return dict(usage=max(values("kv_cache_usage_perc"), default=0.0), running=sum(values("num_requests_running")),
                waiting=sum(values("num_requests_waiting")), preempted=sum(values("num_preemptions_total")), kv_tokens=tokens)


class _Entry(msgspec.Struct):
    logprob: float | None = None
    token_id: int | None = None
    token: str | None = None             # before vLLM 0.32 "token_id:N"
    top_logprobs: list["_Entry"] = []

    @property
    def id(self) -> int:
        return int(self.token.removeprefix("token_id:")) if self.token_id is None else self.token_id


class _Content(msgspec.Struct):
    content: list[_Entry]


class _Span(msgspec.Struct):
    version: str
    start: int = 0
    end: int = 0


class _Packed(msgspec.Struct):
    """Of vllm_scheduler.py: rows of 1 + K, the sampled token first."""
    count: int
    ids: bytes
    logprobs: bytes


class _Carried(msgspec.Struct):
    sampler_logprobs: _Packed | None = None


class _Generated(msgspec.Struct):
    token_ids: list[int]
    logprobs: _Content | None = None
    weight_versions: list[_Span] | None = None
    sampling_mask: list[list[int]] | None = None


class _CompletionLogprobs(msgspec.Struct):
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float | None] | None] | None = None


class _Completed(msgspec.Struct):
    token_ids: list[int]
    logprobs: _CompletionLogprobs


# typed: four times as fast as json.loads
_generate = msgspec.json.Decoder(msgspec.defstruct("Reply", [("choices", list[_Generated]), ("kv_transfer_params", _Carried | None, None)]))
_completion = msgspec.json.Decoder(msgspec.defstruct("Reply", [("choices", list[_Completed])]))


def parse_generate(reply: bytes, prompt_ids: list[int], version: int) -> TurnRecord | None:
    """A /inference/v1/generate reply; None where it has no log-probs, or not as many as tokens. Versions are those of its tokens where the server tells, else the one at the request."""
    decoded = _generate.decode(reply)
    choice, packed = decoded.choices[0], decoded.kv_transfer_params and decoded.kv_transfer_params.sampler_logprobs
    if packed and packed.count == len(choice.token_ids):
        logprobs, tops = _unpack(packed, choice.token_ids) if packed.count else ([], [])
    elif choice.logprobs:
        entries = choice.logprobs.content
        logprobs = [_number(entry.logprob) if entry.id == token else None for entry, token in zip(entries, choice.token_ids)]
        tops = [{top.id: _number(top.logprob) for top in entry.top_logprobs} for entry in entries]
    else:
        return None
    told = [(int(span.version), max(span.end - span.start, 1)) for span in choice.weight_versions or [] if span.version.isdigit()]
    spans = told or [(version, 1)]
    return TurnRecord(prompt_ids=prompt_ids, output_ids=choice.token_ids, output_log_probs=logprobs, output_sampler_logprobs=tops,
                      output_sampling_mask=choice.sampling_mask, model_version=min(v for v, _ in spans), max_version=max(v for v, _ in spans), version_told=bool(told),
                      mean_version=sum(v * n for v, n in spans) / sum(n for _, n in spans))


class TopLogprobs(Sequence):
    """A turn's top log-probs as the server packed them; each position's dict is made when looked at. ids, values (T, 1 + K): the
    sampled token, then the K most likely, best first; NaN where there is none."""

    def __init__(self, ids: np.ndarray, values: np.ndarray):
        self.ids, self.values = ids, values

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, at):
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(len(self)))]
        return {token: None if value != value else value for token, value in zip(self.ids[at].tolist(), self.values[at].tolist())}

    def __add__(self, other: list) -> list:
        return [*self, *other]

    def __radd__(self, other: list) -> list:
        return [*other, *self]

    def __eq__(self, other) -> bool:
        return list(self) == list(other) if isinstance(other, Sequence) else NotImplemented

    def best(self, rows: np.ndarray, top_k: int) -> tuple[np.ndarray, np.ndarray]:
        """As _top_arrays of these rows."""
        ids, values = np.full((len(rows), top_k), -1, np.int32), np.full((len(rows), top_k), -np.inf, np.float32)
        found, given = values[:, :self.values.shape[1] - 1], self.values[rows, 1:1 + top_k]      # a view
        present = ~np.isnan(given)
        found[present], ids[:, :found.shape[1]][present] = given[present], self.ids[rows, 1:1 + top_k][present]
        return ids, values


def _unpack(packed: _Packed, tokens: list[int]) -> tuple[list[float | None], TopLogprobs]:
    """(log-probs of the tokens, the sampler's by id)"""
    ids, values = (np.frombuffer(part, kind).reshape(packed.count, -1) for part, kind in ((packed.ids, "<i4"), (packed.logprobs, "<f4")))
    values = np.where(np.isfinite(values), values, np.nan)           # -inf: outside the candidate set
    usable = (ids[:, 0] == tokens) & ~np.isnan(values[:, 0])
    chosen = values[:, 0].tolist()
    return chosen if usable.all() else [value if good else None for value, good in zip(chosen, usable)], TopLogprobs(ids, values)


def parse_completion(reply: bytes, prompt_ids: list[int], version: int) -> TurnRecord:
    """A /v1/completions reply with token ids as keys; such a server tells no versions."""
    choice = _completion.decode(reply).choices[0]
    tops = choice.logprobs.top_logprobs or [{}] * len(choice.token_ids)
    return TurnRecord(prompt_ids=prompt_ids, output_ids=choice.token_ids, output_log_probs=[_number(value) for value in choice.logprobs.token_logprobs],
                      output_sampler_logprobs=[{int(key.removeprefix("token_id:")): _number(value) for key, value in (top or {}).items()} for top in tops],
                      model_version=version, mean_version=version, max_version=version)


def _number(value: float | None) -> float | None:
    """None where vLLM has none: it writes -9999 for a missing value or −inf, which JSON cannot hold."""
    return None if value is None or value <= -9999 else value
