"""The trainer's end of the rollout process: starts it, hands out its samples, and raises what went wrong there."""
import multiprocessing
import queue
import time
from collections.abc import Iterator

from config import Config, ConfigError
from metrics import Window
from packing import Sample
from rollout import Shared, rollout_process


class RolloutFeed:
    """Owns the rollout process; iterate `samples()`, and read `version` from anywhere."""

    def __init__(self, config: Config, argv: list[str], max_model_len: int, window: Window, check_server=lambda: None, start_group: int = 0):
        self.config, self.window, self.check_server = config, window, check_server
        self.shared = Shared.create()
        self.table: list[dict] = []      # the last scored group's completions
        self.given_back: list[Sample] = []
        self.wait_s = 0.0                # spent waiting for an empty queue since last read
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

    def samples(self) -> Iterator[Sample]:
        """Samples young enough to train on, until the rollout process has none left."""
        while True:
            sample = self.given_back.pop() if self.given_back else self._take()
            if sample is None:
                self.given_back.append(None)
                return
            if self.version - sample.version > self.config.max_staleness:
                self.window.add("sample/dropped_stale_count", 1)
            else:
                yield sample

    def _take(self) -> Sample | None:
        self.window.add("rollout/queue_size", self.shared.samples.qsize())
        started = time.monotonic()
        sample = queue.Empty
        while sample is queue.Empty:
            self._raise_failure()
            try:
                sample = self.shared.samples.get(timeout=0.25)
            except (queue.Empty, EOFError, OSError):    # the last two: cut off in the middle of a message
                continue
        self.wait_s += time.monotonic() - started
        if sample is not None:
            self.shared.consumed.value += len(sample.input_ids)
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
        self.window.add("perf/rollout_wait_s", self.wait_s)
        self.window.add_all({"sample/dropped_stale_count": 0, "batch/dropped_oversize_count": 0, "rollout/vllm_retry_count": 0})   # so that none shows as 0
        self.wait_s = 0.0

    def stop(self) -> None:
        """End the process; returns within 10 s, with nothing left behind."""
        self.shared.stop.set()
        if self.process.pid is None:
            return
        self.process.join(5)
        if self.process.is_alive():
            self.process.kill()
            self.process.join(5)
