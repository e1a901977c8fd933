"""Samples → trie rows → one row a rank.

A row is a prefix trie laid out depth-first, so a token shared by several samples is forwarded once. Two samples share the
token at a position when they agree on everything up to it *and* on the token after it (or one of them ends there): then
every position predicts one token. Two rollouts of the prompt 1 2 3:

    samples   1 2 3 4 5      row index   0 1 2 3 4 5 6 7
              1 2 3 6 7      input_ids   1 2 3 4 5 3 6 7
                             position    0 1 2 3 4 2 3 4
                             end         8 8 5 5 5 8 8 8
                             segment     0 0 1 1 1 2 2 2     segment_start 0 2 5, segment_parent -1 0 0

`end[j]` is one past the last index of j's subtree: query i sees key j exactly when j <= i < end[j]. A segment is a chain that
no fork interrupts: its tokens follow each other, and its first one follows the last token of its parent.
"""
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np


@dataclass(frozen=True, eq=False)
class Sample:
    """One token sequence the loss is taken on, T of whose n tokens are trained. Arrays are read-only by convention."""

    input_ids: np.ndarray                # (n,) int32
    trained_index: np.ndarray            # (T,) int32, positions in input_ids of the trained tokens, ascending, >= 1
    sampler_logprobs: np.ndarray         # (T,) float32, the server's log-prob of each trained token
    topk_ids: np.ndarray                 # (T, K) int32, the sampler's most likely tokens; -1 where it reported fewer
    topk_logprobs: np.ndarray            # (T, K) float32, their log-probs; -inf where absent
    advantage: float
    group_id: int
    version: int                         # model version of its oldest token
    mean_version: float = float("nan")   # over its tokens
    candidate_ids: np.ndarray | None = None      # (C,) int32, candidate sets of the T tokens end to end; None: whole vocabulary
    candidate_counts: np.ndarray | None = None   # (T,) int32, size of each
    rollout_id: str = ""
    reward: float = float("nan")
    queued_at: float = 0.0               # time.monotonic()
    group_samples: int = 1               # of its group

    def key(self) -> bytes:
        """Big-endian bytes: comparing keys compares token sequences."""
        return self.input_ids.astype(">u4").tobytes()


@dataclass(frozen=True, eq=False)
class Row:
    """What one rank forwards in one micro-batch: N tokens in S segments, M loss terms, K top tokens. Term m predicts targets[m] at term_index[m]."""

    input_ids: np.ndarray                # (N,) int64
    position_ids: np.ndarray             # (N,) int64, depth in the trie
    end: np.ndarray                      # (N,) int64
    segment_start: np.ndarray            # (S,) int64, row index of each segment's first token, ascending; padding is one segment, the last
    segment_parent: np.ndarray           # (S,) int64, index of the segment it continues, -1 for a root
    term_index: np.ndarray               # (M,) int64, row index of the token before the target
    targets: np.ndarray                  # (M,) int64
    sampler_logprobs: np.ndarray         # (M,) float32
    topk_ids: np.ndarray                 # (M, K) int64
    topk_logprobs: np.ndarray            # (M, K) float32
    advantages: np.ndarray               # (M,) float32
    term_sample: np.ndarray              # (M,) int64, index of the sample in the row
    candidate_ids: np.ndarray | None     # (C,) int64 of all terms end to end, or None: every term has the whole vocabulary
    candidate_counts: np.ndarray | None  # (M,) int64; 0: whole vocabulary
    num_tokens: int = 0                  # without padding and filler
    num_samples: int = 0
    raw_tokens: int = 0                  # before packing
    attention_cost: int = 0              # (query, key) pairs


def shared_length(left: np.ndarray, right: np.ndarray) -> int:
    """Tokens two samples share in a trie where each position has one next token."""
    n = min(len(left), len(right))
    if n == 0:
        return 0
    differs = left[:n] != right[:n]
    first = int(differs.argmax())
    if not differs[first]:
        return n                         # one is a prefix of the other: its last token predicts nothing
    return max(first - 1, 0)


