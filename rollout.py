"""The rollout process: generate with vLLM, score, compute advantages, and stream samples to the trainer.

Trainer and rollout process share a queue of samples, a queue of metrics, a queue for the failure that ends the run, and a few
numbers. The process loads the same config file by path, so nothing of the config is pickled.
"""
import asyncio
import ctypes
import itertools
import json
import math
import multiprocessing
import os
import signal
import sys
import time
import traceback
import uuid
from dataclasses import dataclass, field, replace

import aiohttp
import numpy as np

from config import Config, ConfigError, load_config
from data import load_rows, prompt_order
from metrics import Window
from packing import Sample
from rewards import call_rewards, reward_name
from tools import TurnRecord, render, turns_to_samples

RETRY_SECONDS = 25.0     # how long one request is retried while the server cannot be reached
SCORE_QUEUE_SIZE = 16    # groups waiting to be scored before generation is held back


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


@dataclass
class RolloutGroup:
    """The rollouts of one prompt, scored together; each list has one entry a rollout."""

    prompts: list[list[dict]]
    reward_kwargs: dict[str, list]
    completions: list[list[dict]]
    completions_ids: list[list[int]]
    completions_sequences: list[list[Sample]]
    model_version: int                   # when the group's first rollout started
    group_id: int
    row_index: int
    rollout_rewards: list[float | None]
    queued_at: float = 0.0               # time.monotonic() when queued for scoring
    rewards: np.ndarray | None = None    # (G,) summed over sources; NaN where no source scored


@dataclass
class Shared:
    """What the trainer and the rollout process share."""

    samples: object                      # Queue of Sample; None: no more will come
    metrics: object                      # Queue of (Window.drain(), table of completions)
    failure: object                      # Queue of (sentence for the user or None, traceback)
    version: object                      # Value: the current model version
    allowance: object                    # Value: tokens that may be queued or in progress
    consumed: object                     # Value: tokens of the samples taken from the queue so far
    heartbeat: object                    # Value: time.monotonic() of the event loop's last sign of life
    stop: object                         # Event

    @classmethod
    def create(cls) -> "Shared":
        spawn = multiprocessing.get_context("spawn")
        return cls(spawn.Queue(), spawn.Queue(), spawn.Queue(), spawn.Value("q", 0), spawn.Value("q", 0), spawn.Value("q", 0),
                   spawn.Value("d", time.monotonic()), spawn.Event())


