"""Weights to the server. A version number is given out only after the server has confirmed that version."""
import shutil
import time
from itertools import chain
from pathlib import Path

import requests
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers.core_model_loading import revert_weight_conversion

from config import Config
from metrics import Window
from model import Policy


def gathered_weights(policy: Policy, dtype: torch.dtype) -> dict[str, Tensor]:
    """On rank 0, full CPU tensors of every parameter in `dtype` and every persistent buffer, under the checkpoint's names; else empty.

    A collective: every rank gathers the same tensors in the same order. Tied parameters come once; the trainer's own weights keep
    their dtype. Nothing stays on the device.
    """
    persistent, weights = policy.lm.state_dict().keys(), {}
    buffers = ((name, buffer) for name, buffer in policy.lm.named_buffers() if name in persistent)
    for name, tensor in chain(((name, p.to(dtype)) for name, p in policy.lm.named_parameters()), buffers):
        full = tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()
        if dist.get_rank() == 0:
            weights[name] = full.cpu()
    return revert_weight_conversion(policy.lm, weights) if weights else weights   # transformers fuses experts in memory


def write_weights(weights: dict[str, Tensor], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / "model.safetensors", metadata=dict(format="pt"))


class DiskSync:
    """The server reloads a folder that rank 0 writes, so both must see the same path."""

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
        weights = gathered_weights(self.policy, self.dtype)
        if self.rank == 0:
            target = self.folder / f"version_{version}"
            self._write(weights, target)
            paused = time.monotonic()
            self._post("pause", "/pause?mode=keep")
            loading = time.monotonic()
            self._post("reload", "/collective_rpc", dict(method="reload_weights", kwargs=dict(weights_path=str(target))))
            self._post("reset of the prefix cache", "/reset_prefix_cache?reset_running_requests=true")   # kept requests are recomputed
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
        write_weights(weights, partial)
        partial.rename(target)

    def _post(self, phase: str, path: str, body: dict | None = None, optional: bool = False) -> None:
        try:
            reply = requests.post(self.url + path, json=body, timeout=self.timeout)
            done = reply.status_code == 200 and '"success":false' not in reply.text.replace(" ", "")
            problem = None if done or (optional and reply.status_code == 404) else f"{reply.status_code}: {reply.text[:500]}"
        except requests.RequestException as error:
            problem = str(error)
        if problem:
            raise RuntimeError(f"weight sync failed in its phase '{phase}' at {self.url} ({problem}); the server may stay paused: restart it.")
