"""Runs inside the vLLM server (--worker-extension-cls vllm_worker.CopyPlan): weights from a buffer shared with the trainer, without a per-tensor reload.

vLLM's own reload calls Python for every tensor. Here it runs once. Then each of the model's loaders is asked, without letting it
write, which slice of which parameter it would fill from which part of the buffer; if those slices already hold exactly these bytes,
and together they are all that was sent, later syncs are one batched copy. A model whose weights vLLM rearranges after loading
(quantised, packed for a CPU) fails that comparison and is reloaded by vLLM each time.
"""
import base64
import time

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor
from torch.utils._python_dispatch import TorchDispatchMode


class CopyPlan:
    """Mixed into vLLM's worker; every method is called by name through /collective_rpc."""

    def attach_weights(self, buffer: dict, chunks: list) -> dict:
        """Map the trainer's buffer. chunks: for each filling of it a list of [name, dtype, shape, offset in bytes]."""
        self.sync_buffer = open_buffer(buffer, self.device)
        self.sync_chunks = [[(name, view(self.sync_buffer, dtype, shape, offset)) for name, dtype, shape, offset in chunk] for chunk in chunks]
        self.sync_plan, self.sync_reason = [], "the plan is not complete"
        return dict(bytes=self.sync_buffer.numel())

    def load_weights_chunk(self, chunk: int) -> dict:
        """Take the buffer's present content, the chunk of that number, into the model."""
        started = time.perf_counter()
        with torch.inference_mode():
            if self.sync_reason is None:
                torch._foreach_copy_(*self.sync_plan[chunk])
            else:
                self._reload(chunk)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)          # the trainer fills the buffer again after this reply
        return dict(seconds=time.perf_counter() - started, by_plan=self.sync_reason is None)

    def learn_weights_chunk(self, chunk: int) -> dict:
        """After a whole load, with the same chunk in the buffer again: extend the plan, or give it up and say why."""
        model, chunks = self.model_runner.get_model(), self.sync_chunks
        if len(self.sync_plan) == chunk:
            with torch.inference_mode():
                copies, reason = trace_copies(model, chunks[chunk])
            reason = reason or self._packed(model)
            self.sync_plan.append(copies)
            if reason or chunk == len(chunks) - 1:
                self.sync_reason = reason
            if reason:
                self.sync_plan = []
        return dict(reason=self.sync_reason, copies=sum(len(targets) for targets, _ in self.sync_plan))

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
                initialize_layerwise_reload(model)
            model.load_weights([(name, tensor.clone()) for name, tensor in self.sync_chunks[chunk]])     # it keeps some until the end
            if chunk == len(self.sync_chunks) - 1:
                finalize_layerwise_reload(model, self.model_config)


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


def trace_copies(model, tensors: list[tuple[str, Tensor]]) -> tuple[tuple[list[Tensor], list[Tensor]], str | None]:
    """((slices of the model's parameters, slices of the buffer), None), or why later syncs cannot be copies. What no loader takes, vLLM ignores too."""
    live = {storage(tensor) for tensor in [*model.parameters(), *model.buffers()] if tensor.numel()}
    with Recorder(live) as seen:
        try:
            model.load_weights(tensors)
        except Exception as error:           # the loaders of a model whose weights were rearranged fail in ways of their own
            return ([], []), f"{type(error).__name__}: {error}"
    if seen.strange or not seen.copies:
        return ([], []), f"a loader {'also runs ' + seen.strange if seen.strange else 'copies nothing'}"
    for target, source in seen.copies:
        if storage(source) != storage(tensors[0][1]):
            return ([], []), f"a loader computes new values of shape {tuple(target.shape)}"
        if not torch.equal(target, source.to(target.dtype)):
            return ([], []), f"the model does not hold a tensor of shape {tuple(source.shape)} as it was sent"
    return tuple([part.detach() for part in parts] for parts in zip(*seen.copies)), None
