"""Weights through memory: NCCL to servers on other GPUs, or a buffer shared with the server on this one."""
import base64
import os
import re
import socket
import threading
import time
from collections.abc import Callable
from urllib.parse import urlparse

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from config import Config, ConfigError
from model import Policy
from serve import aside
from vllm_worker import open_group
from weights import announced, gathered, pieces

ENGINE_SECONDS = 120.0   # whoever needs only a turn of a server's engine has it sooner, unless the engine waits in the broadcast of a trainer that was killed, without end
Entry = tuple[str, torch.dtype, tuple[int, ...], int]        # name, dtype, shape, offset in bytes


def cut(tensors: list[tuple[str, torch.dtype, tuple[int, ...]]], limit: int, align: int) -> tuple[list[list[Entry]], int]:
    """(chunks of tensors laid out one after the other, bytes of the largest). A chunk ends with the tensor that takes it over `limit`, as vLLM cuts."""
    chunks, largest, end = [[]], 0, 0
    for name, dtype, shape in tensors:
        if end > limit:
            chunks.append([])
            end = 0
        start = -(-end // align) * align
        end = start + torch.Size(shape).numel() * dtype.itemsize
        chunks[-1].append((name, dtype, shape, start))
        largest = max(largest, end)
    return chunks, largest


def needs_whole(policy: Policy, control) -> bool:
    """Whether merged adapters go with the whole text model, each time: where a server does not say that it has its checkpoint's weights, as in a resumed run, another's may lie there. A collective."""
    whole = [bool(policy.peft_config) and any(control.weight_version(server) != "default" for server in range(len(control.urls))) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(whole, src=0)
    return whole[0]


class Staging:
    """Gathers the policy into buffers, chunk by chunk; every rank gathers, rank 0 fills. `text`: the whole text model, else what is trained."""

    def __init__(self, policy: Policy, dtype: torch.dtype, limit: int, align: int, make_buffers: Callable[[int], list[Tensor]], text: bool = False):
        self.lm, self.text, self.units = policy.lm, text, pieces(policy, dtype, every_name=next(policy.parameters()).device.type == "cpu", text=text)
        per_unit = [announced(self.lm, [unit]) for unit in self.units]
        self.unit_sizes = [len(tensors) for tensors in per_unit]
        self.chunks, self.bytes = cut([tensor for unit in per_unit for tensor in unit], limit, align)
        self.layout = [[[name, str(dtype).removeprefix("torch."), list(shape), offset] for name, dtype, shape, offset in chunk] for chunk in self.chunks]
        self.buffers = make_buffers(self.bytes) if dist.get_rank() == 0 else []

    @torch.no_grad()
    def gather(self, chunk: int) -> list[tuple[str, Tensor]]:
        """The chunk's tensors on rank 0. A collective; chunks come in order, from 0."""
        if chunk == 0:
            self.stream, self.ready, self.found = zip(gathered(self.lm, self.units), self.unit_sizes), 0, []
        while self.ready < len(self.chunks[chunk]):
            tensors, size = next(self.stream)
            self.ready += size
            self.found += tensors.items()
        self.ready -= len(self.chunks[chunk])
        taken, self.found = self.found[:len(self.chunks[chunk])], self.found[len(self.chunks[chunk]):]
        return taken

    @torch.no_grad()
    def fill(self, chunk: int, tensors: list[tuple[str, Tensor]]) -> Tensor:
        """The buffer (bytes,) uint8 that now holds the chunk."""
        buffer, targets = self.buffers[chunk % len(self.buffers)], []
        for (name, dtype, shape, offset), (sent, tensor) in zip(self.chunks[chunk], tensors, strict=True):
            assert (name, dtype, shape) == (sent, tensor.dtype, tuple(tensor.shape)), f"announced {name} {dtype} {shape}, sent {sent} {tensor.dtype} {tuple(tensor.shape)}"
            targets.append(buffer[offset:offset + tensor.nbytes].view(dtype).view(shape))
        torch._foreach_copy_(targets, [tensor for _, tensor in tensors])
        return buffer[:offset + tensor.nbytes]


class Nccl:
    """Broadcasts, a communicator for each server, so that one that fails takes no other with it.

    The workers of servers that serve.py started take them themselves (vllm_worker.py); if one of the servers has no such workers, all get
    vLLM's packed weight transfer, which reloads tensor by tensor. Two buffers: while one is being sent the next chunk is gathered into the other.
    """

    pauses, limit = True, 512 << 20

    def __init__(self, config: Config, policy: Policy, dtype: torch.dtype, control):
        self.control, self.device = control, next(policy.parameters()).device
        ours = [all('"takes_weights":true' in control.reply(server, "/collective_rpc", dict(method="takes_weights"), within=ENGINE_SECONDS).text.replace(" ", "")
                    for server in range(len(control.urls))) if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(ours, src=0)
        self.by_plan, self.told = ours[0], set()
        self.staging = Staging(policy, dtype, self.limit, 16 if self.by_plan else 1, lambda size: [torch.empty(size, dtype=torch.uint8, device=self.device) for _ in range(2)],
                               needs_whole(policy, control))
        self.chunks = len(self.staging.chunks)
        self.groups, self.stateful, self.streams, self.updates, self.sent = {}, {}, {}, {}, [{}, {}]        # by server; `sent`: events of each buffer

    def stage(self, chunk: int, version: int) -> Callable[[], None]:
        tensors = self.staging.gather(chunk)
        return lambda: self._fill(chunk, tensors)

    def _fill(self, chunk: int, tensors: list[tuple[str, Tensor]]) -> None:
        for server, event in list(self.sent[chunk % 2].items()):
            try:
                self._wait(server, event)
            except RuntimeError:                 # that server's alone: `send` raises what it says
                self._forget(server)
        self.filled = self.staging.fill(chunk, tensors)

    def begin(self, server: int) -> None:
        """Open the group at the first sync, announce what comes, and let the server wait for it in a thread."""
        if not self.control.patience[server]:
            self._forget(server)                 # it was out of use, and may have been started anew
        if server not in self.groups:
            self._connect(server)
        path, body = ("/collective_rpc", dict(method="receive_weights")) if self.by_plan else ("/update_weights", dict(update_info=self._announce(server)))
        self.updates[server] = aside(self.control.post, server, "update", path, body, once=True)

    def _announce(self, server: int) -> dict:
        if not self.control.try_once(server, "/start_weight_update", dict(is_checkpoint_format=True)):
            self.control.try_once(server, "/finish_weight_update")                       # left open by a run that died
            self.control.post(server, "start", "/start_weight_update", dict(is_checkpoint_format=True))
        names, dtypes, shapes, _ = zip(*(entry for chunk in self.staging.layout for entry in chunk))
        return dict(names=names, dtype_names=dtypes, shapes=shapes) | ({} if self.stateful[server] else self._packing())

    def send(self, server: int, chunk: int) -> None:
        if self.updates[server].done():
            self._result(server)                 # it has failed: nobody would receive this
        if server not in self.groups:
            raise RuntimeError(f"weight sync failed in its phase 'transfer' at {self.control.urls[server]} (the chunk before was not received).")
        try:
            self._broadcast(server, chunk)
        except RuntimeError as error:
            if self.updates[server].done():
                self._result(server)             # what the server says tells more
            self._forget(server)
            raise RuntimeError(f"weight sync failed in its phase 'transfer' at {self.control.urls[server]} ({error}).") from error
        if chunk == self.chunks - 1:
            reply = self._result(server)
            for events in self.sent:
                if server in events:
                    self._wait(server, events[server])
            if self.by_plan and server not in self.told:
                say_how(reply)
                self.told.add(server)

    def _broadcast(self, server: int, chunk: int) -> None:
        if self.device.type != "cuda":
            return self.groups[server].broadcast(self.filled, src=0)
        with torch.cuda.device(self.device):
            stream = self.streams.setdefault(server, torch.cuda.Stream())
            stream.wait_stream(torch.cuda.current_stream())
            self.groups[server].broadcast(self.filled, src=0, stream=stream)
            self.sent[chunk % 2][server] = stream.record_event()

    def finish(self, server: int, version: int) -> None:
        if not self.by_plan:
            self.control.post(server, "finish", "/finish_weight_update", dict(weight_version=str(version)))

    def clean(self, version: int) -> None:
        pass

    def _result(self, server: int) -> str:
        try:
            return self.updates[server].result()
        except RuntimeError:
            self._forget(server)
            raise

    def _forget(self, server: int) -> None:
        """A group that stopped half way through a collective is of no use: the next sync opens another."""
        group = self.groups.pop(server, None)
        group.destroy() if hasattr(group, "destroy") else None       # aborts what is still enqueued, of which the stream would wait for ever
        self.streams.pop(server, None)
        for events in self.sent:
            events.pop(server, None)

    def _wait(self, server: int, event) -> None:
        """NCCL itself never gives up."""
        deadline = time.monotonic() + self.control.timeout
        while not event.query():
            if time.monotonic() > deadline:
                raise RuntimeError(f"weight sync failed in its phase 'transfer' at {self.control.urls[server]} (not received in {self.control.timeout:.0f} s).")
            if self.updates[server].done():
                self._result(server)
            time.sleep(0.0002)

    def _packing(self) -> dict:
        return dict(packed=True, packed_buffer_size_bytes=self.limit, packed_num_buffers=2)

    def _connect(self, server: int) -> None:
        """Both ends of a group must enter at once; ours waits in a thread, so that what the server says is heard."""
        world = self.control.reply(server, "/get_world_size", within=ENGINE_SECONDS).json()["world_size"] + 1
        address, opened = own_address(self.control.urls[server]), {}
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        if self.by_plan:
            buffer = dict(address=address, port=port, world_size=world, bytes=self.staging.bytes)
            path, body = "/collective_rpc", dict(method="attach_weights", kwargs=dict(buffer=buffer, chunks=self.staging.layout))
        else:
            major, minor = map(int, re.match(r"(\d+)\.(\d+)", self.control.reply(server, "/version").json()["version"]).groups())
            self.stateful[server] = (major, minor) >= (0, 28)  # since then packing is agreed on once, not at each update
            self.control.try_once(server, "/shutdown_weight_transfer_engine")            # of a run before this one
            info = dict(master_address=address, master_port=port, rank_offset=1, world_size=world)
            path, body = "/init_weight_transfer_engine", dict(init_info=info | (self._packing() if self.stateful[server] else {}))
        thread = threading.Thread(target=lambda: opened.update(group=open_group(address, port, 0, world, self.device)), daemon=True, name="group")
        thread.start()
        self.control.post(server, "connection", path, body, once=True)
        thread.join(60)
        if "group" not in opened:
            raise RuntimeError(f"weight sync failed in its phase 'connection' at {self.control.urls[server]} (no NCCL group with it at {address}:{port}).")
        self.groups[server] = opened["group"]
        self.told.discard(server)


def own_address(url: str) -> str:
    """The address under which the machine of `url` reaches this one."""
    family, kind, _, _, address = min(socket.getaddrinfo(urlparse(url).hostname, 9, type=socket.SOCK_DGRAM), key=lambda found: found[0] != socket.AF_INET)
    with socket.socket(family, kind) as probe:
        probe.connect(address)                                   # sends nothing
        return probe.getsockname()[0]


def check_fits(trained: int, buffer: int, free: int, total: int) -> None:
    """Raise ConfigError unless the memory (bytes) that server and weights leave holds what a step of `trained` parameters keeps, the buffer, and some activations."""
    gib, activations = 2**30, 2 << 30
    needed = 12 * trained + max(2 * trained, buffer) + buffer + activations     # AdamW 8, gradients 4, bf16 copies 2 bytes each, or those merged for the buffer; it
    if free < needed:
        raise ConfigError(f"server and trainer do not fit this GPU of {total / gib:.1f} GiB: {free / gib:.1f} GiB are free, optimizer, gradients, bf16 copies and buffer "
                          f"need {needed / gib:.1f}: start the server with vllm_gpu_memory_utilization lowered by {(needed - free) / total:.2f}, or train adapters (peft_config).")


class Ipc:
    """One buffer that the server on this GPU (or, without one, on this machine) has mapped; vllm_worker.py takes the weights out of it."""

    pauses, limit = True, 2 << 30         # what fits one chunk is gathered before the pause

    def __init__(self, config: Config, policy: Policy, dtype: torch.dtype, control):
        hosts = [urlparse(url).hostname for url in control.urls]
        if len(hosts) > 1 or dist.get_world_size() > 1:
            raise ConfigError("weight_sync_backend=ipc is for one trainer rank and one server on the same GPU: use nccl or disk for more.")
        if hosts[0] not in ("localhost", "127.0.0.1", "::1"):
            raise ConfigError(f"weight_sync_backend=ipc shares memory of this machine, and hands out its handles over HTTP: {hosts[0]} is refused, "
                              "let the server listen on 127.0.0.1 and correct vllm_server_base_url.")
        self.control, self.device = control, next(policy.parameters()).device
        self.trained = sum(p.numel() for p in policy.parameters() if p.requires_grad)
        self.staging = Staging(policy, dtype, self.limit, 16, self._buffers, needs_whole(policy, control))
        self.chunks, self.told = len(self.staging.chunks), False
        try:
            self._call("attach", "attach_weights", buffer=self.handle, chunks=self.staging.layout)
        except RuntimeError as error:
            raise ConfigError(f"weight_sync_backend=ipc: {error} If the server has no such method, restart it with: python serve.py <this config>") from None
        if self.device.type == "cpu":
            os.unlink(self.handle["file"])       # both have it mapped: it goes with the last of them

    def _buffers(self, size: int) -> list[Tensor]:
        if self.device.type == "cpu":
            path = f"/dev/shm/weights_{os.getpid()}"
            buffer, self.handle = torch.from_file(path, shared=True, size=size, dtype=torch.uint8), dict(file=path, bytes=size)
            return [buffer]
        check_fits(self.trained, size, *torch.cuda.mem_get_info(self.device))
        buffer = torch.empty(size, dtype=torch.uint8, device=self.device)
        _, (*_, handle, storage_bytes, offset, _, counter, counter_offset, event, event_sync) = reduce_tensor(buffer)
        text = {name: base64.b64encode(value).decode() for name, value in dict(handle=handle, counter=counter, event=event).items()}
        self.handle = dict(bytes=size, storage_bytes=storage_bytes, storage_offset=offset, counter_offset=counter_offset, event_sync=event_sync,
                           gpu=str(torch.cuda.get_device_properties(self.device).uuid), **text)
        return [buffer]

    def _call(self, phase: str, method: str, **arguments) -> str:
        return self.control.post(0, phase, "/collective_rpc", dict(method=method, kwargs=arguments))

    def stage(self, chunk: int, version: int) -> Callable[[], None]:
        tensors = self.staging.gather(chunk)
        return lambda: self._fill(chunk, tensors)

    def _fill(self, chunk: int, tensors: list[tuple[str, Tensor]]) -> None:
        self.staging.fill(chunk, tensors)
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()

    begin = clean = lambda self, server_or_version: None

    def send(self, server: int, chunk: int) -> None:
        self.reply = self._call("load", "load_weights_chunk", chunk=chunk)

    def finish(self, server: int, version: int) -> None:
        if not self.told:
            say_how(self.reply)
            self.told = True


def say_how(reply: str) -> None:
    """Print how a server of serve.py's takes weights, as it says after the first sync."""
    reason = re.search(r'"reason":"((?:[^"\\]|\\.)*)"', reply)
    print(f"the server reloads the weights tensor by tensor: {reason[1]}" if reason else "the server takes the weights by its copy plan", flush=True)
