"""One run of train.py in this process, with its state at the end. Also run by torchrun:  resume_worker.py ARGUMENTS.json OUT.pt [FORWARD]

FORWARD: checkpoints are written in the background, and none before that forward.
"""
import json
import os
import signal
import sys
import threading
import time
from contextlib import contextmanager, nullcontext
from itertools import count
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
import pytest                               # noqa: E402
import torch                                # noqa: E402
import torch.distributed as dist            # noqa: E402
from torch.distributed.tensor import DTensor         # noqa: E402

import train                                # noqa: E402
from checkpoint import Checkpoints          # noqa: E402


def full(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def state_of(policy, optimizer):
    """Everything that decides how training goes on."""
    names = list(policy.lm.named_parameters())
    return dict(parameters={name: full(p) for name, p in names}, rates=[(group["lr"], group["initial_lr"]) for group in optimizer.param_groups],
                moments={f"{name} {key}": full(value) for name, p in names for key, value in optimizer.state.get(p, {}).items()}, draw=torch.rand(1))


@contextmanager
def in_background(forward=0, settle=False):
    """Checkpoints are written while training goes on, as on a GPU with a slow disk: none before the Event, which that forward of a run sets.

    settle: that forward also waits until nothing is being written.
    """
    release, forwards, plain, write = threading.Event(), count(1), train.forward_backward, Checkpoints._write

    def forward_backward(*args):
        if next(forwards) == forward:
            release.set()
            for thread in threading.enumerate() if settle else ():
                thread.join() if thread.name == "checkpoint" else None
        return plain(*args)

    def slow_write(self, written, *rest):
        if not release.wait(60):
            return written.set_exception(TimeoutError("that forward did not come"))
        time.sleep(0.2)
        write(self, written, *rest)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoints, "background", True), patch.setattr(Checkpoints, "_write", slow_write), patch.setattr(train, "forward_backward", forward_backward)
        try:
            yield release
        finally:
            release.set()


def run(argv):
    """The state when the run saves its model at the end; raises what ends it before."""
    found, make, save, handlers = {}, train.make_optimizer, train.save_model, {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}

    def make_optimizer(config, policy):
        found["optimizer"] = make(config, policy)
        return found["optimizer"]

    def save_model(policy, *rest):
        found["state"] = state_of(policy, found["optimizer"])
        save(policy, *rest)
    train.make_optimizer, train.save_model = make_optimizer, save_model
    try:
        train.main(argv)
    finally:
        train.make_optimizer, train.save_model = make, save
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if dist.is_initialized():
            dist.destroy_process_group()
    return found["state"]


if __name__ == "__main__":
    torch.set_num_threads(1)
    with in_background(int(sys.argv[3])) if sys.argv[3:] else nullcontext():
        state = run(json.loads(Path(sys.argv[1]).read_text()))
    if os.environ["RANK"] == "0":
        torch.save(state, sys.argv[2])
