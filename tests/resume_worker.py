"""One run of train.py in this process, with its state at the end. Also run by torchrun:  resume_worker.py ARGUMENTS.json OUT.pt"""
import json
import os
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
import torch                                # noqa: E402
import torch.distributed as dist            # noqa: E402
from torch.distributed.tensor import DTensor         # noqa: E402

import train                                # noqa: E402


def full(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def state_of(policy, optimizer):
    """Everything that decides how training goes on."""
    names = list(policy.lm.named_parameters())
    return dict(parameters={name: full(p) for name, p in names}, rates=[(group["lr"], group["initial_lr"]) for group in optimizer.param_groups],
                moments={f"{name} {key}": full(value) for name, p in names for key, value in optimizer.state.get(p, {}).items()}, draw=torch.rand(1))


def run(argv):
    """The state when the run saves its model at the end; raises what ends it before."""
    found, make, save = {}, train.make_optimizer, train.save_model

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
        if dist.is_initialized():
            dist.destroy_process_group()
    return found["state"]


if __name__ == "__main__":
    torch.set_num_threads(1)
    state = run(json.loads(Path(sys.argv[1]).read_text()))
    if os.environ["RANK"] == "0":
        torch.save(state, sys.argv[2])
