"""Parameters over devices in mixed precision: FSDP2 over ranks, plain copies in the compute dtype on one."""
import weakref

import numpy as np
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from model import Policy, outside_text


class ComputeCopies:
    """Mixed precision on one device: while entered, the modules hold copies in `dtype`; gradients arrive in the fp32 masters' `grad`.

    FSDP does the same over ranks. On one it would copy each weight five times and each gradient three times a step.
    """

    def __init__(self, policy: Policy, dtype: torch.dtype):
        self.groups, copies = [], {}
        for module in (*policy.lm.get_decoder().layers, policy):
            masters = [p for p in module.parameters() if p.requires_grad and p not in copies]
            if masters:                                          # none of a frozen layer
                self.groups.append(CopyGroup(masters, dtype))
                copies |= zip(masters, self.groups[-1].copies)
        self.slots = [(module, name, p, copies[p]) for module in policy.modules() for name, p in module._parameters.items() if p in copies]

    def __enter__(self) -> None:
        for group in self.groups:
            group.fill()
        for module, name, _, copy in self.slots:
            module._parameters[name] = copy

    def __exit__(self, *error) -> None:
        for module, name, master, _ in self.slots:
            module._parameters[name] = master
        for group in self.groups:
            group.flush()


class CopyGroup:
    """The copies of some parameters in one buffer, freed as soon as all their gradients are complete: fp32 gradients take its place."""

    def __init__(self, masters: list[nn.Parameter], dtype: torch.dtype):
        starts = np.cumsum([0] + [-(-p.numel() // 64) * 64 for p in masters]).tolist()
        self.masters, self.buffer = masters, masters[0].new_empty(starts[-1], dtype=dtype)
        self.copies = [nn.Parameter(self.buffer[start:start + p.numel()].view_as(p)) for start, p in zip(starts, masters)]
        self.nbytes, self.complete = self.buffer.nbytes, 0
        for copy in self.copies:
            copy.register_post_accumulate_grad_hook(lambda copy, group=weakref.ref(self): group()._count())     # no cycle through autograd
        self.buffer.untyped_storage().resize_(0)

    @torch.no_grad()
    def fill(self) -> None:
        self.buffer.untyped_storage().resize_(self.nbytes)
        torch._foreach_copy_(self.copies, self.masters)

    def _count(self) -> None:
        self.complete += 1
        if self.complete == len(self.copies):
            self.flush()

    @torch.no_grad()
    def flush(self) -> None:
        """Add the copies' gradients to the masters', together: one by one it takes twice as long."""
        arrived = [(master, copy) for master, copy in zip(self.masters, self.copies) if copy.grad is not None]
        first = [(master, copy) for master, copy in arrived if master.grad is None]
        for master, copy in arrived:
            if master.grad is not None:
                master.grad += copy.grad
        for master, _ in first:
            master.grad = torch.empty_like(master)
        if first:
            torch._foreach_copy_([master.grad for master, _ in first], [copy.grad for _, copy in first])
        for _, copy in arrived:
            copy.grad = None
        self.complete = 0
        self.buffer.untyped_storage().resize_(0)


def shard(policy: Policy, mesh: DeviceMesh, dtype: torch.dtype) -> Policy:
    """FSDP2: one unit a decoder layer, the rest (embedding, norm, head, tied or not) in the root unit, a vision tower in none. One rank needs none.

    Gradients are *summed* over ranks, in fp32 (fp64 for fp64): the loss already carries the global denominator.
    """
    for p in (p for p in policy.parameters() if not p.requires_grad):
        p.data = p.data.to(dtype)                                # frozen, so it needs no master
    if mesh.size() == 1:
        if any(p.dtype != dtype for p in policy.parameters()):
            policy.compute_weights = ComputeCopies(policy, dtype)
        return policy
    mixed = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.promote_types(dtype, torch.float32))
    for unit in (*policy.lm.get_decoder().layers, policy):
        fully_shard(unit, mesh=mesh, mp_policy=mixed, ignored_params=outside_text(policy.lm))
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
    # FSDP leaves the root unit whole until a backward: after a forward without one, the optimizer or a checkpoint would take those for the parameters
    policy.register_forward_hook(lambda policy, inputs, outputs: None if torch.is_grad_enabled() else policy.reshard())
    return policy
