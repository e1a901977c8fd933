"""Runs inside the vLLM server (--worker-extension-cls vllm_worker.CopyPlan): weights from the trainer's broadcasts or a buffer shared with it, without a
per-tensor reload.

vLLM's own reload calls Python for every tensor. Here it runs once. Then each of the model's loaders is asked, without letting it
write, which slice of which parameter it would fill from which part of the buffer; if those slices already hold exactly these bytes,
later syncs are one batched copy a chunk. A model whose weights vLLM rearranges after loading
(quantised, packed for a CPU) fails that comparison and is reloaded by vLLM each time.
"""
import base64
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor
from torch.utils._python_dispatch import TorchDispatchMode


GLOO_TIMEOUT = timedelta(minutes=5)


class CopyPlan:
    """Mixed into vLLM's worker; every public method is called by name through /collective_rpc."""

    def attach_weights(self, buffer: dict, chunks: list) -> dict:
        """Map the trainer's buffer, or open a group with it. chunks: for each filling of the buffer a list of [name, dtype, shape, offset in bytes]."""
        if hasattr(getattr(self, "sync_group", None), "destroy"):
            self.sync_group.destroy()                        # of a run before this one, as is all that holds its buffer
        self.sync_group = self.sync_buffer = self.sync_chunks = self.sync_plan = None
        if "port" in buffer:
            parallel = self.vllm_config.parallel_config
            rank = 1 + parallel.data_parallel_index * parallel.world_size + self.rank
            self.sync_group = open_group(buffer["address"], buffer["port"], rank, buffer["world_size"], self.device)
            self.sync_buffer = torch.empty(buffer["bytes"], dtype=torch.uint8, device=self.device)
        else:
            self.sync_buffer = open_buffer(buffer, self.device)
        self.sync_layout, self.sync_chunks = chunks, [[(name, view(self.sync_buffer, dtype, shape, offset)) for name, dtype, shape, offset in chunk] for chunk in chunks]
        self.sync_ends = [layout[-1][3] + tensors[-1][1].nbytes for layout, tensors in zip(chunks, self.sync_chunks)]
        self.sync_plan, self.sync_reason, self.sync_kept = [], "the first load goes through vLLM's own", []
        return dict(bytes=self.sync_buffer.numel())

    def takes_weights(self) -> dict:
        """Asked of a server to find out whether its workers have this class."""
        return dict(takes_weights=True)

    def load_weights_chunk(self, chunk: int) -> dict:
        """Take the buffer's present content, the chunk of that number, into the model."""
        started = time.perf_counter()
        self._take(chunk)
        return self._taken(started)

    def receive_weights(self) -> dict:
        """Every chunk, from the trainer's broadcasts."""
        started = time.perf_counter()
        for chunk in range(len(self.sync_chunks)):
            self.sync_group.broadcast(self.sync_buffer[:self.sync_ends[chunk]], src=0)
            self._take(chunk)                            # of one stream: the next broadcast waits for it
        return self._taken(started)

    @torch.inference_mode()
    def _take(self, chunk: int) -> None:
        if self.sync_reason is None:
            targets, sources = self.sync_plan[chunk]
            return torch._foreach_copy_(targets, sources) if targets else None
        self._reload(chunk)
        if self.sync_kept is not None:
            self.sync_kept.append(self.sync_buffer[:self.sync_ends[chunk]].to("cpu", copy=True))
            if chunk == len(self.sync_chunks) - 1:
                self._learn()
                torch.cuda.empty_cache()                 # once: what the reload took (LOG.md) is the trainer's where both share the GPU; without one it does nothing

    def _taken(self, started: float) -> dict:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)          # the trainer fills the buffer again after this reply
        return dict(seconds=time.perf_counter() - started, by_plan=self.sync_reason is None, reason=self.sync_reason)

    def _learn(self) -> None:
        """After the first whole load, from what was in the buffer then: the plan, or why there is none."""
        model, kept, self.sync_kept = self.model_runner.get_model(), self.sync_kept, None
        sent = [(name, view(kept[chunk], dtype, shape, offset)) for chunk, layout in enumerate(self.sync_layout) for name, dtype, shape, offset in layout]
        copies, self.sync_reason = trace_copies(model, sent)
        self.sync_reason = self.sync_reason or self._packed(model)
        of_chunk, self.sync_plan = {storage(content): chunk for chunk, content in enumerate(kept)}, [([], []) for _ in kept]
        for target, source in copies:
            targets, sources = self.sync_plan[of_chunk[storage(source)]]
            targets.append(target)
            sources.append(self.sync_buffer[:len(self.sync_buffer) // 16 * 16].view(source.dtype).as_strided(source.shape, source.stride(), source.storage_offset()))

    def _packed(self, model) -> str | None:
        """On a CPU vLLM computes with packed copies that no parameter shows."""
        packed = any(hasattr(module, "cpu_linear") for module in model.modules())
        return "vLLM keeps packed copies of its weights on a CPU" if packed else None

    def _reload(self, chunk: int) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        model = self.model_runner.get_model()
        with set_current_vllm_config(self.vllm_config), torch.device(self.device):
            if chunk == 0:
                if getattr(self, "sync_open", False):        # a load that was cut short: what it left must not be taken for a part of this one
                    finalize_layerwise_reload(model, self.model_config)
                initialize_layerwise_reload(model)
                self.sync_open = True
            model.load_weights([(name, tensor.clone()) for name, tensor in self.sync_chunks[chunk]])     # it keeps some until the end
            if chunk == len(self.sync_chunks) - 1:
                finalize_layerwise_reload(model, self.model_config)
                self.sync_open = False


def open_group(address: str, port: int, rank: int, world_size: int, device: torch.device):
    """The NCCL group of the trainer, rank 0, and its servers' workers; has `broadcast(tensor, src, stream)`. On a CPU one of gloo."""
    if device.type == "cuda":
        import torch._inductor.config                        # counts this process's threads before vLLM, in a trainer, makes them one
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
        from vllm.distributed.utils import StatelessProcessGroup
        torch.cuda.set_stream(torch.cuda.current_stream(device))     # asked for the stream first, vLLM would make a new one current, beside the model's
        return PyNcclCommunicator(StatelessProcessGroup.create(host=address, port=port, rank=rank, world_size=world_size), device=device)
    store = dist.TCPStore(address, port, world_size, rank == 0, GLOO_TIMEOUT)
    return Gloo(dist.ProcessGroupGloo(store, rank, world_size, GLOO_TIMEOUT))


class Gloo:
    def __init__(self, group):
        self.group = group

    def broadcast(self, tensor: Tensor, src: int, stream=None) -> None:
        self.group.broadcast(tensor, src).wait()


def open_buffer(buffer: dict, device: torch.device) -> Tensor:
    """(bytes,) uint8: the trainer's memory. On a GPU from a CUDA IPC handle, without pickle; on a CPU a file in shared memory."""
    if "file" in buffer:
        return torch.from_file(buffer["file"], shared=True, size=buffer["bytes"], dtype=torch.uint8)
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    if uuid != buffer["gpu"]:
        raise RuntimeError(f"the trainer is on GPU {buffer['gpu']}, the server on {uuid}: weight_sync_backend=ipc needs one GPU, use nccl.")
    handle, counter, event = (base64.b64decode(buffer[name]) for name in ("handle", "counter", "event"))
    return rebuild_cuda_tensor(torch.Tensor, torch.Size([buffer["bytes"]]), (1,), 0, torch.storage.TypedStorage, torch.uint8, device.index, handle,
                               buffer["storage_bytes"], buffer["storage_offset"], False, counter, buffer["counter_offset"], event, buffer["event_sync"])


def view(buffer: Tensor, dtype: str, shape: list[int], offset: int) -> Tensor:
    kind = getattr(torch, dtype)
    size = torch.Size(shape).numel() * kind.itemsize
    return buffer[offset:offset + size].view(kind).view(shape)


class Recorder(TorchDispatchMode):
    """While entered, nothing is written: copies into `targets` (data pointers of storages) are noted, other writes into them are held against the plan."""

    def __init__(self, targets: set[int]):
        super().__init__()
        self.targets, self.copies, self.strange = targets, [], None

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op._schema.is_mutable and isinstance(args[0], Tensor) and storage(args[0]) in self.targets:
            if op is torch.ops.aten.copy_.default:
                self.copies.append((args[0], args[1]))
            elif op is not torch.ops.aten.fill_.Scalar or not (args[0] == args[1]).all():        # padding stays as it was filled
                self.strange = op.name()
            return args[0]
        return op(*args, **(kwargs or {}))


def storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def trace_copies(model, tensors: list[tuple[str, Tensor]]) -> tuple[list[tuple[Tensor, Tensor]], str | None]:
    """([(slice of a parameter, slice of what was sent), …], None), or why later syncs cannot be copies. What no loader takes, vLLM ignores too."""
    if any(hasattr(module, name) for module in model.modules() for name in ("kv_lora_rank", "W_UK_T", "W_UV")):
        return [], "vLLM makes tensors of the weights after loading that no parameter shows (multi-head latent attention)"
    live, given = ({storage(tensor) for tensor in some if tensor.numel()} for some in ([*model.parameters(), *model.buffers()], [tensor for _, tensor in tensors]))
    with Recorder(live) as seen:
        try:
            model.load_weights(tensors)
        except Exception as error:           # the loaders of a model whose weights were rearranged fail in ways of their own
            return [], f"{type(error).__name__}: {error}"
    if seen.strange or not seen.copies:
        return [], f"a loader {'also runs ' + seen.strange if seen.strange else 'copies nothing'}"
    for target, source in seen.copies:
        if storage(source) not in given:
            return [], f"a loader computes new values of shape {tuple(target.shape)}"
        if not torch.equal(target.cpu(), source.to(target.dtype)):      # on the host, where there is room
            return [], f"the model does not hold a tensor of shape {tuple(source.shape)} as it was sent"
    return [(target.detach(), source.detach()) for target, source in seen.copies], None
