"""Samples → trie rows → one row a rank.

A row is a prefix trie laid out depth-first, so a token shared by several samples is forwarded once. Two samples share the
token at a position when they agree on everything up to it *and* on the token after it (or one of them ends there): then
every position predicts one token. Two rollouts of the prompt 1 2 3:

    samples   1 2 3 4 5      row index   0 1 2 3 4 5 6 7
              1 2 3 6 7      input_ids   1 2 3 4 5 3 6 7
                             position    0 1 2 3 4 2 3 4
                             end         8 8 5 5 5 8 8 8

`end[j]` is one past the last index of j's subtree: query i sees key j exactly when j <= i < end[j].
"""
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field

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
    candidate_ids: np.ndarray | None = None      # (C,) int32, candidate sets of the T tokens end to end; None: whole vocabulary
    candidate_counts: np.ndarray | None = None   # (T,) int32, size of each
    rollout_id: str = ""
    reward: float = float("nan")
    queued_at: float = 0.0               # time.monotonic()

    def key(self) -> bytes:
        """Big-endian bytes: comparing keys compares token sequences."""
        return self.input_ids.astype(">u4").tobytes()


@dataclass(frozen=True, eq=False)
class Row:
    """What one rank forwards in one micro-batch: N tokens, M loss terms, K top tokens. Loss term m predicts target[m] at term_index[m]."""

    input_ids: np.ndarray                # (N,) int64
    position_ids: np.ndarray             # (N,) int64, depth in the trie
    end: np.ndarray                      # (N,) int64
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
    differing = np.flatnonzero(left[:n] != right[:n])
    if len(differing) == 0:
        return n                         # one is a prefix of the other: its last token predicts nothing
    return max(int(differing[0]) - 1, 0)


