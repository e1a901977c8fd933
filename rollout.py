"""The rollout process: generate with vLLM, score, compute advantages, and stream samples to the trainer.

The process loads the same config file as the trainer, by path, so nothing of the config is pickled; shared.py is all they share.
"""
import ctypes
import multiprocessing
import signal

if multiprocessing.current_process().name == "rollout":     # before all other imports, which take seconds; prctl 1 is Linux's PR_SET_PDEATHSIG: die with the trainer, however it dies
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)

import asyncio
import gc
import inspect
import itertools
import json
import math
import os
import sys
import threading
import time
import traceback
import uuid
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np

from client import LoadCap, Servers, arrived, route
from config import Config, ConfigError, load_config
from data import load_rows, prompt_order
from environments import EnvironmentPool, public_methods
from evaluate import evaluate_when_asked, evaluating
from metrics import Window
from naming import Naming
from packing import Sample
from recording import RolloutWriter
from rewards import call_rewards, reward_names
from rollout_metrics import record_rewards, record_rollouts
from shared import Shared
from tools import Chat, TurnRecord, render, run_call, tool_message, turns_to_samples

SCORE_QUEUE_SIZE = 16    # groups waiting to be scored before generation is held back
SCORERS = 16             # groups scored at once, when every reward function is async: a sync one may not be safe in two threads
RECENT_GROUPS = 16       # over whose rollouts the length of one under way is estimated
SILENT_GROUPS = 50, 1000         # groups in a row without two different rewards: when to warn, when to stop


@dataclass
class Rollout:
    """One finished rollout, as returned by `generate_one`."""

    completion: list[dict]               # messages generated after the prompt
    completion_ids: list[int]
    turns: list[TurnRecord]              # every sampling request, in order
    tool_call_count: int = 0
    tool_failure_count: int = 0
    reward: float | None = None          # added to those of the reward functions; None: no reward from here
    rollout_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    env_reward: tuple[type, float] | None = None         # the environment's class and reward, set by the loop


@dataclass
class RolloutGroup:
    """The rollouts of one prompt, scored together; each list has one entry a rollout."""

    prompts: list[list[dict]]
    reward_kwargs: dict[str, list]
    completions: list[list[dict]]
    completions_ids: list[list[int]]
    completions_sequences: list[list[Sample]]
    tool_call_counts: list[int]
    tool_failure_counts: list[int]
    model_version: int                   # when the group's first rollout started
    group_id: int
    row_index: int
    env_rewards: list[tuple[type, float] | None]
    rollout_rewards: list[float | None]
    queued_at: float = 0.0               # time.monotonic() when queued for scoring
    rewards: np.ndarray | None = None    # (G,) summed over sources; NaN where no source scored


