"""The trainer's end of the rollout process: starts it, plans steps of its samples ahead, and raises what went wrong there."""
import math
import multiprocessing
import queue
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait

from config import Config, ConfigError
from metrics import Window
from packing import Sample
from rollout import Shared, rollout_process


class RolloutFeed:
    """Owns the rollout process and the thread that plans: the loop calls `next_plan`, what plans reads `samples`.

    The thread rests from the moment a plan is ready until the loop has taken it; only then does the loop read what the thread
    writes. A sample is consumed once the loop has asked for the step it was drawn for: planning ahead lets generation run no
    further ahead, and cannot stall it, because whenever the loop waits nothing drawn is held against the allowance.
    """

    def __init__(self, config: Config, argv: list[str], max_model_len: int, window: Window, check_server=lambda: None, start_group: int = 0):
        self.config, self.window, self.check_server = config, window, check_server
        self.shared = Shared.create(len(config.server_urls))
        self.table: list[dict] = []      # the last scored group's completions
        self.given_back: list[Sample] = []
        self.planner: ThreadPoolExecutor | None = None
        self.reports = Window()          # what the thread counted since the last plan was taken
        self.wait_s = 0.0                # of it, waiting for samples while the loop waited for the plan
        self.lock = threading.Lock()     # for the next two lines
        self.asked_at = 0.0              # when the loop asked for the step being planned; inf: not yet
        self.ahead, self.ahead_tokens = 0, 0         # samples drawn for a step not yet asked for
        self.stopped = threading.Event()
        self.process = multiprocessing.get_context("spawn").Process(
            target=rollout_process, args=(argv, max_model_len, self.shared, start_group), daemon=True, name="rollout")

    def start(self, version: int, allowance: int) -> None:
        self.shared.version.value, self.shared.allowance.value = version, allowance
        self.shared.heartbeat.value = time.monotonic()
        self.process.start()
        for channel in (self.shared.samples, self.shared.metrics):
            channel._writer.close()          # with a second writer open, a message cut short by a kill would never end

    @property
    def version(self) -> int:
        return self.shared.version.value

    def plan_ahead(self, plans: Iterator) -> None:
        """Work through `plans` in a thread: each begins when the loop takes the one before it."""
        self.plans, self.planner, self.asked_at = plans, ThreadPoolExecutor(1, "planner"), math.inf
        self.planned = self.planner.submit(next, plans, None)

    def next_plan(self):
        """The next plan, or None after the last. Raises what ended the planning, or the rollout process since then."""
        with self.lock:
            self.asked_at, waiting = time.monotonic(), self.ahead + self.shared.samples.qsize()
            self._consume()
        while not self.planned.done():       # a signal may reach another thread: it is acted on only when this one wakes
            wait([self.planned], timeout=0.25)
        plan = self.planned.result()
        if plan is not None:
            self._raise_failure()        # the thread has not looked since the plan was ready
            self.window.add_all({"rollout/queue_size": waiting, "perf/rollout_wait_s": self.wait_s})
        self.window.merge(self.reports.drain())
        self.asked_at, self.wait_s = math.inf, 0.0
        self.planned = self.planner.submit(next, self.plans, None)
        return plan

    def _consume(self) -> None:
        self.shared.consumed.value += self.ahead_tokens
        self.ahead, self.ahead_tokens = 0, 0

    def samples(self, version: int) -> Iterator[Sample]:
        """Samples young enough to train on at `version`, until the rollout process has none left."""
        while True:
            sample = self.given_back.pop() if self.given_back else self._take()
            if sample is None:
                self.given_back.append(None)
                return
            if version - sample.version > self.config.max_staleness:
                self.reports.add("sample/dropped_stale_count", 1)
            else:
                yield sample

    def _take(self) -> Sample | None:
        started = time.monotonic()
        sample = queue.Empty
        while sample is queue.Empty:
            if self.stopped.is_set():
                raise RuntimeError("the run is over: no more samples are drawn")
            self._raise_failure()
            try:
                sample = self.shared.samples.get(timeout=0.25)
            except (queue.Empty, EOFError, OSError):    # the last two: cut off in the middle of a message
                continue
        with self.lock:
            self.wait_s += max(time.monotonic() - max(started, self.asked_at), 0.0)
            if sample is not None:
                self.ahead, self.ahead_tokens = self.ahead + 1, self.ahead_tokens + len(sample.input_ids)
            if self.asked_at < math.inf:
                self._consume()
        return sample

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

    def collect_metrics(self) -> None:
        """Move what the rollout process reported into the window."""
        while True:
            try:
                values, table = self.shared.metrics.get_nowait()
            except (queue.Empty, EOFError, OSError):
                break
            self.window.merge(values)
            self.table = table or self.table
        for name in ("sample/dropped_stale_count", "batch/dropped_oversize_count", "rollout/vllm_retry_count"):
            self.window.add(name, 0)     # so that none shows as 0

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