def pack_row(samples: list[Sample], multiple: int = 1) -> Row:
    """Lay the trie of `samples` out depth-first and point every loss term at the position that predicts it.

    The row is padded to a `multiple` of tokens; padding and filler (a row without samples) see only themselves and have no
    term: they add exactly zero. A term without a predictor or without a finite sampler log-prob is left out.
    """
    order = sorted(range(len(samples)), key=lambda i: samples[i].key())
    sequences = [np.empty(0, np.int32), *(samples[i].input_ids for i in order)]
    shared = [shared_length(left, right) for left, right in pairwise(sequences)]      # of each sample with the one before it
    raw_tokens = sum(map(len, sequences))
    size = raw_tokens - sum(shared)
    length = -(-max(size, 1) // multiple) * multiple
    input_ids, position_ids, end = np.zeros(length, np.int64), np.zeros(length, np.int64), np.arange(1, length + 1)
    path = np.empty(max(map(len, sequences)), np.int64)      # row index of each token of the sample being laid out
    follows = {0: -1, size: -1} if size < length else {0: -1}        # first token of a segment → the token before it; row indices, -1: none
    predictors, start = [None] * len(samples), 0
    for i, fork, (previous, ids) in zip(order, shared, pairwise(sequences)):
        if fork < len(previous):         # else the sample before is a prefix of this one, which goes on where that ended
            end[path[fork:len(previous)]] = start
            follows[start] = int(path[fork - 1]) if fork else -1
            if fork:                     # the branch laid out first begins right after the fork
                follows[follows[start] + 1] = follows[start]
        stop = start + len(ids) - fork
        input_ids[start:stop] = ids[fork:]
        position_ids[start:stop] = np.arange(fork, len(ids))
        path[fork:len(ids)] = np.arange(start, stop)
        predictors[i] = path[samples[i].trained_index - 1]
        start = stop
    end[path[:len(sequences[-1])]] = size
    segment_start, last_of_parent = np.array(sorted(follows.items())).T.copy()       # (S,) each
    segment_parent = np.searchsorted(segment_start, last_of_parent, "right") - 1
    return Row(input_ids, position_ids, end, segment_start, segment_parent, **_terms(samples, predictors), num_tokens=size,
               num_samples=len(samples), raw_tokens=raw_tokens, attention_cost=int(position_ids.sum()) + size)


def _terms(samples: list[Sample], predictors: list[np.ndarray]) -> dict[str, np.ndarray | None]:
    """The row's loss terms, sample after sample in the order given; predictors[i]: row index before each trained token of sample i."""
    counts = [len(s.trained_index) for s in samples]

    def joined(parts, dtype=np.int64):
        return np.concatenate([*parts, np.empty(0, dtype)], dtype=dtype)

    def stacked(parts, absent, dtype):                               # (M, K): samples may differ in how many tokens were reported
        table = np.full((sum(counts), max((part.shape[1] for part in parts), default=0)), absent, dtype)
        for part, stop in zip(parts, np.cumsum(counts)):
            table[stop - len(part):stop, :part.shape[1]] = part
        return table[kept]

    sampler_logprobs = joined([s.sampler_logprobs for s in samples], np.float32)
    kept = np.isfinite(sampler_logprobs) & (joined([s.trained_index for s in samples]) > 0)      # a first token has no predictor
    candidate_ids = candidate_counts = None
    if any(s.candidate_ids is not None for s in samples):
        sizes = joined([np.zeros(n, np.int64) if s.candidate_ids is None else s.candidate_counts for s, n in zip(samples, counts)])
        candidate_ids = joined([s.candidate_ids for s in samples if s.candidate_ids is not None])[np.repeat(kept, sizes)]
        candidate_counts = sizes[kept]
    return dict(
        term_index=joined(predictors)[kept],
        targets=joined([s.input_ids[s.trained_index] for s in samples])[kept],
        sampler_logprobs=sampler_logprobs[kept],
        topk_ids=stacked([s.topk_ids for s in samples], -1, np.int64),
        topk_logprobs=stacked([s.topk_logprobs for s in samples], -np.inf, np.float32),
        advantages=np.repeat(np.array([s.advantage for s in samples], np.float32), counts)[kept],
        term_sample=np.repeat(np.arange(len(samples)), counts)[kept],
        candidate_ids=candidate_ids, candidate_counts=candidate_counts)


def _triangle(n: int) -> int:
    return n * (n + 1) // 2


class Growth(NamedTuple):
    """What one more sample does to a row: where it goes, and what it adds to the trie."""

    at: int                              # among the row's sorted samples
    left: int                            # tokens shared with the neighbour before
    right: int                           # and with the one after
    tokens: int                          # unique
    attention_cost: int


@dataclass
class OpenRow:
    """A row being filled. Samples stay sorted, so a new one's shared prefix is with a neighbour."""

    budget: int
    samples: list[Sample] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    sorted_samples: list[Sample] = field(default_factory=list)
    shared: list[int] = field(default_factory=list)      # tokens each sorted sample shares with the one before
    groups: set[int] = field(default_factory=set)
    tokens: int = 0                      # unique
    terms: int = 0
    attention_cost: int = 0

    def growth(self, sample: Sample, key: bytes) -> Growth:
        at = bisect_left(self.keys, key)
        left = shared_length(self.sorted_samples[at - 1].input_ids, sample.input_ids) if at else 0
        right = shared_length(sample.input_ids, self.sorted_samples[at].input_ids) if at < len(self.keys) else 0
        between = self.shared[at] if at < len(self.keys) else 0
        # Tokens of the row: sum over sorted samples of length minus what is shared with the one before. The pairs a token at
        # depth d adds are d + 1, so the same sum over triangular numbers is the attention cost.
        cost = _triangle(len(sample.input_ids)) - _triangle(left) + _triangle(between) - _triangle(right)
        return Growth(at, left, right, len(sample.input_ids) - left + between - right, cost)

    def fits(self, sample: Sample, growth: Growth) -> bool:
        return self.terms + len(sample.trained_index) <= self.budget and self.tokens + growth.tokens <= self.budget

    def add(self, sample: Sample, key: bytes, growth: Growth | None = None) -> None:
        growth = growth or self.growth(sample, key)
        self.keys.insert(growth.at, key)
        self.sorted_samples.insert(growth.at, sample)
        self.shared[growth.at:growth.at + 1] = [growth.left, growth.right] if growth.at < len(self.shared) else [growth.left]
        self.samples.append(sample)
        self.groups.add(sample.group_id)
        self.tokens += growth.tokens
        self.terms += len(sample.trained_index)
        self.attention_cost += growth.attention_cost


def plan_micro_batch(samples: Iterable[Sample], num_rows: int, token_budget: int,
                     on_oversize=lambda sample: None) -> tuple[list[list[Sample]], Sample | None]:
    """Fill one micro-batch of `num_rows` rows, each of at most `token_budget` unique tokens and loss terms.

    A sample goes to the row that holds its group; if that is full, to an empty row, or to one it does not make the most
    expensive; otherwise the micro-batch closes, and that sample is returned beside it to open the next. A sample longer than
    the budget is passed to `on_oversize` and dropped. Rows are empty, for `pack_row` to fill, only when the samples ran out.
    """
    rows = [OpenRow(token_budget) for _ in range(num_rows)]
    for sample in samples:
        if len(sample.input_ids) > token_budget:
            on_oversize(sample)
            continue
        key = sample.key()
        row, growth = _choose_row(rows, sample, key)
        if row is None:
            return [row.samples for row in rows], sample
        row.add(sample, key, growth)
    return [row.samples for row in rows], None


def _choose_row(rows: list[OpenRow], sample: Sample, key: bytes) -> tuple[OpenRow | None, Growth | None]:
    split = any(sample.group_id in row.groups for row in rows)
    highest_cost = max(row.attention_cost for row in rows)
    for row in sorted(rows, key=lambda row: (sample.group_id not in row.groups, row.attention_cost)):
        growth = row.growth(sample, key)
        anyway = sample.group_id in row.groups or not split or not row.samples
        if row.fits(sample, growth) and (anyway or row.attention_cost + growth.attention_cost <= highest_cost):
            return row, growth
    return None, None
