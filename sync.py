"""Weights to the server. A version number is given out only after the server has confirmed that version."""
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import requests
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from config import Config
from metrics import Window
from model import Policy


def gathered_parameters(policy: Policy, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """(name in the checkpoint, full tensor in `dtype`) of every parameter, tied ones once.

    A collective: every rank runs it to the end, in the same order. The trainer's own weights keep their dtype.
    """
    for name, parameter in policy.lm.named_parameters():
        shard = parameter.detach().to(dtype)
        yield name, shard.full_tensor() if isinstance(shard, DTensor) else shard


class DiskSync:
    """The server reloads a folder that rank 0 writes; for one server or several that see the same path."""

    def __init__(self, config: Config, policy: Policy, dtype: torch.dtype):
        self.policy, self.dtype, self.timeout = policy, dtype, config.vllm_server_timeout
        self.url = config.vllm_server_base_url.rstrip("/")
        self.folder = Path(config.output_dir).resolve() / ".weights"
        self.rank = dist.get_rank()
        if self.rank == 0:
            shutil.rmtree(self.folder, ignore_errors=True)

    def push(self, version: int, window: Window) -> None:
        """Write, pause the server with its requests kept, reload, resume. Raises RuntimeError naming the phase that failed.

        Writing happens before the pause. Caches of the old weights are dropped after the reload, before the resume.
        """
        started = time.monotonic()
        weights = dict(gathered_parameters(self.policy, self.dtype))
        if self.rank == 0:
            target = self.folder / f"version_{version}"
            self._write(weights, target)
            paused = time.monotonic()
            self._post("pause", "/pause?mode=keep")
            loading = time.monotonic()
            self._post("reload", "/collective_rpc", dict(method="reload_weights", kwargs=dict(weights_path=str(target))))
            self._post("reset of the prefix cache", "/reset_prefix_cache")
            self._post("version", "/update_weight_version", dict(new_version=str(version)), optional=True)   # per-token versions
            window.add("perf/weight_sync_transfer_s", time.monotonic() - loading + paused - started)
            window.add("perf/weight_sync_pause_s", loading - paused)
            self._post("resume", "/resume")
            shutil.rmtree(target)
        waiting = time.monotonic()
        dist.barrier()
        window.add("perf/weight_sync_barrier_s", time.monotonic() - waiting)
        window.add("perf/weight_sync_s", time.monotonic() - started)

    def _write(self, weights: dict[str, Tensor], target: Path) -> None:
        """A folder appears whole or not at all."""
        partial = target.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        save_file({name: tensor.cpu().contiguous() for name, tensor in weights.items()}, partial / "model.safetensors", metadata=dict(format="pt"))
        partial.rename(target)

    def _post(self, phase: str, path: str, body: dict | None = None, optional: bool = False) -> None:
        try:
            reply = requests.post(self.url + path, json=body, timeout=self.timeout)
            problem = None if reply.status_code == 200 or (optional and reply.status_code == 404) else f"{reply.status_code}: {reply.text[:500]}"
        except requests.RequestException as error:
            problem = str(error)
        if problem:
            raise RuntimeError(f"weight sync failed in its phase '{phase}' at {self.url} ({problem}); the server may stay paused: restart it.")
