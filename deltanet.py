"""Gated DeltaNet layers over a packed trie: each token follows its own predecessors, and a shared prefix is run once.

Such a layer is recurrent in two ways: a short causal convolution, and the gated delta rule (arXiv 2412.06464), which carries
a state S (K, V) per head along the sample:  S ← exp(g)·S,  then S ← S + β·k (v − Sᵀk)ᵀ,  output Sᵀq.
The trie is cut into *segments*, its chains between forks. A segment starts from its parent's final state, so those of equal
depth, a *level*, run in one call, and autograd sums a shared state's gradient over the branches. The row of packing.py:

    row index   0 1 2 3 4 5 6 7      segment_start   0 2 5      levels              [0 1], then [2 3 4 | 5 6 7]
    input_ids   1 2 3 4 5 3 6 7      segment_parent -1 0 0      read at row index 5  5, 1, 0 and nothing

Inside a layer tokens lie in *level order*, every level one slice; for one group that is the row's own order.
"""
import inspect
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import MethodType
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from packaging.version import Version
from torch import Tensor, nn

from arrays import on_device
from delta_rule import torch_delta_rule

LAYERS = ("Qwen3NextGatedDeltaNet", "Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet")


class Level(NamedTuple):
    """S segments of equal depth, end to end in level order."""

    lengths: tuple[int, ...]             # tokens of each
    parent: Tensor                       # (S,) int64, index in the level above; a root has one past the last
    cu_seqlens: Tensor                   # (S + 1,) int64, bounds within the level
    cu_seqlens_cpu: Tensor               # the same on the host


class Segments:
    """What the layers need to know of a row's segments. Made once a row on the host, then moved to the device in one copy.

    segment_start (S,) int64, ascending row indices; segment_parent (S,) int64, -1 for a root; kernel_size of the convolution.
    """

    def __init__(self, segment_start: np.ndarray, segment_parent: np.ndarray, num_tokens: int, device: torch.device, kernel_size: int = 4):
        assert segment_start[0] == 0 and (segment_parent < np.arange(len(segment_parent))).all(), "Segments are listed depth-first from index 0."
        lengths, depth = np.diff(segment_start, append=num_tokens), _depths(segment_parent)
        groups = [np.flatnonzero(depth == d) for d in range(depth.max() + 1)]           # segments of each level
        by_level = np.concatenate(groups)
        begin = np.empty_like(lengths)                                                  # (S,) first token, in level order
        begin[by_level] = np.cumsum(lengths[by_level]) - lengths[by_level]
        inverse = np.repeat(begin - segment_start, lengths) + np.arange(num_tokens)     # (N,) place in level order
        before = np.arange(-1, num_tokens)                                              # (N + 1,) predecessor in level order; N: none
        before[begin] = np.where(segment_parent < 0, num_tokens, (begin + lengths - 1)[segment_parent])
        before[num_tokens] = num_tokens
        parents = [np.where(segment_parent[group] < 0, len(above), np.searchsorted(above, segment_parent[group]))
                   for above, group in zip([groups[0], *groups], groups)]
        bounds = [np.cumsum(np.append(0, lengths[group])) for group in groups]
        self.in_order = bool((inverse == np.arange(num_tokens)).all())
        self.order, self.inverse, self.heads, self.sources, slots, *rest = on_device(
            [np.argsort(inverse), inverse, *_own_predecessors(before, begin, lengths, kernel_size), *parents, *bounds], device)
        self.slots = slots.view(kernel_size, -1)                                        # (kernel, R)
        self.levels = [Level(tuple(lengths[group].tolist()), parent, cu_seqlens, torch.from_numpy(bound))
                       for group, parent, cu_seqlens, bound in zip(groups, rest, rest[len(groups):], bounds)]


def _depths(parent: np.ndarray) -> np.ndarray:
    """(S,) forks above each segment. A root without children joins the last level: so padding leaves one group's row in order."""
    depth = []
    for p in parent.tolist():
        depth.append(depth[p] + 1 if p >= 0 else 0)
    alone = (parent < 0) & ~np.isin(np.arange(len(parent)), parent)
    return np.where(alone, max(depth), depth)