class AsyncRolloutLoop:
    """Generates and scores rollouts. Subclass it, override a hook and set `loop_cls` in the config to change a step."""

    def __init__(self, config: Config, dataset, tokenizer, eos_token_ids: list[int], max_model_len: int, shared: Shared, start_group: int = 0,
                 done: frozenset[int] = frozenset(), eval_dataset=()):
        self.config, self.dataset, self.tokenizer, self.shared = config, dataset, tokenizer, shared
        self.eos_token_ids, self.max_model_len, self.start_group = eos_token_ids, max_model_len, start_group
        self.done, self.eval_dataset, self.writer = done, eval_dataset, RolloutWriter(config) if config.save_rollouts else None
        self.training = Window()
        self.environments = EnvironmentPool(config.environment_factory, lambda: self.metrics)
        self.chats: dict[tuple, Chat] = {}               # by the tools they show
        self.rendered = lru_cache(8)(lambda prompt: render(self.tokenizer, json.loads(prompt), self.config.chat_template_kwargs))      # once for a group
        self.servers = Servers(config, config.server_urls, shared.lost, shared.restored, lambda: shared.version.value, self.metrics,
                               Naming(config.model, shared.adapters, shared.oldest_named))
        self.cap = LoadCap(config.max_concurrent_rollouts)
        self.groups_at = [0] * len(config.server_urls)   # unfinished groups of each server
        self.seeds = itertools.count((config.seed % 2**23 << 40) + start_group * config.num_generations)
        self.generating = 0              # rollouts started or about to be
        self.reserved_groups = 0         # groups started and not yet scored
        self.submitted = 0               # tokens put into the sample queue
        self.silent_groups = 0           # scored in a row without two different rewards
        self.finished_rollouts, self.finished_tokens = 0, 0

    # Hooks: what a custom run overrides

    def filter_prompt(self, row_index: int, row: dict, epoch: int) -> bool:
        """Whether to generate for a prompt; a rejected one counts as consumed."""
        return True

    async def generate_one(self, prompt: list[dict], tools: list, group_id: int = 0) -> Rollout:
        """One full rollout for a prompt, which is JSON: turns, each followed by the tool calls it makes, until one makes none.

        It also ends with a turn that the length limit cut off, after max_tool_calling_iterations turns of calls, and where the next
        turn would not fit the server's context: results nobody would answer are then left out.
        """
        if not tools:
            self.metrics.add("tools/loop_exhausted_frac", 0.0, float(bool(self.config.tools or self.config.environment_factory)))    # of every rollout of an agent
            turn = await self.generate_one_turn([*self.rendered(json.dumps(prompt))])
            text = self.tokenizer.decode(turn.output_ids, skip_special_tokens=True)
            return Rollout([dict(role="assistant", content=text)], turn.output_ids, [turn])
        chat, by_name, limit = self.chat(tools), {tool.__name__: tool for tool in tools}, self.config.max_tool_calling_iterations
        rollout, next_ids = Rollout([], [], []), chat.prompt(prompt)
        while True:
            turn = await self.generate_one_turn(next_ids)
            message, calls = chat.reply(turn.output_ids, rollout.tool_call_count)
            exhausted = bool(calls) and limit is not None and len(rollout.turns) >= limit
            rollout.turns.append(turn)
            rollout.completion.append(message)
            rollout.completion_ids += turn.output_ids
            self.metrics.add("tools/parallel_calls_mean", len(calls), float(bool(calls)))
            if not calls or exhausted:
                break
            results = []
            for number, call in enumerate(calls, rollout.tool_call_count):      # in the order the model made them
                text, failed = await run_call(call, by_name, self.metrics)
                results.append(tool_message(number, call.name, text))
                rollout.tool_failure_count += failed
            rollout.tool_call_count += len(calls)
            next_ids = chat.next_prompt(prompt + rollout.completion, results, turn)
            if not self._fits(next_ids):
                self.metrics.add("rollout/context_exhausted_count", 1)
                break
            rollout.completion += results
        self.metrics.add("tools/loop_exhausted_frac", float(exhausted))
        return rollout

    def chat(self, tools: list) -> Chat:
        """The chat template with these tools, probed when they are first seen."""
        key = tuple(getattr(tool, "__func__", tool) for tool in tools)      # of every instance of an environment the same
        if key not in self.chats:
            self.chats[key] = Chat(self.tokenizer, self.config.chat_template_kwargs, tools, self.eos_token_ids, self.config.tool_parser)
        return self.chats[key]

    async def generate_one_turn(self, prompt_ids: list[int]) -> TurnRecord:
        """Sample one reply from the vLLM server with the config's sampling settings."""
        config, room = self.config, self.max_model_len - len(prompt_ids)
        if not self._fits(prompt_ids):
            raise ConfigError(f"a prompt of {len(prompt_ids)} tokens and max_completion_length={config.max_completion_length} exceed the server's "
                              f"max_model_len {self.max_model_len}: raise vllm_max_model_length or shorten the prompt.")
        changes = evaluating.get()[0]
        # The server reports the sampled token within the number asked for: one more, so that the top K are complete.
        logprobs = config.num_sampler_logprobs + 1 if config.score_centering else 1
        sampling = dict(temperature=config.temperature, top_p=config.top_p, top_k=config.top_k, min_p=config.min_p or 0.0, repetition_penalty=1.0,
                        max_tokens=min(config.max_completion_length, room), logprobs=logprobs, seed=self.next_seed(),
                        stop_token_ids=self.eos_token_ids, detokenize=False) | changes
        turn = await self.servers.generate(prompt_ids, sampling)
        if config.restricted_sampling and turn.output_sampling_mask is None and not self.warned and not changes:
            self.warned = True
            print("warning: the server does not return the candidate sets of top_k, top_p and min_p, so log-probs are normalised over the whole "
                  "vocabulary and every importance ratio is biased: use vLLM >= 0.28 with --return-sampling-mask (python serve.py sets it).", flush=True)
        return turn

    def next_seed(self) -> int:
        """Of a request: no two have the same, and an evaluation takes none of training's."""
        return next(evaluating.get()[1] or self.seeds)

    @property
    def metrics(self) -> Window:
        """Of what the running task belongs to: an evaluation, or training."""
        return evaluating.get()[2] or self.training

    def _fits(self, prompt_ids: list[int]) -> bool:
        """Whether the server's context has room for a turn: only where it samples from a candidate set does it cut one short."""
        return len(prompt_ids) + (1 if self.config.restricted_sampling else self.config.max_completion_length) <= self.max_model_len

    def compute_advantages(self, group: RolloutGroup) -> np.ndarray:
        """(G,) rewards standardised within the group (population std); 0 for a rollout without a reward or a trained token."""
        scored = scorable(group)
        advantages = np.zeros(len(group.rewards))
        if scored.any():
            rewards = group.rewards[scored]
            advantages[scored] = (rewards - rewards.mean()) / (rewards.std() + 1e-8)
        return advantages

    async def setup(self) -> None:
        """Create what other hooks need, like an HTTP client, on the loop's event loop before the first prompt."""

    async def close(self) -> None:
        """Release what `setup` created; also on failure."""

    # The engine

    async def run(self) -> None:
        """Generate until every epoch's prompts are resolved (or for ever with max_steps), then mark the end of the queue."""
        self.score_queue: asyncio.Queue = asyncio.Queue(SCORE_QUEUE_SIZE)
        async with self.servers, self._beating():
            for tools in await self.environments.open(self.config):
                if tools and not self.config.loop_cls:       # a broken tool or template shows before the first prompt
                    self.chat(tools)
            try:
                await self.setup()
                async with asyncio.TaskGroup() as tasks:
                    scorers = SCORERS if all(map(inspect.iscoroutinefunction, self.config.reward_functions)) else 1
                    self.scoring = asyncio.Semaphore(scorers)        # evaluation scores too
                    background = [tasks.create_task(work) for work in (
                        self.servers.watch(self.cap, self.max_model_len), evaluate_when_asked(self), *(self._score_forever() for _ in range(scorers)))]
                    await self.cap.ready()                   # before that, a small server would be flooded
                    await self._generate_all(tasks)
                    await self.score_queue.join()
                    self._report([])
                    self.shared.samples.put(None)
                    if len(self.eval_dataset):
                        await asyncio.Event().wait()         # for evaluations still to come; the trainer ends this
                    for task in background:
                        task.cancel()
            finally:
                await self.close()
        self.shared.heartbeat.value = math.inf       # what is left is the trainer's to read

    @asynccontextmanager
    async def _beating(self):
        """While entered, hooks that await for long included, the trainer sees that this loop turns."""
        beat = asyncio.create_task(self._beat())
        try:
            yield
        finally:
            beat.cancel()

    async def _beat(self) -> None:
        while True:
            self.shared.heartbeat.value = time.monotonic()
            if self.cap.known.is_set():
                self.metrics.add_all({"rollout/concurrency": self.cap.running, "rollout/concurrency_cap": self.cap.limit})
            await asyncio.sleep(0.5)

    async def _generate_all(self, tasks: asyncio.TaskGroup) -> None:
        epochs = math.inf if self.config.max_steps > 0 else self.config.num_train_epochs
        total = epochs if epochs == math.inf else math.ceil(epochs * len(self.dataset) - 1e-9)
        seed = self.config.seed if self.config.data_seed is None else self.config.data_seed
        admitted, groups = 0, set()
        for group_id, row_index, epoch in prompt_order(len(self.dataset), seed, self.start_group):
            if group_id % len(self.dataset) == 0 and group_id >= self.start_group + len(self.dataset):
                if admitted == 0:
                    raise ConfigError(f"filter_prompt rejected every prompt of epoch {epoch - 1}: no batch can reach the trainer; loosen it.")
            if group_id % len(self.dataset) == 0:
                admitted = 0
            if group_id >= total or self.silent_groups >= SILENT_GROUPS[1]:
                break
            if group_id in self.done:                # before the run was resumed
                admitted += 1
                continue
            row = self.dataset[row_index]
            if not self.filter_prompt(row_index, row, epoch):
                self.shared.resolved.put(group_id)
                continue
            admitted += 1
            await self._wait_for_allowance()
            self.reserved_groups += 1
            self.generating += self.config.num_generations
            group = tasks.create_task(self._generate_group(group_id, row_index, row))
            groups.add(group)
            group.add_done_callback(groups.discard)
        await asyncio.gather(*groups)

    async def _wait_for_allowance(self) -> None:
        """Hold a new group back while queued and in-progress tokens leave it no room; one group may always run."""
        started = time.monotonic()
        while not self._may_start():
            await asyncio.sleep(0.01)
            if self.generating >= self.cap.limit:
                started = time.monotonic()           # that limit is not backpressure
        if (waited := time.monotonic() - started) > 0.005 and self.finished_rollouts:
            self.metrics.add_all({"rollout/backpressure_s": waited, "rollout/backpressure_count": 1})

    def _may_start(self) -> bool:
        if self.generating >= self.cap.limit:
            return False
        queued = self.submitted - self.shared.consumed.value
        if self.reserved_groups == 0 and queued == 0:
            return True
        if not self.finished_rollouts:   # nothing known of a rollout's length yet: one group at a time
            return self.reserved_groups == 0
        per_group = self.finished_tokens / self.finished_rollouts * self.config.num_generations
        return queued + (self.reserved_groups + 1) * per_group <= self.shared.allowance.value

    async def _generate_group(self, group_id: int, row_index: int, row: dict) -> None:
        config, version, prompt = self.config, self.shared.version.value, json.dumps(row.get("prompt") or [])
        # Every rollout gets its own copy of the prompt: none may see what another appended.
        prompts = [json.loads(prompt) for _ in range(config.num_generations)]
        self.servers.choose(self.groups_at)
        at = route.get()[0]
        self.groups_at[at] += 1
        results = await asyncio.gather(*(self._run_rollout(prompt, group_id, row) for prompt in prompts))
        self.groups_at[at] -= 1
        if not any(isinstance(result, Rollout) for result in results):
            # Not the error itself: a CancelledError would end this task without a word, and the group would keep its allowance for ever.
            raise RuntimeError(f"every rollout of group {group_id} failed: {type(results[0]).__name__}: {results[0]}") from results[0]
        prompts = [prompt for prompt, result in zip(prompts, results) if isinstance(result, Rollout)]
        rollouts = [result for result in results if isinstance(result, Rollout)]
        columns = {name: [value] * len(rollouts) for name, value in row.items() if name != "prompt"}
        sequences = []
        for rollout in rollouts:
            samples, invalid = turns_to_samples(rollout.turns, config.num_sampler_logprobs if config.score_centering else 0, group_id, rollout.rollout_id)
            self.metrics.add("sampling/invalid_logprob_count", invalid)
            if invalid and not samples:
                raise ConfigError(f"the server at {self.servers.urls[route.get()[0]]} returned no usable log-prob for any token of a rollout (prompt {row_index}): its logits are broken; "
                                  "check its dtype and weights.")
            sequences.append(samples)
        self._record_rollouts(rollouts, sequences)
        group = RolloutGroup(prompts, columns, [r.completion for r in rollouts], [r.completion_ids for r in rollouts], sequences,
                             [r.tool_call_count for r in rollouts], [r.tool_failure_count for r in rollouts], version, group_id, row_index,
                             [r.env_reward for r in rollouts], [r.reward for r in rollouts], time.monotonic())
        started = time.monotonic()
        await self.score_queue.put(group)
        self.metrics.add("rollout/score_block_s", time.monotonic() - started)

    async def _run_rollout(self, prompt: list[dict], group_id: int, row: dict) -> Rollout | BaseException:
        """The rollout, or what it raised: one that fails is left out of its group and counted. A ConfigError ends the run."""
        try:
            async with self.cap.place(self._left) as leave:
                started, version = time.monotonic(), self.shared.version.value
                tools = list(self.config.tools or [])
                own = [getattr(getattr(self, name), "__func__", None) is getattr(AsyncRolloutLoop, name) for name in ("generate_one", "generate_one_turn")]
                if all(own) and not tools and not self.environments.factories:
                    arrived.set(leave)               # one request a rollout: its place is free before the reply is read
                try:
                    if not self.environments.factories:
                        return whole(await self.generate_one(prompt, tools, group_id), version)
                    async with self.environments.lend(row, prompt) as env:
                        rollout = whole(await self.generate_one(prompt, tools + public_methods(env), group_id), version)
                        return replace(rollout, env_reward=await self.environments.reward(env))
                finally:
                    self.metrics.add("rollout/duration_s", time.monotonic() - started)
        except ConfigError:
            raise
        except (Exception, KeyboardInterrupt, SystemExit, asyncio.CancelledError) as error:       # the last three would end more than the rollout
            if asyncio.current_task().cancelling():
                raise
            self.metrics.add("rollout/failed_count", 1)
            print(f"a rollout of group {group_id} failed and is left out: {type(error).__name__}: {error}", flush=True)
            return error

    def _left(self) -> None:
        self.generating -= 1

    async def _score_forever(self) -> None:
        while True:
            group = await self.score_queue.get()
            self.metrics.add("rollout/score_queue_size", self.score_queue.qsize())
            started = time.monotonic()
            self.metrics.add("rollout/score_wait_s", started - group.queued_at)
            await self._score(group)
            self.metrics.add("rollout/score_s", time.monotonic() - started)
            self.reserved_groups -= 1
            self.score_queue.task_done()

    async def _score(self, group: RolloutGroup) -> None:
        """Sum the rewards, compute advantages, and submit the group's samples unless it carries no signal."""
        names, sources, group.rewards = await self.sum_rewards(group.prompts, group.completions, group.completions_ids, group.reward_kwargs, group.env_rewards, group.rollout_rewards)
        advantages = np.asarray(self.compute_advantages(group), dtype=float)
        if advantages.shape != group.rewards.shape or not (np.abs(advantages) < 3e38).all():       # fp32 holds it
            raise ConfigError(f"compute_advantages returned {advantages.tolist()} for the rewards {group.rewards.tolist()}: return one finite number for each rollout.")
        kept = has_signal(group)
        record_rewards(self.metrics, group.rewards, scorable(group), [*map(len, group.completions_sequences)], names, sources, kept)
        self._report([dict(prompt=prompt[-1].get("content"), completion=(completion or [{}])[-1].get("content"), reward=float(reward), advantage=float(advantage))
                      for prompt, completion, reward, advantage in zip(group.prompts, group.completions, group.rewards, advantages)])
        if self.silent_groups < SILENT_GROUPS[1]:        # from there on generation has ended, whatever the groups under way give
            self.silent_groups = 0 if kept else self.silent_groups + 1
            if self.silent_groups in SILENT_GROUPS:
                self._warn_of_silence(group)
        if self.writer:
            self.writer.write(group, sources, advantages, kept)
        if not kept:
            self.shared.resolved.put(group.group_id)
            return
        now, count = time.monotonic(), sum(map(len, group.completions_sequences))
        for samples, advantage, reward in zip(group.completions_sequences, advantages, group.rewards, strict=True):
            for sample in samples:
                self.submitted += len(sample.input_ids)
                self.shared.samples.put(replace(sample, advantage=float(advantage), reward=float(reward), queued_at=now, group_samples=count))

    async def sum_rewards(self, prompts, completions, completions_ids, columns, env_rewards, own) -> tuple[list[str], np.ndarray, np.ndarray]:
        """Names of the sources, what each gave (sources, G), and that summed with the rollouts' own (G,); NaN where none scored."""
        if any(reward is not None and math.isinf(reward) for reward in own):
            raise ConfigError(f"generate_one set the rewards {own}: set a finite number, or None for no reward.")
        async with self.scoring:
            by_func = await call_rewards(self.config.reward_functions, prompts, completions, completions_ids, columns)
        owners = sorted({found[0].__name__ for found in env_rewards if found})
        by_env = [[found[1] if found and found[0].__name__ == name else math.nan for found in env_rewards] for name in owners]
        sources = np.concatenate([by_func, np.array([*by_env, [math.nan if r is None else float(r) for r in own]])])       # (sources + 1, G)
        return reward_names(self.config.reward_functions) + owners, sources[:-1], np.where(np.isnan(sources).all(0), np.nan, np.nansum(sources, 0))

    def _warn_of_silence(self, group: RolloutGroup) -> None:
        rewards = group.rewards[scorable(group)]
        cause = (f"every rollout of the last one was rewarded {rewards[0]:g}" if len(rewards) > 1 else "the reward functions return None"
                 if np.isnan(group.rewards).all() else "fewer than two rollouts of the last one have a reward and a trained token")
        end = ", so generation ends: " if self.silent_groups == SILENT_GROUPS[1] else ", so nothing is trained: "
        print(f"warning: {self.silent_groups} groups in a row had no two different rewards ({cause}){end}the task is solved, too hard, or never "
              "credited; read a few completions (log_completions=True).", flush=True)

    def _record_rollouts(self, rollouts: list[Rollout], sequences: list[list[Sample]]) -> None:
        record_rollouts(self.metrics, self.config, self.eos_token_ids, rollouts, sequences)
        self.finished_rollouts += len(rollouts)
        self.finished_tokens += sum(len(sample.input_ids) for samples in sequences for sample in samples)
        if (many := self.finished_rollouts / (RECENT_GROUPS * self.config.num_generations)) > 1:       # the latest count most: lengths change as the policy learns
            self.finished_rollouts, self.finished_tokens = self.finished_rollouts / many, self.finished_tokens / many
        self.generated_tokens += sum(len(turn.output_ids) for rollout in rollouts for turn in rollout.turns)

    generated_tokens, reported_at, warned = 0, None, False

    def _report(self, table: list[dict]) -> None:
        now = time.monotonic()
        if self.reported_at and self.generated_tokens:
            self.metrics.add("rollout/generated_tokens_per_s", self.generated_tokens / (now - self.reported_at), now - self.reported_at)
        if self.generated_tokens or not self.reported_at:
            self.generated_tokens, self.reported_at = 0, now
        self.shared.metrics.put((self.metrics.drain(), table if self.config.log_completions else []))


