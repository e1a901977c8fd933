"""What several ranks gather, and what they do when a sync fails; of each number of ranks every rank writes OUT.<ranks>.<rank>.json.

    sync_worker.py OUT RANKS        or by torchrun: sync_worker.py OUT
"""
import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
from conftest import forked, make_sample, tensors_of, tiny_lm, tiny_lora, tiny_moe      # noqa: E402

from metrics import Window                                      # noqa: E402
from model import Policy                                        # noqa: E402
from packing import pack_row                                    # noqa: E402
from shard import shard                                         # noqa: E402
from sync import WeightSync                                     # noqa: E402
from transport import Staging                                   # noqa: E402
from weights import announced, gathered, pieces                 # noqa: E402

KINDS = dict(tied=lambda: Policy(tiny_lm(), 1.0, "sdpa"), untied=lambda: Policy(tiny_lm(vocab=11, tied=False), 1.0, "sdpa"),
             moe=lambda: Policy(tiny_moe(), 1.0, "sdpa"), lora=lambda: tiny_lora())
GATHERS = [0]
plain = DTensor.full_tensor


def counted(self, *args, **kwargs):
    GATHERS[0] += 1
    return plain(self, *args, **kwargs)


DTensor.full_tensor = counted


def collect(policy, dtype):
    """[(name, tensor)] on rank 0."""
    return [item for unit in gathered(policy.lm, pieces(policy, dtype)) for item in unit.items()]


def same(a, b):
    return len(a) == len(b) and all(x == y and s.dtype == t.dtype and torch.equal(s, t) for (x, s), (y, t) in zip(a, b))


def compare(kind, mesh):
    """Gathered from shards against the same policy before it was sharded, in bf16, bitwise and in order."""
    policy = KINDS[kind]()
    expected = collect(policy, torch.bfloat16)
    shard(policy, mesh, torch.float32)
    GATHERS[0] = 0
    sent = collect(policy, torch.bfloat16)
    listed = announced(policy.lm, pieces(policy, torch.bfloat16))
    again = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in sent]
    return dict(same=same(sent, expected), count=len(sent), gathers=GATHERS[0], announced=not sent or listed == again)


def train_mixed(mesh):
    """Adapters in fp32 beside a frozen base in bf16, sharded together: log-probs of a row, and which parameters got a gradient."""
    policy = shard(tiny_lora(), mesh, torch.bfloat16)
    with torch.enable_grad():
        logprobs = policy(tensors_of(pack_row([make_sample(range(3, 20), 4)]))[0])[0]
        logprobs.sum().backward()
    with_gradient = sorted(base for base, p in policy.lm.named_parameters() if p.grad is not None)
    return dict(logprobs=logprobs.tolist(), trained=with_gradient, adapters=sorted(base for base, p in policy.lm.named_parameters() if ".lora_" in base),
                dtypes=sorted({str(p.dtype) for p in policy.parameters() if p.requires_grad}))


class Faulty:
    """Three chunks to a server that fails in one phase, slowly."""

    pauses = True

    def __init__(self, policy, failing):
        self.staging = Staging(policy, torch.bfloat16, 4000, 1, lambda size: [torch.empty(size, dtype=torch.uint8) for _ in range(2)])
        self.chunks, self.failing = len(self.staging.chunks), failing

    def _act(self, phase):
        time.sleep(0.02)
        if phase == self.failing:
            raise RuntimeError(f"weight sync failed in its phase '{phase}'")

    def stage(self, chunk, version):
        tensors = self.staging.gather(chunk)

        def fill():
            if self.failing == "writing" and chunk == 1:
                raise OSError("no space left")
            self.staging.fill(chunk, tensors)
        return fill

    def begin(self, server):
        self._act("start")

    def send(self, server, chunk):
        if chunk == 1:
            self._act("transfer")

    def finish(self, server, version):
        self._act("finish")

    def clean(self, version):
        pass


def fail(policy, phase):
    transport, asked = Faulty(policy, phase), []

    def post(server, name, path, body=None, optional=False, within=None):
        asked.append(path)
        if name == phase:
            raise RuntimeError(f"weight sync failed in its phase '{name}'")
    control = SimpleNamespace(urls=["http://x"], post=post, try_once=lambda server, path, within: asked.append(path), retries=0, patience=[0])
    GATHERS[0], started, error = 0, time.monotonic(), None
    try:
        WeightSync(transport, control).push(1, Window())
    except RuntimeError as found:
        error = str(found)
    return dict(error=error, gathers=GATHERS[0], seconds=time.monotonic() - started, asked=asked, chunks=transport.chunks)


def work():
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    with torch.no_grad():
        results = dict(gather={kind: compare(kind, mesh) for kind in KINDS})
        results["mixed"] = train_mixed(mesh)
        policy = shard(KINDS["untied"](), mesh, torch.float32)
        results["failures"] = {phase: fail(policy, phase) for phase in ("pause", "start", "transfer", "writing", "finish", "resume", None)}
    Path(f"{sys.argv[1]}.{dist.get_world_size()}.{dist.get_rank()}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    if sys.argv[2:]:
        forked(int(sys.argv[2]), work)
    else:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        work()
        dist.destroy_process_group()
        os._exit(0)          # DTensor keeps the group and so gloo's threads: one that frees the last broadcast's tensors while the interpreter ends aborts (8 of 40 runs): see LOG.md