class AsyncRolloutLoop:
    """Generates and scores rollouts. Subclass it, override a hook and set `loop_cls` in the config to change a step."""

    def __init__(self, config: Config, dataset, tokenizer, eos_token_ids: list[int], max_model_len: int, shared: Shared, start_group: int = 0):
        self.config, self.dataset, self.tokenizer, self.shared = config, dataset, tokenizer, shared
        self.eos_token_ids, self.max_model_len, self.start_group = eos_token_ids, max_model_len, start_group
        self.metrics = Window()
        self.url = config.vllm_server_base_url.rstrip("/")
        self.seeds = itertools.count((config.seed % 2**23 << 40) + start_group * config.num_generations)
        self.slots = asyncio.Semaphore(config.max_concurrent_rollouts)
        self.generating = 0              # rollouts started or about to be
        self.running = 0                 # rollouts in flight
        self.reserved_groups = 0         # groups started and not yet scored
        self.submitted = 0               # tokens put into the sample queue
        self.finished_rollouts, self.finished_tokens = 0, 0

    # Hooks: what a custom run overrides

    def filter_prompt(self, row_index: int, row: dict, epoch: int) -> bool:
        """Whether to generate for a prompt; a rejected one counts as consumed."""
        return True

    async def generate_one(self, prompt: list[dict], tools: list, group_id: int = 0) -> Rollout:
        """One full rollout for a prompt: a single turn."""
        prompt_ids = render(self.tokenizer, prompt, self.config.chat_template_kwargs)
        turn = await self.generate_one_turn(prompt_ids)
        text = self.tokenizer.decode(turn.output_ids, skip_special_tokens=True)
        return Rollout([dict(role="assistant", content=text)], turn.output_ids, [turn])

    async def generate_one_turn(self, prompt_ids: list[int]) -> TurnRecord:
        """Sample one reply from the vLLM server with the config's sampling settings."""
        config = self.config
        room = self.max_model_len - len(prompt_ids)
        if room < (1 if config.restricted_sampling else config.max_completion_length):
            raise ConfigError(f"a prompt of {len(prompt_ids)} tokens and max_completion_length={config.max_completion_length} exceed the server's "
                              f"max_model_len {self.max_model_len}: raise vllm_max_model_length or shorten the prompt.")
        # The server reports the sampled token within the number asked for: one more, so that the top K are complete.
        logprobs = config.num_sampler_logprobs + 1 if config.score_centering else 1
        sampling = dict(temperature=config.temperature, top_p=config.top_p, top_k=config.top_k, min_p=config.min_p or 0.0, repetition_penalty=1.0,
                        max_tokens=min(config.max_completion_length, room), logprobs=logprobs, seed=next(self.seeds),
                        stop_token_ids=self.eos_token_ids, detokenize=False)
        version = self.shared.version.value
        reply = await self._post("/inference/v1/generate", dict(model=config.model, token_ids=prompt_ids, sampling_params=sampling))
        turn = _parse_turn(reply, prompt_ids, version)
        if config.restricted_sampling and turn.output_sampling_mask is None and not self.warned:
            self.warned = True
            print("warning: the server does not return the candidate sets of top_k, top_p and min_p, so log-probs are normalised over the whole "
                  "vocabulary and every importance ratio is biased: use vLLM >= 0.28 with --return-sampling-mask (python serve.py sets it).", flush=True)
        return turn

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
        timeout = aiohttp.ClientTimeout(total=self.config.vllm_server_timeout)
        async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as self.session:
            try:
                await self.setup()
                async with asyncio.TaskGroup() as tasks:
                    background = [tasks.create_task(self._beat()), tasks.create_task(self._score_forever())]
                    await self._generate_all(tasks)
                    await self.score_queue.join()
                    for task in background:
                        task.cancel()
            finally:
                await self.close()
        self._report([])
        self.shared.samples.put(None)
        self.shared.heartbeat.value = math.inf       # what is left is the trainer's to read

    async def _beat(self) -> None:
        while True:
            self.shared.heartbeat.value = time.monotonic()
            self.metrics.add("rollout/concurrency", self.running)
            await asyncio.sleep(0.5)

    async def _generate_all(self, tasks: asyncio.TaskGroup) -> None:
        epochs = math.inf if self.config.max_steps > 0 else self.config.num_train_epochs
        total = epochs if epochs == math.inf else math.ceil(epochs * len(self.dataset))
        seed = self.config.seed if self.config.data_seed is None else self.config.data_seed
        admitted, groups = 0, set()
        for group_id, row_index, epoch in prompt_order(len(self.dataset), seed, self.start_group):
            if group_id % len(self.dataset) == 0 and group_id >= self.start_group + len(self.dataset):
                if admitted == 0:
                    raise ConfigError(f"filter_prompt rejected every prompt of epoch {epoch - 1}: no batch can reach the trainer; loosen it.")
            if group_id % len(self.dataset) == 0:
                admitted = 0
            if group_id >= total:
                break
            row = self.dataset[row_index]
            if not self.filter_prompt(row_index, row, epoch):
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
            if self.generating >= self.config.max_concurrent_rollouts:
                started = time.monotonic()           # that limit is not backpressure
        if (waited := time.monotonic() - started) > 0.005 and self.finished_rollouts:
            self.metrics.add("rollout/backpressure_s", waited)

    def _may_start(self) -> bool:
        if self.generating >= self.config.max_concurrent_rollouts:
            return False
        queued = self.submitted - self.shared.consumed.value
        if self.reserved_groups == 0 and queued == 0:
            return True
        if not self.finished_rollouts:   # nothing known of a rollout's length yet: one group at a time
            return self.reserved_groups == 0
        per_group = self.finished_tokens / self.finished_rollouts * self.config.num_generations
        return queued + (self.reserved_groups + 1) * per_group <= self.shared.allowance.value

    async def _generate_group(self, group_id: int, row_index: int, row: dict) -> None:
        config, version = self.config, self.shared.version.value
        # Every rollout gets its own copy of the prompt: none may see what another appended.
        prompts = [json.loads(json.dumps(row["prompt"])) for _ in range(config.num_generations)]
        rollouts = await asyncio.gather(*(self._run_rollout(prompt, group_id) for prompt in prompts))
        columns = {name: [value] * config.num_generations for name, value in row.items() if name != "prompt"}
        sequences = []
        for rollout in rollouts:
            samples, invalid = turns_to_samples(rollout.turns, config.num_sampler_logprobs if config.score_centering else 0, group_id, rollout.rollout_id)
            self.metrics.add("sampling/invalid_logprob_count", invalid)
            if invalid and not samples:
                raise ConfigError(f"{self.url}/inference/v1/generate returned no usable log-prob for any token of a rollout (prompt {row_index}): "
                                  "the server's logits are broken; check its dtype and weights.")
            sequences.append(samples)
        self._record_rollouts(rollouts, sequences)
        group = RolloutGroup(prompts, columns, [r.completion for r in rollouts], [r.completion_ids for r in rollouts], sequences,
                             version, group_id, row_index, [r.reward for r in rollouts], time.monotonic())
        started = time.monotonic()
        await self.score_queue.put(group)
        self.metrics.add("rollout/score_block_s", time.monotonic() - started)

    async def _run_rollout(self, prompt: list[dict], group_id: int) -> Rollout:
        async with self.slots:
            self.running += 1
            started = time.monotonic()
            try:
                return await self.generate_one(prompt, [], group_id)
            finally:
                self.running -= 1
                self.generating -= 1
                self.metrics.add("rollout/duration_s", time.monotonic() - started)

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
        funcs = self.config.reward_functions
        by_func = await call_rewards(funcs, group.prompts, group.completions, group.completions_ids, group.reward_kwargs)
        extra = np.array([[math.nan if r is None else float(r) for r in group.rollout_rewards]])
        sources = np.concatenate([by_func, extra])                                  # (sources, G)
        group.rewards = np.where(np.isnan(sources).all(0), np.nan, np.nansum(sources, 0))
        advantages = np.asarray(self.compute_advantages(group), dtype=float)
        kept = has_signal(group)
        self._record_rewards(group, by_func, kept)
        self._report([dict(prompt=prompt[-1]["content"], completion=(completion or [{}])[-1].get("content"), reward=float(reward), advantage=float(advantage))
                      for prompt, completion, reward, advantage in zip(group.prompts, group.completions, group.rewards, advantages)])
        if not kept:
            return
        now = time.monotonic()
        for samples, advantage, reward in zip(group.completions_sequences, advantages, group.rewards, strict=True):
            for sample in samples:
                self.submitted += len(sample.input_ids)
                self.shared.samples.put(replace(sample, advantage=float(advantage), reward=float(reward), queued_at=now))

    def _record_rollouts(self, rollouts: list[Rollout], sequences: list[list[Sample]]) -> None:
        """Metrics known once a group is generated; lengths count generated tokens."""
        lengths = [sum(len(turn.output_ids) for turn in r.turns) for r in rollouts]
        ended = [bool(r.turns and r.turns[-1].output_ids and r.turns[-1].output_ids[-1] in self.eos_token_ids) for r in rollouts]
        for kind, values in (("", lengths), ("terminated_", [n for n, e in zip(lengths, ended) if e])):
            for part in ("mean", "min", "max"):
                self.metrics.add_each(f"completions/{part}_{kind}length", values)
        self.metrics.add_each("completions/clipped_ratio", [not e for e in ended])
        seen = [tuple(tuple(turn.output_ids) for turn in r.turns) for r in rollouts]
        self.metrics.add_each("completions/duplicate_frac", [key in seen[:i] for i, key in enumerate(seen)])
        self.metrics.add_each("rollout/turns_mean", [len(r.turns) for r in rollouts])
        self.metrics.add_each("rollout/turns_max", [len(r.turns) for r in rollouts])
        self.metrics.add_each("rollout/samples_per_rollout", [len(samples) for samples in sequences])
        self.finished_rollouts += len(rollouts)
        self.finished_tokens += sum(len(sample.input_ids) for samples in sequences for sample in samples)
        self.generated_tokens += sum(lengths)

    def _record_rewards(self, group: RolloutGroup, by_func: np.ndarray, kept: bool) -> None:
        for func, values in zip(self.config.reward_functions, by_func):
            self.metrics.add_each(f"rewards/{reward_name(func)}/mean", values)
        scored = group.rewards[~np.isnan(group.rewards)]
        self.metrics.add_each("reward", scored)
        self.metrics.add("frac_reward_zero_std", float(not kept))
        if not kept:
            self.metrics.add_each("reward_dropped", scored)
            return
        weights = [len(samples) for samples in group.completions_sequences]         # of the trained samples
        for reward, weight in zip(group.rewards, weights):
            self.metrics.add("reward_kept", reward, weight)
        self.metrics.add("reward_group_std", group.rewards[scorable(group)].std(), sum(weights))
        for func, values in zip(self.config.reward_functions, by_func):
            if not np.isnan(values).all():
                self.metrics.add(f"rewards/{reward_name(func)}/group_std", np.nanstd(values), sum(weights))

    generated_tokens, reported_at, warned = 0, None, False

    def _report(self, table: list[dict]) -> None:
        now = time.monotonic()
        if self.reported_at and self.generated_tokens:
            self.metrics.add("rollout/generated_tokens_per_s", self.generated_tokens / (now - self.reported_at), now - self.reported_at)
        if self.generated_tokens or not self.reported_at:
            self.generated_tokens, self.reported_at = 0, now
        self.shared.metrics.put((self.metrics.drain(), table if self.config.log_completions else []))

    async def _post(self, path: str, body: dict) -> dict:
        """The server's JSON reply. Retries connection errors, time-outs, 429 and 5xx for RETRY_SECONDS; another 4xx fails at once."""
        deadline, delay = math.inf, 0.25
        while True:
            try:
                async with self.session.post(self.url + path, json=body) as response:
                    if response.status == 200:
                        return json.loads(await response.read())
                    problem = f"{response.status}: {(await response.text())[:500]}"
                    if response.status < 500 and response.status != 429:
                        raise ConfigError(f"the vLLM server at {self.url} refused a request ({problem})")
            except (aiohttp.ClientError, asyncio.TimeoutError, json.JSONDecodeError) as error:
                problem = f"{type(error).__name__}: {error}"
            deadline = min(deadline, time.monotonic() + RETRY_SECONDS)     # from the first failure: a reply itself may take longer
            if time.monotonic() + delay > deadline:
                raise ConfigError(f"the vLLM server at {self.url} has not answered for {RETRY_SECONDS:.0f} s ({problem}): check that it runs.")
            self.metrics.add("rollout/vllm_retry_count", 1)
            await asyncio.sleep(delay)
            delay = min(delay * 2, 5.0)


