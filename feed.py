"""The trainer's end of the rollout process: starts it, plans steps of its samples ahead, and raises what went wrong there."""
import math
import multiprocessing
import queue
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from types import ModuleType

import numpy as np

from config import Config, ConfigError
from metrics import Window
from packing import Sample
from rollout import rollout_process
from shared import Shared


@dataclass(frozen=True)
class Progress:
    """What has become of the prompts: with it a resumed run trains each once."""

    first: int = 0                           # the first group not resolved: neither trained nor dropped
    done: frozenset[int] = frozenset()       # from there on, the groups that need no generation: resolved, or among the samples
    samples: tuple[Sample, ...] = ()         # finished and not yet trained, in the order in which they will be
    evaluating: bool = False                 # an evaluation was asked for that has not ended

    @property
    def in_flight(self) -> list[int]:
        """Unfinished groups, as far as a later one is known."""
        return sorted(set(range(self.first, max(self.done, default=0))) - self.done)


def flaw(sample: Sample) -> str | None:
    """What is wrong with a sample that no server and no rollout could have made, or None."""
    index, terms = sample.trained_index, len(sample.trained_index)
    if not terms or index[0] < 1 or index[-1] >= len(sample.input_ids) or (np.diff(index) <= 0).any():
        return "its trained positions are not those of its tokens"
    if not len(sample.sampler_logprobs) == len(sample.topk_ids) == len(sample.topk_logprobs) == terms:
        return "it has not one log-prob for each trained token"
    return "it has a token id below 0, or a log-prob that is no number" if sample.input_ids.min() < 0 or np.isnan(sample.sampler_logprobs).any() else None


