"""Attention over a packed trie: query i sees key j exactly when j <= i < end[j].

Registered with transformers under the name "tree", so the model's own code calls it in every layer. The row's structure travels as
the keyword `tree`, made once a row and shared by the layers. The backends compute the same function:

    "hub"    FlashAttention kernels of the Hugging Face Hub, one call over all segments; each segment's keys and values are its
             path from the root, gathered. Restores the causal varlen form that every such kernel has.
    "flex"   torch's FlexAttention with the mask above, nothing gathered.
    "triton" this project's own kernels (tree_kernel.py), nothing gathered.
    "sdpa"   a dense mask: the reference, and the CPU path.
"""
from functools import cache, cached_property

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from arrays import on_device
from deltanet import Segments

NAME = "tree"
TILE = 128          # FlexAttention's sparse block, in tokens
MULTIPLE = TILE     # of tokens that rows are padded to on a GPU: FlexAttention's backward reads log-sums beyond a row that ends inside a tile
HOPPER_128 = dict(fwd_BLOCK_M=64, fwd_BLOCK_N=64, fwd_num_warps=4, fwd_num_stages=3, bwd_BLOCK_M1=64, bwd_BLOCK_N1=64, bwd_BLOCK_M2=64,
                  bwd_BLOCK_N2=64, bwd_num_warps=4, bwd_num_stages=2)     # forward on a trie's ragged mask 11 % faster than torch's own choice; the backward was chosen with wrong lists of tiles (LOG.md)


class Tree:
    """Who sees whom in one packed row of N tokens and S segments, in the form each backend wants, made when first asked for.

    end, position_ids (N,) int64 on the device; segment_start, segment_parent (S,) on the host, as in packing.Row. Sliding windows
    count positions (depth in the trie), not row indices.
    """

    def __init__(self, end: Tensor, position_ids: Tensor, segment_start: np.ndarray, segment_parent: np.ndarray):
        self.end, self.position_ids, self.segment_start, self.segment_parent, self.device = end, position_ids, segment_start, segment_parent, end.device
        device = end.device
        self.backend, self.masks, self.segments = "sdpa", {}, None
        self.hopper = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9

    def prepare(self, backend: str, windows: set[int | None], recurrent: bool = False) -> "Tree":
        """What the layers of a forward need, made before they run: a compiled layer would trace its making. Returns itself."""
        make = dict(sdpa=self._dense_mask, flex=self._block_mask, triton=self._tile_lists, hub=lambda window: None)[backend]
        if backend != self.backend:
            self.backend, self.masks = backend, {}
        for window in windows - self.masks.keys():
            self.masks[window] = make(window)
        if recurrent:
            self.segments = self.segments or Segments(self.segment_start, self.segment_parent, len(self.end), self.device)
        return self

    def _dense_mask(self, window: int | None) -> Tensor:
        index = torch.arange(len(self.end), device=self.device)
        return _mask_mod(self.end, self.position_ids, window)(0, 0, index[:, None], index[None, :])[None, None]    # (1, 1, N, N)

    def _tiles(self, size: int, window: int | None) -> tuple[Tensor, Tensor]:
        """(T, T) bool, query tile by key tile: any pair visible (or more), all pairs visible. From each tile's extremes alone."""
        n = len(self.end)
        tail = -n % size
        ends = torch.cat([self.end, torch.arange(n, n + tail, device=self.device)]).view(-1, size)                # (T, size)
        depth = F.pad(self.position_ids, (0, tail)).view(-1, size)
        tile = torch.arange(len(ends), device=self.device)
        before = tile[:, None] > tile[None, :]
        some = (before & (ends.amax(1)[None, :] > tile[:, None] * size)) | (tile[:, None] == tile[None, :])
        full = before & (ends.amin(1)[None, :] >= (tile[:, None] + 1) * size)
        if window is not None:
            some &= depth.amin(1)[:, None] - depth.amax(1)[None, :] < window
            full &= depth.amax(1)[:, None] - depth.amin(1)[None, :] < window
        return some, full

    def _block_mask(self, window: int | None) -> BlockMask:
        assert self.device.type != "cuda" or len(self.end) % MULTIPLE == 0, f"a row of {len(self.end)} tokens ends inside a tile"
        some, full = self._tiles(TILE, window)
        lists = [part for mask in (some & ~full, full, (some & ~full).T, full.T) for part in _block_lists(mask)]
        return BlockMask((len(self.end),) * 2, *lists, (TILE, TILE), _mask_mod(self.end, self.position_ids, window))

    def _tile_lists(self, window: int | None):
        from tree_kernel import BLOCK, tile_lists
        return tile_lists(*self._tiles(BLOCK, window), self.end, self.position_ids)

    @cached_property
    def paths(self) -> "Paths":
        return Paths(self.segment_start, self.segment_parent, len(self.end), self.device)


