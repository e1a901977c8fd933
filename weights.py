"""What is sent to a server or saved: under which names, in which order, and gathered from all ranks."""
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion

from adapters import base_name, full, merged
from model import Policy, outside_text


@dataclass
class Piece:
    """One parameter or buffer of the checkpoint: `tensor` as it lies here, `layer` if an adapter is merged into it."""

    name: str
    tensor: Tensor
    dtype: torch.dtype
    layer: nn.Module | None = None

    def gather(self) -> Tensor:
        """The whole tensor in `dtype`, cast before it is gathered. A collective."""
        return merged(self.layer, self.dtype) if self.layer is not None else full(self.tensor.detach().to(self.dtype))


def pieces(policy: Policy, dtype: torch.dtype, frozen: bool = False, every_name: bool = False, text: bool = False) -> list[list[Piece]]:
    """What is trained, with `text` the whole text model, or with `frozen` everything, in the model's order, a list for each decoder layer and for what lies between. Tied ones once, or by `every_name`.

    Parameters go in `dtype`, persistent buffers as they are. What shares a decoder layer's block with something trained goes too:
    the server fuses q, k and v into one tensor, gate and up into another, and cannot load part of one.
    """
    lm = policy.lm
    adapted = {layer.get_base_layer().weight: layer for layer in lm.modules() if hasattr(layer, "lora_A")}
    moving = {p for p in lm.parameters() if p.requires_grad} | adapted.keys() | (set(lm.parameters()) - outside_text(lm) if text else set())
    blocks = {block_of(base_name(name)) for name, p in lm.named_parameters() if p in moving and base_name(name)} - {None}
    persistent, wanted = lm.state_dict().keys(), set((lm if frozen else lm.get_decoder()).buffers())
    found, before = [], None
    for name, tensor in [*lm.named_parameters(remove_duplicate=not every_name), *lm.named_buffers()]:
        sent, parameter = base_name(name), isinstance(tensor, nn.Parameter)
        if sent and (frozen or tensor in moving or block_of(sent) in blocks if parameter else name in persistent and tensor in wanted):
            layer = re.search(r"^.*?\.layers\.\d+\.|$", sent)[0]
            if layer != before:
                found.append([])
            before = layer
            found[-1].append(Piece(sent, tensor, dtype if parameter else tensor.dtype, adapted.get(tensor) if parameter else None))
    return found


def block_of(name: str) -> str | None:
    """`…layers.3.self_attn` of `…layers.3.self_attn.q_proj.weight`; None outside the decoder layers."""
    return name.rsplit(".", 2)[0] if re.search(r"\.layers\.\d+\.\w+\.", name) else None


def announced(lm: nn.Module, units: list[list[Piece]]) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
    """Name, dtype and shape of everything `gathered` will give, in its order, without a collective."""
    converted = (revert_weight_conversion(lm, {piece.name: torch.empty(piece.tensor.shape, dtype=piece.dtype, device="meta") for piece in unit}) for unit in units)
    return [(name, tensor.dtype, tuple(tensor.shape)) for unit in converted for name, tensor in unit.items()]


def gathered(lm: nn.Module, units: list[list[Piece]]) -> Iterator[dict[str, Tensor]]:
    """For each unit, on rank 0 its full tensors under the checkpoint's names, else nothing. Each step is a collective, in the same order on every rank."""
    for unit in units:
        tensors = {}
        for piece in unit:
            tensor = piece.gather()
            if dist.get_rank() == 0:
                tensors[piece.name] = tensor
        yield revert_weight_conversion(lm, tensors) if tensors else tensors          # transformers fuses experts in memory


@torch.no_grad()
def gathered_weights(policy: Policy, dtype: torch.dtype, frozen: bool = False, every_name: bool = False, text: bool = False, copy: bool = False) -> dict[str, Tensor]:
    """On rank 0 the full CPU tensors of `pieces`; else empty. A collective.

    The trainer's own weights keep their dtype and values, and nothing stays on the device; with `copy` no memory is theirs, on a CPU either.
    """
    weights, units = {}, pieces(policy, dtype, frozen, every_name, text)
    for unit in gathered(policy.lm, units):
        weights |= {name: tensor.to("cpu", copy=copy or every_name) for name, tensor in unit.items()}        # a file has no tied tensors
    sent = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in weights.items()]
    assert not weights or sent == announced(policy.lm, units), "what is sent is not what was announced"
    return weights


def write_weights(weights: dict[str, Tensor], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / "model.safetensors", metadata=dict(format="pt"))