class RolloutFeed:
    """Owns the rollout process and the thread that plans: the loop calls `next_plan`, what plans reads `samples`.

    The thread rests from the moment a plan is ready until the loop has taken it; only then does the loop read what the thread
    writes. A sample is consumed once the loop has asked for the step it was drawn for: planning ahead lets generation run no
    further ahead, and cannot stall it, because whenever the loop waits nothing drawn is held against the allowance.
    """

    def __init__(self, config: Config, argv: list[str], max_model_len: int, window: Window, check_server=lambda: None,
                 progress: Progress = Progress()):
        self.config, self.window, self.check_server = config, window, check_server
        self.shared = Shared.create(len(config.server_urls))
        self.table: list[dict] = []      # the last scored group's completions
        self.collected = 0               # shared.evaluate's number of the last evaluation collected
        self.given_back: list[Sample] = []
        self.buffer = deque(progress.samples)        # received, or from a checkpoint, and not yet drawn
        self.drawn: dict[int, Sample] = {}           # for steps that the loop has not taken, by id(), in order
        self.first, self.beyond = progress.first, set(progress.done)     # groups that arrived whole or came to nothing: those below, and these
        self.resolved: list[int] = []                # came to nothing, but not yet among those
        self.partial = Counter()         # samples received of the groups that have not arrived whole
        self.receiving = threading.Lock()            # held while a sample goes from the queue to one of these
        self.undisturbed = threading.Event()         # cleared while they are read
        self.undisturbed.set()
        self.planner, self.ended = None, False       # a ThreadPoolExecutor; whether the end of the samples was drawn
        self.reports = Window()          # what the thread counted since the last plan was taken
        self.wait_s = 0.0                # of it, waiting for samples while the loop waited for the plan
        self.lock = threading.Lock()     # for the next two lines
        self.asked_at = 0.0              # when the loop asked for the step being planned; inf: not yet
        self.ahead, self.ahead_tokens = 0, 0         # samples drawn for a step not yet asked for
        self.stopped = threading.Event()
        self.shared.consumed.value = -sum(len(sample.input_ids) for sample in progress.samples)     # they count as in the queue
        self.process = multiprocessing.get_context("spawn").Process(
            target=rollout_process, args=(argv, max_model_len, self.shared, progress.first, progress.done), daemon=True, name="rollout")

    def start(self, version: int, allowance: int) -> None:
        self.shared.version.value, self.shared.allowance.value = version, allowance
        self.shared.heartbeat.value = time.monotonic()
        main, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")      # or the process would load train.py, and so all of training, before its own work
        try:
            self.process.start()
        finally:
            sys.modules["__main__"] = main
        for channel in (self.shared.samples, self.shared.metrics, self.shared.resolved):
            channel._writer.close()          # with a second writer open, a message cut short by a kill would never end

    @property
    def version(self) -> int:
        return self.shared.version.value

    def plan_ahead(self, plans: Iterator) -> None:
        """Work through `plans` in a thread: each begins when the loop takes the one before it."""
        self.plans, self.planner, self.asked_at = plans, ThreadPoolExecutor(1, "planner"), math.inf
        self.planned = self.planner.submit(next, plans, None)

    def next_plan(self, stopping: Callable[[], bool] = lambda: False):
        """The next plan, or None after the last or when `stopping`. Raises what ended the planning, or the rollout process since then."""
        with self.lock:
            self.asked_at, waiting = time.monotonic(), self.ahead + len(self.buffer) + self.shared.samples.qsize()
            self._consume()
        while not self.planned.done() and not stopping():    # a signal may reach another thread: it is acted on only when this one wakes
            wait([self.planned], timeout=0.25)
        if stopping():
            return None
        plan = self.planned.result()
        if plan is not None:
            self._raise_failure()        # the thread has not looked since the plan was ready
            self.window.add_all({"rollout/queue_size": waiting, "perf/rollout_wait_s": self.wait_s})
        self.window.merge(self.reports.drain())
        self.asked_at, self.wait_s = math.inf, 0.0
        self.drawn.clear()                   # trained or dropped, but for what was given back
        self.planned = self.planner.submit(next, self.plans, None)
        return plan

    def _consume(self) -> None:
        self.shared.consumed.value += self.ahead_tokens
        self.ahead, self.ahead_tokens = 0, 0

    def samples(self, version: int) -> Iterator[Sample]:
        """Samples young enough to train on at `version`, until the rollout process has none left."""
        while True:
            sample = self._take_back() or self._take()
            if sample is None:
                return
            if version - sample.version > self.config.max_staleness:
                self.reports.add("sample/dropped_stale_count", 1)
            else:
                yield sample

    def _take_back(self) -> Sample | None:
        with self.receiving:
            return self._note(self.given_back.pop()) if self.given_back else None

    def _take(self) -> Sample | None:
        started = time.monotonic()
        sample = None if self.ended else queue.Empty
        while sample is queue.Empty:
            if self.stopped.is_set():
                raise RuntimeError("the run is over: no more samples are drawn")
            self._raise_failure()
            self.undisturbed.wait()
            with self.receiving:
                sample = self._note(self.buffer.popleft() if self.buffer else self._receive())
        with self.lock:
            self.wait_s += max(time.monotonic() - max(started, self.asked_at), 0.0)
            if sample is not None:
                self.ahead, self.ahead_tokens = self.ahead + 1, self.ahead_tokens + len(sample.input_ids)
            if self.asked_at < math.inf:
                self._consume()
        return sample

    def _note(self, sample):
        """Nothing is between two places where `progress` looks for it."""
        if isinstance(sample, Sample):
            self.drawn[id(sample)] = sample
        self.ended = self.ended or sample is None
        return sample

    def _receive(self):
        """The queue's next sample, None at its end, or queue.Empty when there is none yet."""
        sample = self._get()
        if isinstance(sample, Sample):
            self.partial[sample.group_id] += 1
            if self.partial[sample.group_id] >= sample.group_samples:
                self._arrive(sample.group_id)
        return sample

    def _get(self):
        try:
            sample = self.shared.samples.get(timeout=0.25)
        except (queue.Empty, EOFError, OSError):     # the last two: cut off in the middle of a message
            return queue.Empty
        except Exception as error:                   # unpickling a damaged message raises anything
            raise RuntimeError(f"a sample from the rollout process cannot be read ({type(error).__name__}: {error}): the run ends here; "
                               "resume_from_checkpoint=True goes on from the last checkpoint.") from error
        if sample is not None and (problem := flaw(sample)):
            raise RuntimeError(f"a sample of group {sample.group_id} is damaged ({problem}): the run ends here; resume_from_checkpoint=True goes on "
                               "from the last checkpoint.")
        return sample

    def _arrive(self, group_id: int) -> None:
        """A group is here whole, or came to nothing."""
        del self.partial[group_id]
        self.beyond.add(group_id)
        while self.first in self.beyond:
            self.beyond.remove(self.first)
            self.first += 1

    def progress(self) -> Progress:
        """The prompts after the steps taken so far. What is in the queue is received, so that it is not lost; the order stays."""
        self.undisturbed.clear()             # the thread keeps `receiving` a quarter of a second at most, and then lets this one in
        try:
            with self.receiving:
                while self.shared.samples.qsize() or self.partial:       # whole groups: the rest of one is on its way
                    sample = self._receive()
                    if sample is queue.Empty:
                        self._raise_failure()
                    else:
                        self.buffer.append(sample)
                self._collect_resolved()
                while self.resolved:
                    self._arrive(self.resolved.pop())
                waiting = self.drawn | {id(sample): sample for sample in (*self.given_back, *self.buffer) if sample is not None}
                groups = {sample.group_id for sample in waiting.values()}
                first = min(groups | {self.first})
                unfinished = self.collected != self.shared.evaluate.value        # one that ended and is not collected is in no log yet
                return Progress(first, frozenset(self.beyond | set(range(first, self.first))), tuple(waiting.values()), unfinished)
        finally:
            self.undisturbed.set()

    def _collect_resolved(self) -> None:
        """Note the groups that came to nothing."""
        while self.shared.resolved.qsize():
            try:
                self.resolved.append(self.shared.resolved.get(timeout=1))
            except (queue.Empty, EOFError, OSError):         # its writer was killed, which is noticed elsewhere
                return

    def evaluate(self, step: int) -> None:
        """Ask for an evaluation; one asked for while another runs begins after it, and only the last such."""
        self.shared.evaluate.value = step + 1

    @property
    def evaluated(self) -> int:
        """The step that was last asked for; -1: none."""
        return self.shared.evaluate.value - 1

    def await_evaluation(self) -> None:
        """Return once the last evaluation asked for has ended."""
        while self.shared.evaluated.value != self.shared.evaluate.value:
            self._raise_failure()
            time.sleep(0.1)

    def _raise_failure(self) -> None:
        self.check_server()
        silent = time.monotonic() - self.shared.heartbeat.value
        code = self.process.exitcode                 # None: alive; 0: done, with its samples in the queue
        if code == 0 or (code is None and silent < self.config.rollout_worker_timeout):
            return
        try:
            sentence, trace = self.shared.failure.get(timeout=2)
        except queue.Empty:
            sentence, trace = None, ""
        if sentence:
            raise ConfigError(sentence)
        if trace:
            raise RuntimeError(f"the rollout process failed:\n{trace}")
        if code is None:
            raise RuntimeError(f"the rollout process has given no sign of life for {silent:.0f} s (rollout_worker_timeout): "
                               "something blocks its event loop, such as a hook that neither awaits nor returns.")
        raise RuntimeError(f"the rollout process died with exit code {code}" + (" (killed, often for memory)." if code == -9 else "."))

    def collect_metrics(self) -> list[dict[str, float]]:
        """Move what the rollout process reported into the window -> the evaluations among it, each by itself: a window would keep the last of each name."""
        self._collect_resolved()
        evaluations = []
        while self.shared.metrics.qsize():               # not until the pipe is empty: it holds a few reports, and its writer may not have filled it again
            try:
                values, table = self.shared.metrics.get(timeout=1)
            except (queue.Empty, EOFError, OSError):     # the writer was killed
                break
            if "eval/step" in values:
                evaluations.append({name: value for name, (value, _) in values.items()})
                self.collected = int(evaluations[-1]["eval/step"]) + 1
            else:
                self.window.merge(values)
            self.table = table or self.table
        for name in ("sample/dropped_stale_count", "batch/dropped_oversize_count", "rollout/vllm_retry_count"):
            self.window.add(name, 0)     # so that none shows as 0
        return evaluations

    def stop(self) -> None:
        """End the process and the thread; returns within 10 s, with nothing left behind."""
        self.stopped.set()
        self.shared.stop.set()
        if self.process.pid is not None:
            self.process.join(5)
            if self.process.is_alive():
                self.process.kill()
                self.process.join(5)
        if self.planner:
            self.planner.shutdown(cancel_futures=True)   # after the process: a message it was writing has an end by now
