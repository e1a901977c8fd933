"""Training from rollouts on disk, without a server: how a gradient is debugged. The same config then gives the same steps again.

    train.py configs/x.py replay=runs/x/rollouts token_budget=… output_dir=runs/again
"""
import time
from collections.abc import Iterator

from config import Config
from feed import Progress, RolloutFeed
from metrics import Window
from packing import Sample
from recording import read_groups, recorded_sample


class ReplayFeed(RolloutFeed):
    """The samples of a folder in place of a rollout process and its server."""

    def __init__(self, config: Config, window: Window, progress: Progress = Progress()):
        super().__init__(config, [], 0, window, progress=progress)
        self.recorded = self._read(progress.done, progress.first)

    def _read(self, done: frozenset[int], first: int) -> Iterator[Sample]:
        for group in read_groups(self.config.replay):
            if group["group_id"] < first or group["group_id"] in done:
                continue
            if not group["kept"]:
                self.resolved.append(group["group_id"])
                continue
            yield from (recorded_sample(sample, queued_at=time.monotonic()) for rollout in group["rollouts"] for sample in rollout["samples"])

    def start(self, version: int, allowance: int) -> None:
        self.shared.version.value = version

    def _get(self) -> Sample | None:
        return next(self.recorded, None)

    def _raise_failure(self) -> None:
        """Nothing runs that could fail."""


class NoServer:
    """Where weights go in a replay: nowhere."""

    def push(self, version: int, window: Window) -> None:
        pass