def scorable(group: RolloutGroup) -> np.ndarray:
    """(G,) bool: rollouts with a reward and a trained token."""
    return ~np.isnan(group.rewards) & np.array([len(samples) > 0 for samples in group.completions_sequences])


def has_signal(group: RolloutGroup) -> bool:
    """Two scorable rollouts with different rewards: by max and min, since the std of equal floats can round above 0."""
    rewards = group.rewards[scorable(group)]
    return len(rewards) >= 2 and rewards.max() > rewards.min()


def _parse_turn(reply: dict, prompt_ids: list[int], version: int) -> TurnRecord:
    """A /inference/v1/generate reply. The version is that of the oldest token where the server tells, else the one at the request."""
    choice = reply["choices"][0]
    content = choice["logprobs"]["content"]
    told = [int(part["version"]) for part in choice.get("weight_versions") or [] if part["version"].isdigit()]
    ids = choice["token_ids"]
    return TurnRecord(prompt_ids=prompt_ids, output_ids=ids,
                      output_log_probs=[_logprob(entry) if _token_id(entry) == token else None for entry, token in zip(content, ids)],
                      output_sampler_logprobs=[{_token_id(top): _logprob(top) for top in entry["top_logprobs"]} for entry in content],
                      output_sampling_mask=choice.get("sampling_mask"), model_version=min(told, default=version))


