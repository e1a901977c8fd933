"""What a step trains: samples of the queue planned into micro-batches of one row a rank, ahead of training, and each rank's share."""
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice

import numpy as np
import torch.distributed as dist

from config import Config, interval
from feed import RolloutFeed
from packing import Row, Sample, pack_row, plan_micro_batch


@dataclass
class Share:
    """One rank's part of a step: a row a micro-batch, and what it must know of the other ranks' rows."""

    rows: list[Row]
    denominators: list[float]            # of each micro-batch's summed loss
    tokens: list[int]                    # forwarded in each micro-batch, filler left out
    aux_weights: list[float]             # of each micro-batch's auxiliary loss; they sum to 1


@dataclass
class StepPlan:
    """One optimizer step as rank 0 planned it: micro-batches of one row a rank, and what is known of them without the model."""

    shares: list[Share]                  # one a rank
    forwarded_tokens: int
    raw_tokens: int                      # before packing
    trained_tokens: int
    num_samples: int
    version: int                         # when the step starts
    queued_at: float                     # mean over the samples
    last_group: int
    trained: list[tuple[int, str]]       # group and rollout of each sample
    metrics: dict[str, tuple[float, float]]      # name -> value and the number of samples, rows or tokens it is a mean over


def plan_steps(config: Config, feed: RolloutFeed, world_size: int, budget: int, multiple: int, step: int = 0) -> Iterator[StepPlan]:
    """Fill steps from the sample queue, from the one after `step`; the last one may have fewer micro-batches or empty rows, and no sample is lost.

    Runs ahead of training, so a sample's age is judged by the version that will be current when its step starts.
    """
    def oversize(sample: Sample) -> None:
        feed.reports.add("batch/dropped_oversize_count", 1)
        print(f"dropped a sample of {len(sample.input_ids)} tokens: raise token_budget={budget} to train on it", flush=True)

    def micro_batches(version):
        while True:
            rows, left_over = plan_micro_batch(feed.samples(version), world_size, budget, oversize)
            if left_over is not None:
                feed.given_back.append(left_over)               # looked at again when its turn comes: it may be too old by then
            if not any(rows):
                return
            yield rows
    first = feed.version
    for number in count(step % config.weight_sync_steps):
        version = first + number // config.weight_sync_steps
        batch = list(islice(micro_batches(version), config.gradient_accumulation_steps))
        if not batch:
            return
        yield make_step(config, batch, version, budget, multiple)


def make_step(config: Config, batch: list[list[list[Sample]]], version: int, budget: int, multiple: int = 1) -> StepPlan:
    rows = [[pack_row(samples, multiple) for samples in micro_batch] for micro_batch in batch]
    trained = [sum(len(row.targets) for row in micro_batch) for micro_batch in rows]
    per_step = config.loss_normalization == "step"
    denominators = [float(max(sum(trained) if per_step else n * len(rows), 1)) for n in trained]
    samples = [sample for micro_batch in batch for part in micro_batch for sample in part]
    flat = [row for micro_batch in rows for row in micro_batch if row.num_samples]
    forwarded = [sum(row.num_tokens for row in micro_batch) for micro_batch in rows]
    tokens, raw = sum(forwarded), sum(row.raw_tokens for row in flat)
    aux_weights = [n / tokens if per_step else 1 / len(rows) for n in forwarded]
    shares = [Share(list(of_rank), denominators, forwarded, aux_weights) for of_rank in zip(*rows)]
    costs = [[row.attention_cost for row in micro_batch] for micro_batch in rows]
    ages, lengths = [version - sample.version for sample in samples], [len(sample.input_ids) for sample in samples]
    per_sample = {"sample/forwarded_tokens_mean": np.mean(lengths), "sample/trained_tokens_mean": sum(trained) / len(samples),
                  "sample/staleness_mean": np.mean(ages), "sample/token_staleness_mean": version - np.mean([sample.mean_version for sample in samples])}
    per_row = {"batch/samples_per_row": len(samples) / len(flat), "batch/row_tokens_mean": tokens / len(flat), "batch/row_fill_frac": tokens / len(flat) / budget}
    padded = sum(len(row.input_ids) for micro_batch in rows for row in micro_batch)
    metrics = {name: (float(value), weight) for values, weight in (
        (per_sample, len(samples)), (per_row, len(flat)),
        ({"batch/row_imbalance": np.mean([max(c) / np.mean(c) for c in costs])}, len(rows)), ({"batch/packing_ratio": raw / tokens}, tokens),
        ({"batch/masked_token_frac": 1 - sum(trained) / raw}, raw), ({"batch/pad_frac": 1 - tokens / padded}, padded),
        ({"sample/forwarded_tokens_max": max(lengths), "sample/staleness_max": max(ages), "batch/row_tokens_max": max(row.num_tokens for row in flat),
          "batch/forwarded_tokens_per_step": tokens, "batch/trained_tokens_per_step": sum(trained), "batch/samples_per_step": len(samples),
          "batch/groups_per_step": len({sample.group_id for sample in samples}), "batch/microbatches_per_step": len(rows)}, 1)) for name, value in values.items()}
    queued_at = float(np.mean([sample.queued_at for sample in samples]))
    return StepPlan(shares, tokens, raw, sum(trained), len(samples), version, queued_at, max(s.group_id for s in samples),
                    [(s.group_id, s.rollout_id) for s in samples], metrics)


def scatter_step(plan: StepPlan | None, rank: int, world_size: int) -> Share | None:
    """This rank's share; None when rank 0 has no step left. One collective, so ranks cannot disagree on the number of rows."""
    shares = plan.shares if plan else [None] * world_size
    if world_size == 1:
        return shares[0]
    received: list = [None]
    dist.scatter_object_list(received, shares if rank == 0 else None, src=0)
    return received[0]


def speed(plan: StepPlan, training_s: float, step_s: float, work: float | None = None) -> dict[str, float | tuple[float, float]]:
    """Rates weigh by their seconds, so that a window's rate is its tokens over its seconds. `work`: percent of the devices' peak, times seconds."""
    mfu = {"perf/fwd_bwd_mfu": (work / training_s, training_s), "perf/wall_clock_mfu": (work / step_s, step_s)} if work else {}
    return mfu | {"perf/step_s": step_s, "perf/fwd_bwd_forwarded_tokens_per_s": (plan.forwarded_tokens / training_s, training_s),
                  "perf/wall_clock_forwarded_tokens_per_s": (plan.forwarded_tokens / step_s, step_s),
                  "perf/wall_clock_trained_tokens_per_s": (plan.trained_tokens / step_s, step_s)}


def due(every: float | None, step: int, max_steps: int) -> bool:
    """Whether something that happens `every` so many steps (below 1: such a share of max_steps) happens after `step`."""
    return every is not None and step % interval(every, max_steps) == 0