def _mask_mod(end: Tensor, position_ids: Tensor, window: int | None):
    def sees(batch, head, i, j):
        return (j <= i) & (i < end[j])

    def sees_near(batch, head, i, j):
        return (j <= i) & (i < end[j]) & (position_ids[i] - position_ids[j] < window)
    return sees if window is None else sees_near


def _block_lists(mask: Tensor) -> tuple[Tensor, Tensor]:
    """(T, T) bool -> how many columns of each row are set, (1, 1, T), and these columns first, (1, 1, T, T); int32, each row contiguous, as FlexAttention's kernels read it."""
    columns = torch.argsort(mask.to(torch.int8), dim=-1, descending=True, stable=True)                            # laid out as its input: a transposed mask's is transposed
    return mask.sum(-1, dtype=torch.int32)[None, None], columns.to(torch.int32, memory_format=torch.contiguous_format)[None, None]


class Paths:
    """Each segment's path from the root, its own tokens included, end to end: what the hub's kernels take as keys and values."""

    def __init__(self, segment_start: np.ndarray, segment_parent: np.ndarray, num_tokens: int, device: torch.device):
        stops = np.append(segment_start[1:], num_tokens)
        paths: list[np.ndarray] = []
        for start, stop, parent in zip(segment_start, stops, segment_parent):
            own = np.arange(start, stop)
            paths.append(own if parent < 0 else np.concatenate([paths[parent], own]))
        queries, keys = stops - segment_start, np.array([len(path) for path in paths])
        bounds = [np.append(0, x.cumsum()).astype(np.int32) for x in (queries, keys)]
        self.index, self.cu_queries, self.cu_keys = on_device([np.concatenate(paths), *bounds], device)          # (P,) row indices, (S + 1,), (S + 1,)
        self.max_queries, self.max_keys = int(queries.max()), int(keys.max())


class _Gather(torch.autograd.Function):
    """x (N, …) -> x[index]; a token's gradient is summed over its descendants in fp32, since bf16 would lose the small ones."""

    @staticmethod
    def forward(ctx, x: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.shape = x.shape
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx, grad: Tensor):
        index, = ctx.saved_tensors
        total = grad.new_zeros(ctx.shape, dtype=torch.promote_types(grad.dtype, torch.float32))
        return total.index_add_(0, index, grad.to(total.dtype)).to(grad.dtype), None


@torch.compiler.disable
def _hub_attention(query: Tensor, key: Tensor, value: Tensor, tree: Tree, scaling: float | None, window: int | None, softcap: float | None) -> Tensor:
    """query (1, H, N, D), key and value (1, G, N, D) -> (1, N, H, D)."""
    paths = tree.paths
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))                                       # (N, heads, D)
    out = hub_kernel(query.device).flash_attn_varlen_func(
        query, _Gather.apply(key, paths.index), _Gather.apply(value, paths.index), paths.cu_queries, paths.cu_keys,
        paths.max_queries, paths.max_keys, softmax_scale=scaling, causal=True, **({} if window is None else dict(window_size=(window - 1, 0))),
        **({} if softcap is None else dict(softcap=softcap)), **(dict(deterministic=True) if torch.are_deterministic_algorithms_enabled() else {}))     # else with atomics
    return (out[0] if isinstance(out, tuple) else out)[None]


@cache
def _compiled_flex():
    """Made when first asked for: it loads the compiler, a second of the start of every process that never needs it."""
    return torch.compile(flex_attention, dynamic=True)


def tree_attention(module, query: Tensor, key: Tensor, value: Tensor, attention_mask=None, *, tree: Tree,
                   scaling: float | None = None, sliding_window: int | None = None, softcap: float | None = None, **kwargs):
    """transformers' attention signature. query (1, H, N, D), key and value (1, G, N, D) -> (1, N, H, D)."""
    if kwargs.get("s_aux") is not None:
        raise ValueError(f"{type(module).__name__} has attention sinks, which are not supported.")
    if tree.backend == "hub":
        return _hub_attention(query, key, value, tree, scaling, sliding_window, softcap), None
    mask = tree.masks[sliding_window]
    if tree.backend == "triton":
        return torch.ops.tree.attention(query, key, value, *mask, scaling or query.shape[-1] ** -0.5, sliding_window or 0, softcap or 0.0)[0], None
    if tree.backend == "flex":
        cap = None if softcap is None else lambda score, b, h, i, j: softcap * torch.tanh(score / softcap)
        flex = _compiled_flex() if query.is_cuda and not torch.compiler.is_compiling() else flex_attention
        tuned = HOPPER_128 if tree.hopper and query.shape[-1] == 128 and query.dtype == torch.bfloat16 else None
        out = flex(query, key, value, score_mod=cap, block_mask=mask, scale=scaling, enable_gqa=True, kernel_options=tuned)
    elif softcap is None:
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling, enable_gqa=True)
    else:
        out = _softcapped(query, key, value, mask, scaling, softcap)
    return out.transpose(1, 2), None