def _own_predecessors(before: np.ndarray, begin: np.ndarray, lengths: np.ndarray, kernel_size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The tokens with fewer than kernel_size - 1 predecessors in their segment, and where those of theirs lie.

    -> heads (R,), such tokens; sources (U,), the distinct tokens they read; slots (kernel · R,): the k-th predecessor of
    heads[r] is sources[slots[k, r]], or, where the slot is U, comes before the sample's start.
    """
    path = [np.concatenate([np.arange(b, b + min(n, kernel_size - 1)) for b, n in zip(begin.tolist(), lengths.tolist())])]
    for _ in range(kernel_size - 1):
        path.append(before[path[-1]])
    sources, slots = np.unique(np.append(path, len(before) - 1), return_inverse=True)
    return path[0], sources[:-1], slots[:-1]


class Permute(torch.autograd.Function):
    """x[order] along the first axis. The gradient is a gather too, where index_select's would be an atomic scatter."""

    @staticmethod
    def forward(ctx, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad.index_select(0, ctx.saved_tensors[0]), None, None


def tree_conv(x: Tensor, weight: Tensor, heads: Tensor, sources: Tensor, slots: Tensor) -> Tensor:
    """silu of the causal depthwise convolution over each token's own predecessors. x (N, C), weight (C, 1, kernel) -> (N, C).

    All tokens are convolved as if one sequence; the heads of segments are then given what their own predecessors yield.
    """
    wide, last = torch.promote_types(x.dtype, torch.float32), weight.shape[2] - 1
    padded = F.pad(x, (0, 0, last, 0))                                              # (kernel - 1 + N, C)
    # Many branches read the same few tokens: gathered in fp32, so that their gradients are summed in fp32.
    read = F.pad(x.index_select(0, sources).to(wide), (0, 0, 0, 1))                 # (U + 1, C), zeros before a sample's start
    straight = own = 0
    for k, tap in enumerate(weight[:, 0].to(wide).flip(1).unbind(1)):               # tap (C,) weighs the k-th predecessor
        straight = straight + tap * padded[last - k:last - k + len(x)].to(wide)     # (N, C)
        own = own + tap * read.index_select(0, slots[k])                            # (R, C)
    return F.silu(straight).to(x.dtype).index_copy(0, heads, F.silu(own).to(x.dtype))


@cache
def _compiled_conv():
    return torch.compile(tree_conv, dynamic=True)


@torch.compiler.disable          # its shapes change with every row: the one break in the graph of a compiled decoder layer
def tree_mix(layer: nn.Module, qkv: Tensor, g: Tensor, beta: Tensor, segments: Segments) -> Tensor:
    """Convolution and delta rule. qkv (N, C), log decay g and step β (N, H), in level order -> (N, H, V)."""
    conv = _compiled_conv() if qkv.is_cuda else tree_conv
    qkv = conv(qkv, layer.conv1d.weight, segments.heads, segments.sources, segments.slots)
    query, key, value = qkv.split([layer.key_dim, layer.key_dim, layer.value_dim], -1)
    repeats = layer.num_v_heads // layer.num_k_heads
    query, key = (x.unflatten(1, (layer.num_k_heads, -1)).repeat_interleave(repeats, 1) for x in (query, key))   # (N, H, K)
    return tree_delta_rule(query, key, value.unflatten(1, (layer.num_v_heads, -1)), g, beta, segments.levels)


def tree_delta_rule(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, levels: list[Level]) -> Tensor:
    """query, key (N, H, K), value (N, H, V), g, beta (N, H), in level order -> (N, H, V). One call a level."""
    outs, states = [], None                                                         # states (S, H, K, V)
    sizes = [sum(level.lengths) for level in levels]
    for level, *tokens in zip(levels, *(x.split(sizes) for x in (query, key, value, g, beta))):
        if states is not None:
            states = F.pad(states, (0, 0) * 3 + (0, 1)).index_select(0, level.parent)   # a root starts from the zeros
        out, states = level_delta_rule(level, *tokens, initial_state=states, output_final_state=level is not levels[-1])
        outs.append(out)
    return torch.cat(outs)


def level_delta_rule(level: Level, *tokens: Tensor, **options) -> tuple[Tensor, Tensor | None]:
    """The tokens of one level, with flash-linear-attention's kernel where there is one."""
    kernel = fla_kernel(tokens[0])
    if kernel is None:
        return torch_delta_rule(*tokens, level.lengths, **options)
    if "cu_seqlens_cpu" in inspect.signature(kernel).parameters:                    # else it waits for the device to know the bounds
        options["cu_seqlens_cpu"] = level.cu_seqlens_cpu
    out, states = kernel(*(x[None] for x in tokens), use_qk_l2norm_in_kernel=True, cu_seqlens=level.cu_seqlens, **options)
    return out[0], states


@cache
def _fla():
    """None where it is not installed, or where its backward refuses to run: on Hopper with Triton 3.4 to 3.7.0 and no tilelang."""
    if not find_spec("fla"):
        return None
    version = Version(import_module("triton").__version__).release
    if not torch.version.hip and torch.cuda.get_device_capability()[0] == 9 and (3, 4) <= version < (3, 7, 1) and not find_spec("tilelang"):
        print(f"flash-linear-attention cannot run backward with Triton {'.'.join(map(str, version))} on this GPU without tilelang: install tilelang; "
              "until then its layers run through torch, which is slower.", flush=True)
        return None
    return import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule


def fla_kernel(query: Tensor):
    """The kernel if it is installed and made for such a tensor, 16 bits on a GPU, else None."""
    return _fla() if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) else None


def _project(layer: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x (N, C) -> query, key, value end to end (N, D), output gate z (N, H · V), step b and decay a (N, H), as the layer packs them."""
    if hasattr(layer, "in_proj_qkv"):
        return layer.in_proj_qkv(x), layer.in_proj_z(x), layer.in_proj_b(x), layer.in_proj_a(x)
    groups, value_dim = layer.num_k_heads, layer.value_dim // layer.num_k_heads      # Qwen3-Next: key head after key head
    *qkv, z = layer.in_proj_qkvz(x).unflatten(1, (groups, -1)).split([layer.head_k_dim, layer.head_k_dim, value_dim, value_dim], -1)
    b, a = layer.in_proj_ba(x).unflatten(1, (groups, -1)).chunk(2, -1)
    return torch.cat([part.flatten(1) for part in qkv], -1), z.flatten(1), b.flatten(1), a.flatten(1)


def tree_forward(self, hidden_states: Tensor, cache_params=None, attention_mask=None, tree=None, **kwargs) -> Tensor:
    """Stands in for a layer's forward: over a packed row (1, N, C) when the model was given a `tree`, else its own."""
    if tree is None:
        return type(self).forward(self, hidden_states, cache_params=cache_params, attention_mask=attention_mask, **kwargs)
    segments = tree.segments
    x = hidden_states[0]                                                            # (N, C)
    if not segments.in_order:
        x = Permute.apply(x, segments.order, segments.inverse)
    qkv, z, b, a = _project(self, x)
    wide = torch.promote_types(a.dtype, torch.float32)
    g = -self.A_log.to(wide).exp() * F.softplus(a.to(wide) + self.dt_bias)          # (N, H)
    core = tree_mix(self, qkv, g, b.sigmoid(), segments)                            # (N, H, V)
    core = self.norm(core, z.unflatten(1, (self.num_v_heads, self.head_v_dim)))     # widths the compiler knows: after the break all sizes are symbols
    out = self.out_proj(core.flatten(1))                                            # (N, C)
    return (out if segments.in_order else Permute.apply(out, segments.inverse, segments.order))[None]


def layers(lm: nn.Module) -> list[nn.Module]:
    """The Gated DeltaNet modules of a model."""
    return [module for module in lm.modules() if type(module).__name__ in LAYERS]


def install(lm: nn.Module) -> None:
    """Let the Gated DeltaNet layers of `lm` follow a `tree`."""
    for layer in layers(lm):
        assert layer.activation == "silu" and layer.conv1d.bias is None, "The convolution of a Gated DeltaNet has silu and no bias."
        layer.forward = MethodType(tree_forward, layer)
