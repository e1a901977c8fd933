"""What the trainer and the rollout process share: queues and single numbers, nothing else."""
import multiprocessing
import time
from dataclasses import dataclass

from naming import NEVER


@dataclass
class Shared:
    """Each has one writer."""

    samples: object                      # Queue of Sample; None: no more will come
    metrics: object                      # Queue of (Window.drain(), table of completions)
    resolved: object                     # Queue of ids of groups that gave no sample and will give none
    failure: object                      # Queue of (sentence for the user or None, traceback)
    version: object                      # Value: the current model version
    allowance: object                    # Value: tokens that may be queued or in progress
    consumed: object                     # Value: tokens of the samples whose step the trainer has begun, or that it dropped
    heartbeat: object                    # Value: time.monotonic() of the event loop's last sign of life
    lost: object                         # Array: how often the rollout process took each server out
    restored: object                     # Array: that number when the trainer last gave each its weights; equal: the server is in use
    evaluate: object                     # Value: 1 + the step whose evaluation was last asked for; 0: none
    evaluated: object                    # Value: that number of the last one done
    stop: object                         # Event
    adapters: object                     # Value: whether requests name adapters, as the trainer finds at its start
    oldest_named: object                 # Value: the oldest version that a request in flight names

    @classmethod
    def create(cls, num_servers: int = 1) -> "Shared":
        spawn = multiprocessing.get_context("spawn")
        return cls(*(spawn.Queue() for _ in range(4)), *(spawn.Value("q", 0, lock=False) for _ in range(3)),
                   spawn.Value("d", time.monotonic(), lock=False), spawn.Array("q", num_servers, lock=False),
                   spawn.Array("q", num_servers, lock=False), *(spawn.Value("q", 0, lock=False) for _ in range(2)), spawn.Event(),
                   spawn.Value("b", 0, lock=False), spawn.Value("q", NEVER, lock=False))     # one writer each: a lock could die with its holder