def _token_id(entry: dict) -> int:
    return entry["token_id"] if "token_id" in entry else int(entry["token"].removeprefix("token_id:"))   # before vLLM 0.32: as text


def _logprob(entry: dict) -> float | None:
    """None where vLLM has none: it writes -9999 for a missing value or −inf, which JSON cannot hold."""
    value = entry["logprob"]
    return None if value is None or value <= -9999 else value


def rollout_process(argv: list[str], max_model_len: int, shared: Shared, start_group: int) -> None:
    """Entry point of the spawned process. A failure reaches the trainer as text; the parent's death ends it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)     # Ctrl-C reaches the trainer, which stops this process
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)       # Linux's PR_SET_PDEATHSIG: die with the trainer, however it dies
    os.environ["CUDA_VISIBLE_DEVICES"] = ""          # the GPU is the trainer's
    try:
        asyncio.run(_run_until_stopped(argv, max_model_len, shared, start_group))
    except BaseException as error:
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        shared.failure.put((str(error) if isinstance(error, ConfigError) else None, "".join(traceback.format_exception(error))))
        _abandon(shared)
        sys.exit(1)
    if shared.stop.is_set():
        _abandon(shared)


def _abandon(shared: Shared) -> None:
    """What nobody will read must not keep the process alive: joining a queue's feeder waits until its pipe is read."""
    shared.samples.cancel_join_thread()
    shared.metrics.cancel_join_thread()


async def _run_until_stopped(argv: list[str], max_model_len: int, shared: Shared, start_group: int) -> None:
    from model import eos_token_ids, load_tokenizer
    config = load_config(argv)
    tokenizer = load_tokenizer(config)
    rows = load_rows(config.train_dataset, config.train_split)
    loop = (config.loop_cls or AsyncRolloutLoop)(config, rows, tokenizer, eos_token_ids(config, tokenizer), max_model_len, shared, start_group)
    work = asyncio.create_task(loop.run())
    parent = multiprocessing.parent_process()
    while not work.done():
        if shared.stop.is_set() or not parent.is_alive():
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            return
        await asyncio.wait([work], timeout=0.2)
    await work