def pack_row(samples: list[Sample], multiple: int = 1) -> Row:
    """Lay the trie of `samples` out depth-first and point every loss term at the position that predicts it.

    The row is padded to a `multiple` of tokens; padding and filler (a row without samples) see only themselves and have no
    term: they add exactly zero. A term without a predictor or without a finite sampler log-prob is left out.
    """
    order = sorted(range(len(samples)), key=lambda i: samples[i].key())
    tokens, positions, previous, previous_path, size = [], [], np.empty(0, np.int32), np.empty(0, np.int64), 0
    paths, ends = [None] * len(samples), []      # ends: (row indices, their subtree's end)
    for i in order:
        ids = samples[i].input_ids
        shared = shared_length(previous, ids)
        ends.append((previous_path[shared:], size))
        tokens.append(ids[shared:])
        positions.append(np.arange(shared, len(ids)))
        paths[i] = np.concatenate([previous_path[:shared], np.arange(size, size + len(ids) - shared)])
        size += len(ids) - shared
        previous, previous_path = ids, paths[i]
    ends.append((previous_path, size))
    padding = -(-max(size, 1) // multiple) * multiple - size
    end = np.arange(1, size + padding + 1)
    for indices, value in ends:
        end[indices] = value
    input_ids, position_ids = (np.concatenate([*parts, np.zeros(padding)]).astype(np.int64) for parts in (tokens, positions))
    return Row(input_ids, position_ids, end, **_terms(samples, paths), num_tokens=size, num_samples=len(samples),
               raw_tokens=sum(len(s.input_ids) for s in samples), attention_cost=int(position_ids.sum()) + size)


def _terms(samples: list[Sample], paths: list[np.ndarray]) -> dict[str, np.ndarray | None]:
    """The row's loss terms, sample after sample in the order given."""
    kept = [np.isfinite(s.sampler_logprobs) & (s.trained_index > 0) for s in samples]   # a first token has no predictor
    width = max((s.topk_ids.shape[1] for s in samples), default=0)

    def join(parts, dtype, shape=(0,)):
        return np.concatenate([*parts, np.empty(shape)]).astype(dtype)

    def padded(array, value):
        return np.pad(array, ((0, 0), (0, width - array.shape[1])), constant_values=value)

    ids = counts = None
    if any(s.candidate_ids is not None for s in samples):
        sizes = [np.zeros(len(k), np.int64) if s.candidate_ids is None else s.candidate_counts for s, k in zip(samples, kept)]
        ids = join([s.candidate_ids[np.repeat(k, s.candidate_counts)] for s, k in zip(samples, kept) if s.candidate_ids is not None], np.int64)
        counts = join([size[k] for size, k in zip(sizes, kept)], np.int64)
    return dict(
        term_index=join([path[s.trained_index[k] - 1] for s, k, path in zip(samples, kept, paths)], np.int64),
        targets=join([s.input_ids[s.trained_index[k]] for s, k in zip(samples, kept)], np.int64),
        sampler_logprobs=join([s.sampler_logprobs[k] for s, k in zip(samples, kept)], np.float32),
        topk_ids=join([padded(s.topk_ids[k], -1) for s, k in zip(samples, kept)], np.int64, (0, width)),
        topk_logprobs=join([padded(s.topk_logprobs[k], -np.inf) for s, k in zip(samples, kept)], np.float32, (0, width)),
        advantages=join([np.full(k.sum(), s.advantage) for s, k in zip(samples, kept)], np.float32),
        term_sample=join([np.full(k.sum(), i) for i, k in enumerate(kept)], np.int64),
        candidate_ids=ids, candidate_counts=counts)


def _triangle(n: int) -> int:
    return n * (n + 1) // 2


@dataclass
class OpenRow:
    """A row being filled. Samples stay sorted, so a new one's shared prefix is with a neighbour."""

    budget: int
    samples: list[Sample] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    sorted_samples: list[Sample] = field(default_factory=list)
    groups: set[int] = field(default_factory=set)
    tokens: int = 0                      # unique
    terms: int = 0
    attention_cost: int = 0

    def _shared_with_neighbours(self, sample: Sample, at: int) -> tuple[int, int]:
        """Tokens shared with the left and with the right neighbour at insertion point `at`."""
        left = shared_length(self.sorted_samples[at - 1].input_ids, sample.input_ids) if at else 0
        right = shared_length(sample.input_ids, self.sorted_samples[at].input_ids) if at < len(self.keys) else 0
        return left, right

    def _growth(self, sample: Sample, key: bytes) -> tuple[int, int]:
        """(unique tokens, attention cost) that the trie of this row grows by with `sample`."""
        at = bisect_left(self.keys, key)
        left, right = self._shared_with_neighbours(sample, at)
        between = (shared_length(self.sorted_samples[at - 1].input_ids, self.sorted_samples[at].input_ids)
                   if 0 < at < len(self.keys) else 0)
        n = len(sample.input_ids)
        # Tokens of the row: sum over sorted samples of length minus what is shared with the one before. The pairs a token at
        # depth d adds are d + 1, so the same sum over triangular numbers is the attention cost.
        return n - left + between - right, _triangle(n) - _triangle(left) + _triangle(between) - _triangle(right)

    def fits(self, sample: Sample, key: bytes) -> bool:
        return self.terms + len(sample.trained_index) <= self.budget and self.tokens + self._growth(sample, key)[0] <= self.budget

    def add(self, sample: Sample, key: bytes) -> None:
        tokens, cost = self._growth(sample, key)
        at = bisect_left(self.keys, key)
        self.keys.insert(at, key)
        self.sorted_samples.insert(at, sample)
        self.samples.append(sample)
        self.groups.add(sample.group_id)
        self.tokens += tokens
        self.terms += len(sample.trained_index)
        self.attention_cost += cost


def plan_micro_batch(samples: Iterable[Sample], num_rows: int, token_budget: int,
                     on_oversize=lambda sample: None) -> tuple[list[list[Sample]], Sample | None]:
    """Fill one micro-batch of `num_rows` rows, each of at most `token_budget` unique tokens and loss terms.

    A sample goes to the row that holds its group; if that is full, to an empty row, or to one it does not make the most
    expensive; otherwise the micro-batch closes, and that sample is returned beside it to open the next. A sample longer than
    the budget is passed to `on_oversize` and dropped. Rows are empty only when the samples ran out.
    """
    rows = [OpenRow(token_budget) for _ in range(num_rows)]
    for sample in samples:
        if len(sample.input_ids) > token_budget:
            on_oversize(sample)
            continue
        key = sample.key()
        row = _choose_row(rows, sample, key)
        if row is None:
            return [row.samples for row in rows], sample
        row.add(sample, key)
    return [row.samples for row in rows], None


def _choose_row(rows: list[OpenRow], sample: Sample, key: bytes) -> OpenRow | None:
    by_cost = sorted(rows, key=lambda row: row.attention_cost)
    for row in by_cost:
        if sample.group_id in row.groups and row.fits(sample, key):
            return row
    split = any(sample.group_id in row.groups for row in rows)
    for row in by_cost:
        raises_most_loaded = row.samples and row.attention_cost + row._growth(sample, key)[1] > by_cost[-1].attention_cost
        if row.fits(sample, key) and not (split and raises_most_loaded):
            return row
    return None
