"""Chat rendering and turns → samples: what the server sampled becomes what is trained, token for token."""
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from packing import Sample


@dataclass
class TurnRecord:
    """One sampling request: the prompt sent to the server and the tokens it generated."""

    prompt_ids: list[int]
    output_ids: list[int]
    output_log_probs: list[float | None] = field(default_factory=list)   # one an output token
    output_mask: list[int] | None = None                                 # 1: train on it, 0: context; None: all 1
    output_sampling_mask: list[list[int]] | None = None                  # candidate set of each output token; None: whole vocabulary
    output_sampler_logprobs: list[dict[int, float]] | None = None        # sampler's top log-probs by token id
    model_version: int = 0                                               # of the oldest output token
    mean_version: float = 0.0                                            # over the output tokens
    version_told: bool = False                                           # by the server, else the one current at the request


def render(tokenizer, messages: list[dict], chat_template_kwargs: dict | None = None) -> list[int]:
    """Token ids of a conversation up to where the assistant speaks next."""
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, **(chat_template_kwargs or {}))


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
    index, logprobs, tops, candidates, invalid = [], [], [], [], 0
    for turn in run:
        for offset, token_mask in enumerate(turn.output_mask or [1] * len(turn.output_ids)):
            if not token_mask:
                continue
            value = turn.output_log_probs[offset] if offset < len(turn.output_log_probs) else None
            if value is None or not np.isfinite(value):
                invalid += 1
                continue
            index.append(len(turn.prompt_ids) + offset)
            logprobs.append(value)
            tops.append(turn.output_sampler_logprobs[offset] if turn.output_sampler_logprobs else {})
            candidates.append(turn.output_sampling_mask[offset] if turn.output_sampling_mask else None)
    ids, values = _top_arrays(tops, top_k)
    has_sets = any(candidate is not None for candidate in candidates)
    sample = Sample(
        input_ids=np.array(run[-1].prompt_ids + run[-1].output_ids, np.int32), trained_index=np.array(index, np.int32),
        sampler_logprobs=np.array(logprobs, np.float32), topk_ids=ids, topk_logprobs=values, advantage=0.0, group_id=group_id,
        version=min(turn.model_version for turn in run), rollout_id=rollout_id,
        mean_version=float(np.average([turn.mean_version for turn in run], weights=[max(len(turn.output_ids), 1) for turn in run])),
        candidate_ids=np.concatenate([np.array(c or [], np.int32) for c in candidates]) if has_sets else None,
        candidate_counts=np.array([len(c or []) for c in candidates], np.int32) if has_sets else None)
    return sample, invalid


def _top_arrays(tops: list[dict[int, float | None]], top_k: int) -> tuple[np.ndarray, np.ndarray]:
    """(T, K) ids and log-probs of the K most likely tokens of each dict, -1 and -inf where there are fewer. In arrays: this is done for every token."""
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
