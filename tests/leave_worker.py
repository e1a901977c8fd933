"""leave_worker.py RANK STORE: rank 1 leaves train.main while a thread of gloo's has a broadcast's tensor to free, which takes it 0.1 s."""
import builtins
import os
import sys
import threading
import time
import weakref
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

sys.path[:0] = [str(Path(__file__).parent.parent)]
import train                                            # noqa: E402


class Late:
    def __del__(self, sleep=time.sleep):
        sleep(0.5)                                      # the interpreter's end lasts longer than that


def slowly(freeing):
    freeing.set()
    time.sleep(0.1)


rank = int(sys.argv[1])
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[2], 2), rank=rank, world_size=2)
DTensor.from_local(torch.ones(4), dist.init_device_mesh("cpu", (2,)), [Shard(0)]).full_tensor()      # so the group's threads stay
if rank == 0:
    time.sleep(0.5)                                     # until the other has nothing left of it
    dist.broadcast(torch.ones(1), src=0)
    os._exit(0)
else:
    tensor, freed = torch.zeros(1), threading.Event()
    weakref.finalize(tensor, slowly, freed).atexit = False
    work = dist.broadcast(tensor, src=0, async_op=True)
    del tensor, work
    assert freed.wait(60)
    builtins.late = Late()
    train.load_config = lambda argv: sys.exit(3)
    train.main([])
