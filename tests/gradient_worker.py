"""Gradients of recorded samples as train.py computes them, on several ranks; the first writes one result a job.

    gradient_worker.py JOBS.pkl OUT       JOBS: {ranks: {name: dict of `run`'s arguments}}; written are OUT.<ranks>
"""
import pickle
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
from conftest import forked, tiny_config, tiny_lm, tiny_lora, tiny_moe  # noqa: E402

from loss import Objective                                      # noqa: E402
from model import Policy, check_packing, load_policy            # noqa: E402
from packing import plan_micro_batch                            # noqa: E402
from shard import shard                                         # noqa: E402
from planning import make_step, scatter_step                    # noqa: E402
from train import forward_backward                              # noqa: E402


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def run(micro_batches, model="tiny", budget=400, normalization="micro_batch", steps=0):
    """micro_batches: lists of samples. Gradients in full (or parameters after so many SGD steps that begin as train.py's do), and what was reported."""
    rank, world = dist.get_rank(), dist.get_world_size()
    config = tiny_config(model=model, loss_normalization=normalization)
    made = dict(tiny=lambda: Policy(tiny_lm(), 1.0, "sdpa"), tiny_untied=lambda: Policy(tiny_lm(tied=False), 1.0, "sdpa"), tiny13=lambda: Policy(tiny_lm(vocab=13), 1.0, "sdpa"),
                tiny_moe=lambda: Policy(tiny_moe(), 1.0, "sdpa", 0.5), tiny_lora=lambda: tiny_lora())
    policy = made[model]() if model in made else load_policy(config, torch.device("cpu"))
    dtype = torch.float64 if model in made and model != "tiny_moe" else torch.float32      # torch's grouped product knows no fp64
    shard(policy.to(dtype), dist.init_device_mesh("cpu", (world,)), dtype)
    if steps:
        check_packing(policy, torch.device("cpu"), dtype)            # a forward without gradients comes before the optimizer
        optimizer = torch.optim.SGD(policy.parameters(), lr=0.2)
    plan = None
    if rank == 0:
        planned = [plan_micro_batch(samples, world, budget) for samples in micro_batches]
        assert all(left is None for _, left in planned)
        plan = make_step(config, [rows for rows, _ in planned], 0, budget)
    group = dist.group.WORLD if world > 1 else None
    share = scatter_step(plan, rank, world)
    _, stats = forward_backward(policy, Objective(), share, torch.device("cpu"), group)
    norm = full(torch.nn.utils.clip_grad_norm_(policy.parameters(), 1e9)).reshape(1)
    norms = [torch.empty_like(norm) for _ in range(world)]
    dist.all_gather(norms, norm)
    metrics, terms, loss = stats.reduce(Objective(), group)
    for step in range(steps):
        optimizer.step()
        optimizer.zero_grad()
        forward_backward(policy, Objective(), share, torch.device("cpu"), group) if step < steps - 1 else None
    values = {name: full(p if steps else p.grad).detach().clone() for name, p in policy.lm.named_parameters() if p.requires_grad}
    return dict(values=values, terms=terms, loss=loss, norms=[n.item() for n in norms], metrics=metrics,
                trained=plan.trained_tokens if plan else 0, forwarded=plan.forwarded_tokens if plan else 0)


if __name__ == "__main__":
    def work():
        results = {name: run(**job) for name, job in jobs.items()}
        if dist.get_rank() == 0:
            torch.save(results, f"{sys.argv[2]}.{dist.get_world_size()}")
    for ranks, jobs in pickle.loads(Path(sys.argv[1]).read_bytes()).items():
        forked(ranks, work)
