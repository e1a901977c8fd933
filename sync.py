"""Weights to the server. A version number is given out only after the server has confirmed that version."""
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
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
from serve import answers


def gathered_weights(policy: Policy, dtype: torch.dtype, frozen: bool = False, every_name: bool = False) -> dict[str, Tensor]:
    """On rank 0, full CPU tensors of what is trained, or with `frozen` of everything, under the checkpoint's names; else empty.

    Parameters come in `dtype`, tied ones once (or under `every_name`), and persistent buffers as they are. A collective: every rank gathers the same tensors
    in the same order. The trainer's own weights keep their dtype, and nothing stays on the device.
    """
    lm, weights = policy.lm, {}
    persistent, wanted = lm.state_dict().keys(), set((lm if frozen else lm.get_decoder()).buffers())
    parameters = ((name, p.to(dtype)) for name, p in lm.named_parameters() if frozen or p.requires_grad)
    buffers = ((name, buffer) for name, buffer in lm.named_buffers() if name in persistent and buffer in wanted)
    for name, tensor in chain(parameters, buffers):
        full = tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()
        if dist.get_rank() == 0:
            weights[name] = full.cpu()
    if every_name:
        first = {}
        for name, p in lm.named_parameters(remove_duplicate=False):
            if first.setdefault(p, name) in weights and name not in weights:
                weights[name] = weights[first[p]].clone()
    return revert_weight_conversion(lm, weights) if weights else weights   # transformers fuses experts in memory


def write_weights(weights: dict[str, Tensor], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / "model.safetensors", metadata=dict(format="pt"))


UNREACHABLE = "it cannot be reached"
RETRY_SECONDS = 22.0     # with what else a failing run does, under half a minute


class DiskSync:
    """The servers reload a folder that rank 0 writes, so all must see the same path.

    One that fails while another succeeds is out of use until a later sync finds it answering; see client.Servers.
    """

    def __init__(self, config: Config, policy: Policy, dtype: torch.dtype, shared=None, check_server=lambda: None):
        self.check_server, self.retries = check_server, 0
        self.policy, self.dtype, self.timeout, self.urls, self.shared = policy, dtype, config.vllm_server_timeout, config.server_urls, shared
        self.folder = Path(config.output_dir).resolve() / ".weights"
        self.on_cpu = next(policy.parameters()).device.type == "cpu"
        self.rank = dist.get_rank()
        if self.rank == 0:
            shutil.rmtree(self.folder, ignore_errors=True)

    def push(self, version: int, window: Window) -> None:
        """Write, then let every server load. Raises RuntimeError naming the phase that failed when no server has the new weights."""
        started = time.monotonic()
        weights = gathered_weights(self.policy, self.dtype, every_name=self.on_cpu)      # vLLM on a CPU keeps a copy of a tied head
        if self.rank == 0:
            target = self.folder / f"version_{version}"
            self._write(weights, target)
            written = time.monotonic()
            with ThreadPoolExecutor(len(self.urls)) as threads:
                outcomes = list(threads.map(lambda server: self._load(server, target, version), range(len(self.urls))))
            failures = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
            if len(failures) == len(self.urls):
                raise failures[0]
            paused, loading = np.max([outcome for outcome in outcomes if not isinstance(outcome, Exception)], axis=0)
            window.add("perf/weight_sync_transfer_s", loading + written - started)
            window.add_all({"perf/weight_sync_pause_s": paused, "perf/weight_sync_retry_count": self.retries})
            self.retries = 0
            shutil.rmtree(target)
        waiting = time.monotonic()
        dist.barrier()
        window.add("perf/weight_sync_barrier_s", time.monotonic() - waiting)
        window.add("perf/weight_sync_s", time.monotonic() - started)

    def _load(self, server: int, target: Path, version: int) -> tuple[float, float] | RuntimeError:
        """Seconds until one server was paused, and until it had loaded; or what went wrong."""
        url, lost = self.urls[server], self.shared.lost[server] if self.shared else 0
        in_use = not self.shared or self.shared.restored[server] == lost
        try:
            if not in_use and not answers(url):
                raise RuntimeError(f"{url} does not answer")
            times = self._reload(url, target, version, patience=RETRY_SECONDS if in_use else 0)
        except RuntimeError as error:
            if in_use and len(self.urls) > 1:
                print(f"out of use: {error}", flush=True)
            if self.shared:
                self.shared.restored[server] = -1
            return error
        if self.shared:
            self.shared.restored[server] = lost             # as it was before: lost once more meanwhile, it stays out
        if not in_use:
            print(f"the server at {url} is back, with the weights of version {version}", flush=True)
        return times

    def _reload(self, url: str, target: Path, version: int, patience: float) -> tuple[float, float]:
        """Pause with the requests kept, reload, drop what the old weights cached, resume."""
        started = time.monotonic()
        post = partial(self._post, url, patience)
        post("pause", "/pause?mode=keep")
        loading = time.monotonic()
        post("reload", "/collective_rpc", dict(method="reload_weights", kwargs=dict(weights_path=str(target))))
        post("reset of the prefix cache", "/reset_prefix_cache?reset_running_requests=true")   # kept requests are recomputed
        post("version", "/update_weight_version", dict(new_version=str(version)), optional=True)   # per-token versions
        loaded = time.monotonic()
        post("resume", "/resume")
        return loading - started, loaded - loading

    def _write(self, weights: dict[str, Tensor], target: Path) -> None:
        """A folder appears whole or not at all."""
        partial = target.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        write_weights(weights, partial)
        partial.rename(target)

    def _post(self, url: str, patience: float, phase: str, path: str, body: dict | None = None, optional: bool = False) -> None:
        """Every phase may be repeated, so a server that cannot be reached is given `patience` seconds."""
        deadline = time.monotonic() + patience
        while (problem := self._try(url, path, body, optional)) is UNREACHABLE and time.monotonic() < deadline:
            self.check_server()
            self.retries += 1
            time.sleep(1)
        if problem:
            raise RuntimeError(f"weight sync failed in its phase '{phase}' at {url} ({problem}); the server may stay paused: restart it.")

    def _try(self, url: str, path: str, body: dict | None, optional: bool) -> str | None:
        """What went wrong, if anything."""
        try:
            reply = requests.post(url + path, json=body, timeout=(5, self.timeout))
            done = reply.status_code == 200 and '"success":false' not in reply.text.replace(" ", "")
            return None if done or (optional and reply.status_code == 404) else f"{reply.status_code}: {reply.text[:500]}"
        except requests.ConnectionError:
            return UNREACHABLE
        except requests.RequestException as error:
            return str(error)