def _softcapped(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float | None, softcap: float) -> Tensor:
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))       # (1, H, N, D)
    scores = query @ key.transpose(-1, -2) * (scaling or query.shape[-1] ** -0.5)   # (1, H, N, N)
    scores = (softcap * torch.tanh(scores / softcap)).masked_fill(~mask, -torch.inf)
    return scores.softmax(-1, dtype=torch.float32).to(value.dtype) @ value


def gradient_error(backend: str, heads: int, groups: int, width: int, value_width: int, window: int | None, softcap: float | None, device: torch.device,
                   dtype: torch.dtype) -> float:
    """The largest relative difference of output and gradients from those of a dense mask in fp64, over a trie of several tiles, 280 tokens deep."""
    lengths = torch.tensor([150, 130, 120, 112])                                              # a prompt and its three branches
    end, start = torch.tensor([4 * TILE, 280, 400, 4 * TILE]).repeat_interleave(lengths), torch.tensor([0, 0, 130, 250]).repeat_interleave(lengths)
    tree = Tree(end.to(device), (torch.arange(4 * TILE) - start).to(device), np.array([0, 150, 280, 400]), np.array([-1, 0, 0, 0]))
    generator = torch.Generator(device).manual_seed(0)
    inputs = [torch.randn(1, 4 * TILE, n, size, device=device, generator=generator).to(dtype)
              for n, size in ((heads, width), (groups, width), (groups, value_width), (heads, value_width))]

    def results(name, kind):
        leaves = [x.to(kind).detach().requires_grad_() for x in inputs[:3]]
        out = tree_attention(None, *(x.transpose(1, 2) for x in leaves), tree=tree.prepare(name, {window}), sliding_window=window, softcap=softcap)[0]
        return [out.detach(), *torch.autograd.grad(out, leaves, inputs[3].to(kind))]
    return max(((ours - right).norm() / right.norm()).item() for ours, right in zip(results(backend, dtype), results("sdpa", torch.float64)))


def hub_repository(device: torch.device) -> tuple[str, int | None]:
    """The kernel for this device and its version on the Hub."""
    if torch.version.hip:
        return "kernels-community/aiter-flash-attn", 2
    blackwell = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 10
    return ("kernels-community/flash-attn4", None) if blackwell else ("kernels-community/flash-attn3", 1)


_hub_kernels = {}


def hub_kernel(device: torch.device):
    """The loaded kernel module, fetched once a process."""
    repository, version = hub_repository(device)
    if repository not in _hub_kernels:
        from kernels import get_kernel
        _hub_kernels[repository] = get_kernel(repository, **({} if version is None else dict(version=version)))
    return _hub_kernels[repository]


def choose_backend(name: str, device: torch.device, dtype: torch.dtype = torch.bfloat16, softcap: float | None = None, shapes=((16, 8, 128, 128),)) -> str:
    """`auto` resolved: hub where its kernel loads, else triton where it fits the GPU and the model's attentions (`shapes`, as model.attention_shapes
    gives them), else flex, and sdpa on a CPU. ValueError where a backend cannot serve the model."""
    if device.type == "cpu":
        if name not in ("auto", "sdpa"):
            raise ValueError(f"attention_backend='{name}' " + ("has no backward on a CPU" if name == "flex" else "needs a GPU") + ": use 'sdpa'.")
        return "sdpa"
    if name not in ("auto", "hub"):
        return name
    lacking, other = _hub_lacking(device, dtype, softcap), "triton" if _fits_triton(device, dtype, shapes) else "flex"
    if name == "hub" and lacking:
        raise ValueError(f"{lacking}: use attention_backend='{other}'.")
    return other if lacking else "hub"


def _fits_triton(device: torch.device, dtype: torch.dtype, shapes) -> bool:
    """Whether tree_kernel's tiles fit into the GPU's shared memory: 145 KB are the most that rows of up to 512 bytes need."""
    room = not torch.version.hip and torch.cuda.get_device_properties(device).shared_memory_per_block_optin >= 145 << 10
    return bool(room and shapes) and all(width == value_width and width * dtype.itemsize <= 512 for _, _, width, value_width in shapes)


def _hub_lacking(device: torch.device, dtype: torch.dtype, softcap: float | None) -> str | None:
    """What keeps the hub's kernel from serving a model."""
    repository = hub_repository(device)[0]
    if dtype not in (torch.bfloat16, torch.float16):
        return f"{repository} computes in 16 bits, not in {str(dtype).removeprefix('torch.')}"
    if softcap is not None and repository != "kernels-community/flash-attn3":
        return f"{repository} cannot cap attention logits, as this model does"
    try:
        hub_kernel(device)
    except Exception as error:                       # whatever keeps a kernel from loading: no network, no build for this torch, no package
        return f"the kernel {repository} cannot be loaded ({str(error).splitlines()[0] if str(error) else repr(error)})"
    return None


def register() -> None:
    """Make `attn_implementation="tree"` known to transformers, with no mask of its own."""
    AttentionInterface.register(NAME, tree_attention)
    AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)