def whole(rollout, version: int) -> Rollout:
    """What generate_one returned; a turn of a hook's own that does not say of which weights it is gets those at the rollout's start, the oldest possible."""
    if not isinstance(rollout, Rollout):
        raise ConfigError(f"generate_one returned a {type(rollout).__name__}: return a rollout.Rollout.")
    for turn in rollout.turns:
        turn.model_version = version if turn.model_version < 0 else turn.model_version
        turn.mean_version, turn.max_version = (turn.model_version if told < 0 else told for told in (turn.mean_version, turn.max_version))
    return rollout


def scorable(group: RolloutGroup) -> np.ndarray:
    """(G,) bool: rollouts with a reward and a trained token."""
    return ~np.isnan(group.rewards) & np.array([len(samples) > 0 for samples in group.completions_sequences])


def has_signal(group: RolloutGroup) -> bool:
    """Two scorable rollouts with different rewards: by max and min, since the std of equal floats can round above 0."""
    rewards = group.rewards[scorable(group)]
    return len(rewards) >= 2 and rewards.max() > rewards.min()


def rollout_process(argv: list[str], max_model_len: int, shared: Shared, start_group: int, done: frozenset[int]) -> None:
    """Entry point of the spawned process. A failure reaches the trainer as text; the parent's death ends it."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)        # they reach the trainer too, which saves and then stops this process
    os.environ["CUDA_VISIBLE_DEVICES"] = ""          # the GPU is the trainer's
    try:
        asyncio.run(_run_until_stopped(argv, max_model_len, shared, start_group, done))
    except BaseException as error:
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        shared.failure.put((str(error) if isinstance(error, ConfigError) else None, "".join(traceback.format_exception(error))))
        _leave(shared, at_once=True)
        sys.exit(1)
    gc.unfreeze()                                    # or nanobind calls all of it leaked
    _leave(shared)


def _leave(shared: Shared, at_once: bool = False) -> None:
    """Wait until all sent is read, but not for what nobody reads once the trainer stops: the exit would join the queues' feeders. Polled, since
    stop.set() waits for each who is in stop.wait(), and for ever where that was killed."""
    channels = (shared.samples, shared.metrics, shared.resolved)
    flushing = threading.Thread(target=lambda: [(channel.close(), channel.join_thread()) for channel in channels], daemon=True)
    flushing.start()
    while not at_once and flushing.is_alive() and not shared.stop.is_set():
        flushing.join(0.2)
    for channel in channels:
        channel.cancel_join_thread()


async def _run_until_stopped(argv: list[str], max_model_len: int, shared: Shared, start_group: int, done: frozenset[int]) -> None:
    from model import eos_token_ids, load_tokenizer
    config = load_config(argv)
    tokenizer = load_tokenizer(config)
    rows = load_rows(config.train_dataset, config.train_split, environments=config.environment_factory)
    evaluated = () if config.eval_dataset is None else load_rows(config.eval_dataset, "test", "eval_dataset", config.environment_factory)
    loop = (config.loop_cls or AsyncRolloutLoop)(config, rows, tokenizer, eos_token_ids(config, tokenizer), max_model_len, shared, start_group, done, evaluated)
    gc.collect()
    gc.freeze()                                      # what is loaded by now stays: looking through it at each collection took a sixth of this process's time
    work = asyncio.create_task(loop.run())
    while not work.done():
        if shared.stop.is_set() or not multiprocessing.parent_process().is_alive():
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            return
        await asyncio.wait([work], timeout=0.2)
    await work
