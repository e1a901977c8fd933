"""Attention over a packed trie as Triton kernels, forward and backward: query i sees key j exactly when j <= i < end[j].

Queries and keys are cut into tiles of BLOCK tokens. For each query tile a list names the key tiles it sees, the wholly visible ones
first; these run without a mask. A second list serves the keys' gradient. Lists are data, so a new row compiles nothing. Query heads
that share keys are stacked in one program: its matrix products are taller, and the keys are read once.
Source: FlashAttention-2 (arXiv 2307.08691) for the algorithm, FlexAttention for the block lists.
"""
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 64                       # a trie's branches are short: larger tiles compute more that no query sees
LOG2E = tl.constexpr(1.4426950408889634)
ROW = dict(do_not_specialize=["TILES"], do_not_specialize_on_alignment=["INDEX", "COUNTS", "ORDER"])    # another row compiles nothing
# Two programs of the forward share a multiprocessor, one's products running beside the other's softmax: 0.23 instead of 0.27 ms (LOG.md). AMD's compiler has no such limit.
KERNELS = dict(forward=dict(num_warps=8, num_stages=2, **({} if torch.version.hip else dict(maxnreg=128))), queries=dict(num_warps=8, num_stages=3), keys=dict(num_warps=4, num_stages=2))


class Tiles(NamedTuple):
    """Which tiles meet: [0] from the queries' side, [1] from the keys'; T tiles. All int32 on the device."""

    index: Tensor                # (2, T, T) the tiles that a tile meets: wholly visible first, then partly
    counts: Tensor               # (2, 2, T) how many of them are wholly visible; how many there are
    order: Tensor                # (2, T) longest list first, so that no long one is left for the end
    end: Tensor                  # (N,)
    position_ids: Tensor         # (N,)


def tile_lists(some: Tensor, full: Tensor, end: Tensor, position_ids: Tensor) -> Tiles:
    """some, full (T, T) bool, query tile by key tile: any pair visible, all pairs visible."""
    state = torch.stack([2 - some.to(torch.int8) - full.to(torch.int8)] * 2)              # 0 full, 1 partial, 2 none
    state[1] = state[0].T.clone()
    counts = torch.stack([(state == 0).sum(-1), (state < 2).sum(-1)], dim=1)
    return Tiles(torch.argsort(state, dim=-1, stable=True).int(), counts.int(), torch.argsort(counts[:, 1], dim=-1, descending=True).int(),
                 end.int(), position_ids.int())


@triton.jit
def _visible(i, j, END, POSITION, N, WINDOW: tl.constexpr):
    seen = (j <= i) & (i < tl.load(END + j, mask=j < N, other=0))
    if WINDOW > 0:
        seen = seen & (tl.load(POSITION + i, mask=i < N, other=0) - tl.load(POSITION + j, mask=j < N, other=0) < WINDOW)
    return seen


@triton.jit
def _logits(product, scale, softcap, CAPPED: tl.constexpr):
    """Attention logits in a unit, and this unit in base 2: a sum follows, and with it the product is one instruction."""
    if CAPPED:
        return 2 * tl.sigmoid(2 * product * scale / softcap) - 1, softcap * LOG2E         # softcap·tanh(x / softcap)
    return product, scale * LOG2E


@triton.jit
def _load(X, head, token, first, i, d, N, D: tl.constexpr, WIDTH: tl.constexpr):
    """Rows first + i of a (heads, N, D) tensor whose heads and tokens lie `head` and `token` elements apart; beyond N its last row."""
    where = X + head + first.to(tl.int64) * token + (tl.minimum(i, N - 1 - first)[:, None] * token + d[None, :])
    if D == WIDTH:
        return tl.load(where)
    return tl.load(where, mask=(d < D)[None, :], other=0.0)


@triton.jit
def _attend(total, top, mass, q, K, V, k_at, k_token, v_at, v_token, i, tile, END, POSITION, N, scale, softcap, D: tl.constexpr, WIDTH: tl.constexpr,
            BLOCK: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr):
    """Fold one key tile into the running softmax."""
    j = tile * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, WIDTH)
    k = _load(K, k_at, k_token, tile * BLOCK, tl.arange(0, BLOCK), d, N, D, WIDTH)
    s, unit = _logits(tl.dot(q, tl.trans(k), input_precision=PRECISION), scale, softcap, CAPPED)
    if MASKED:
        s = tl.where(_visible(i[:, None], j[None, :], END, POSITION, N, WINDOW), s, float("-inf"))
    higher = tl.maximum(top, tl.max(s, 1) * unit)
    p = tl.exp2(s * unit - higher[:, None])
    shrink = tl.exp2(top - higher)
    v = _load(V, v_at, v_token, tile * BLOCK, tl.arange(0, BLOCK), d, N, D, WIDTH)
    total = tl.dot(p.to(v.dtype), v, total * shrink[:, None], input_precision=PRECISION)
    return total, higher, mass * shrink + tl.sum(p, 1)


@triton.jit(**ROW)
def _forward(Q, K, V, OUT, LSE, INDEX, COUNTS, ORDER, END, POSITION, N, TILES, q_head, q_token, k_head, k_token, v_head, v_token, o_head, o_token,
             scale, softcap, SHARED: tl.constexpr, STACK: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
             WINDOW: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr):
    tile, head = tl.load(ORDER + tl.program_id(0)), tl.program_id(1) * STACK
    rows, d = tl.arange(0, STACK * BLOCK), tl.arange(0, WIDTH)
    heads, i = head + rows // BLOCK, tile * BLOCK + rows % BLOCK
    q = _load(Q, heads[:, None] * q_head, q_token, tile * BLOCK, rows % BLOCK, d, N, D, WIDTH)
    k_at, v_at = head // SHARED * k_head, head // SHARED * v_head
    total = tl.zeros([STACK * BLOCK, WIDTH], tl.float32)
    top, mass = tl.full([STACK * BLOCK], -1e30, tl.float32), tl.zeros([STACK * BLOCK], tl.float32)        # finite: no inf - inf where nothing is seen
    full, met = tl.load(COUNTS + tile), tl.load(COUNTS + TILES + tile)
    ahead = tl.load(INDEX + tile * TILES)                                                 # an iteration early: the pipeline keeps its stages for K and V
    for MASKED in tl.static_range(2):
        for n in range(full * MASKED, met if MASKED else full):
            now, ahead = ahead, tl.load(INDEX + tile * TILES + n + 1, mask=n + 1 < met)
            total, top, mass = _attend(total, top, mass, q, K, V, k_at, k_token, v_at, v_token, i, now, END, POSITION, N,
                                       scale, softcap, D, WIDTH, BLOCK, WINDOW, CAPPED, PRECISION, MASKED)
    out = total * (1 / mass)[:, None]
    tl.store(OUT + heads[:, None] * o_head + i[:, None].to(tl.int64) * o_token + d[None, :], out.to(OUT.dtype.element_ty),
             mask=(i < N)[:, None] & (d < D)[None, :])
    tl.store(LSE + heads * N + i, top + tl.log2(mass), mask=i < N)


@triton.jit
def _slope(p, dp, delta, s, CAPPED: tl.constexpr):
    """Gradient of the uncapped logit from that of the weight: p·(dp − delta), through the cap."""
    ds = p * (dp - delta)
    if CAPPED:
        ds = ds * (1 - s * s)
    return ds


@triton.jit
def _query_part(dq, q, do, lse, delta, K, V, k_at, k_token, v_at, v_token, i, tile, END, POSITION, N, scale, softcap, D: tl.constexpr, WIDTH: tl.constexpr,
                BLOCK: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr):
    j = tile * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, WIDTH)
    k = _load(K, k_at, k_token, tile * BLOCK, tl.arange(0, BLOCK), d, N, D, WIDTH)
    v = _load(V, v_at, v_token, tile * BLOCK, tl.arange(0, BLOCK), d, N, D, WIDTH)
    product = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    s, unit = _logits(product, scale, softcap, CAPPED)
    p = tl.exp2(s * unit - lse[:, None])
    if MASKED:
        p = tl.where(_visible(i[:, None], j[None, :], END, POSITION, N, WINDOW), p, 0.0)
    dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
    ds = _slope(p, dp, delta[:, None], s, CAPPED)
    return tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)


@triton.jit(**ROW)
def _backward_queries(Q, K, V, OUT, DO, LSE, DELTA, DQ, INDEX, COUNTS, ORDER, END, POSITION, N, TILES, q_head, q_token, k_head, k_token, v_head, v_token,
                      o_head, o_token, scale, softcap, SHARED: tl.constexpr, STACK: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
                      BLOCK: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr):
    tile, head = tl.load(ORDER + tl.program_id(0)), tl.program_id(1) * STACK
    rows, d = tl.arange(0, STACK * BLOCK), tl.arange(0, WIDTH)
    heads, i = head + rows // BLOCK, tile * BLOCK + rows % BLOCK
    q = _load(Q, heads[:, None] * q_head, q_token, tile * BLOCK, rows % BLOCK, d, N, D, WIDTH)
    do = _load(DO, heads[:, None] * o_head, o_token, tile * BLOCK, rows % BLOCK, d, N, D, WIDTH)
    out = _load(OUT, heads[:, None] * o_head, o_token, tile * BLOCK, rows % BLOCK, d, N, D, WIDTH)
    delta = tl.sum(do.to(tl.float32) * out.to(tl.float32), 1)
    tl.store(DELTA + heads * N + i, delta, mask=i < N)
    lse = tl.load(LSE + heads * N + i, mask=i < N, other=float("inf"))
    k_at, v_at = head // SHARED * k_head, head // SHARED * v_head
    dq = tl.zeros([STACK * BLOCK, WIDTH], tl.float32)
    full, met = tl.load(COUNTS + tile), tl.load(COUNTS + TILES + tile)
    ahead = tl.load(INDEX + tile * TILES)
    for MASKED in tl.static_range(2):
        for n in range(full * MASKED, met if MASKED else full):
            now, ahead = ahead, tl.load(INDEX + tile * TILES + n + 1, mask=n + 1 < met)
            dq = _query_part(dq, q, do, lse, delta, K, V, k_at, k_token, v_at, v_token, i, now, END, POSITION, N,
                             scale, softcap, D, WIDTH, BLOCK, WINDOW, CAPPED, PRECISION, MASKED)
    tl.store(DQ + heads[:, None] * o_head + i[:, None].to(tl.int64) * o_token + d[None, :], (dq * scale).to(DQ.dtype.element_ty),
             mask=(i < N)[:, None] & (d < D)[None, :])


@triton.jit
def _key_part(dk, dv, k, v, Q, DO, LSE, DELTA, head, q_head, q_token, o_head, o_token, j, tile, END, POSITION, N, scale, softcap, D: tl.constexpr,
              WIDTH: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr):
    i = tile * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, WIDTH)
    q = _load(Q, head * q_head, q_token, tile * BLOCK, tl.arange(0, BLOCK), d, N, D, WIDTH)
    do = _load(DO, head * o_head, o_token, tile * BLOCK, tl.arange(0, BLOCK), d, N, D, WIDTH)
    lse = tl.load(LSE + head * N + i, mask=i < N, other=float("inf"))                     # beyond the row: weight 0
    delta = tl.load(DELTA + head * N + i, mask=i < N, other=0.0)
    product = tl.dot(k, tl.trans(q), input_precision=PRECISION)                           # (keys, queries)
    dp = tl.dot(v, tl.trans(do), input_precision=PRECISION)                               # runs while p is computed
    s, unit = _logits(product, scale, softcap, CAPPED)
    p = tl.exp2(s * unit - lse[None, :])
    if MASKED:
        p = tl.where(_visible(i[None, :], j[:, None], END, POSITION, N, WINDOW), p, 0.0)
    dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)
    ds = _slope(p, dp, delta[None, :], s, CAPPED)
    return tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION), dv


@triton.jit(**ROW)
def _backward_keys(Q, K, V, DO, LSE, DELTA, DK, DV, INDEX, COUNTS, ORDER, END, POSITION, N, TILES, q_head, q_token, k_head, k_token, v_head, v_token,
                   o_head, o_token, g_head, g_token, scale, softcap, SHARED: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
                   WINDOW: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr):
    tile, group = tl.load(ORDER + tl.program_id(0)), tl.program_id(1)
    j, d = tile * BLOCK + tl.arange(0, BLOCK), tl.arange(0, WIDTH)
    k = _load(K, group * k_head, k_token, tile * BLOCK, tl.arange(0, BLOCK), d, N, D, WIDTH)
    v = _load(V, group * v_head, v_token, tile * BLOCK, tl.arange(0, BLOCK), d, N, D, WIDTH)
    dk, dv = tl.zeros([BLOCK, WIDTH], tl.float32), tl.zeros([BLOCK, WIDTH], tl.float32)
    full, met = tl.load(COUNTS + tile), tl.load(COUNTS + TILES + tile)
    ahead = tl.load(INDEX + tile * TILES)
    for MASKED in tl.static_range(2):
        for n in range(full * MASKED * SHARED, (met if MASKED else full) * SHARED):
            now, ahead = ahead, tl.load(INDEX + tile * TILES + (n + 1) // SHARED, mask=n + 1 < met * SHARED)
            dk, dv = _key_part(dk, dv, k, v, Q, DO, LSE, DELTA, group * SHARED + n % SHARED, q_head, q_token, o_head, o_token, j, now, END, POSITION, N,
                               scale, softcap, D, WIDTH, BLOCK, WINDOW, CAPPED, PRECISION, MASKED)
    where = group * g_head + j[:, None].to(tl.int64) * g_token + d[None, :]
    inside = (j < N)[:, None] & (d < D)[None, :]
    tl.store(DK + where, (dk * scale).to(DK.dtype.element_ty), mask=inside)
    tl.store(DV + where, dv.to(DV.dtype.element_ty), mask=inside)


def _settings(query: Tensor, key: Tensor, value: Tensor, window: int, softcap: float) -> dict:
    assert value.shape == key.shape, "The triton backend needs values as wide as keys: use attention_backend='flex'."
    heads, width = query.shape[1], query.shape[3]
    shared = heads // key.shape[1]                                                        # query heads of a key head
    return dict(SHARED=shared, D=width, WIDTH=triton.next_power_of_2(width), BLOCK=BLOCK, WINDOW=window, CAPPED=softcap > 0,
                PRECISION="ieee" if query.dtype == torch.float32 else "tf32")


def _wide(query: Tensor) -> bool:
    """Rows above 256 bytes: with the usual settings their tiles would not fit into a Hopper's 227 KB of shared memory."""
    return query.shape[3] * query.element_size() > 256


def _launch(kernel: str, query: Tensor) -> dict:
    return dict(num_warps=8, num_stages=2) if _wide(query) else KERNELS[kernel]


def _stack(query: Tensor, key: Tensor) -> int:
    return 2 if query.shape[1] // key.shape[1] % 2 == 0 and not _wide(query) else 1


def _strides(*tensors: Tensor) -> list[int]:
    return [tensor.stride(dim) for tensor in tensors for dim in (1, 2)]


@torch.library.custom_op("tree::attention", mutates_args=())
def attention_op(query: Tensor, key: Tensor, value: Tensor, index: Tensor, counts: Tensor, order: Tensor, end: Tensor, position_ids: Tensor,
                 scale: float, window: int, softcap: float) -> tuple[Tensor, Tensor]:
    """query (1, H, N, D), key and value (1, G, N, D) -> out (1, N, H, D), log-sum-exp in base 2 (H, N). window, softcap: 0 for none."""
    query, key, value = (x if x.stride(3) == 1 else x.contiguous() for x in (query, key, value))
    _, heads, n, width = query.shape
    out = query.new_empty(1, n, heads, width)
    lse = query.new_empty(heads, n, dtype=torch.float32)
    stack = _stack(query, key)
    _forward[(index.shape[1], heads // stack)](
        query, key, value, out, lse, index[0], counts[0], order[0], end, position_ids, n, index.shape[1], *_strides(query, key, value), width, heads * width,
        scale, softcap, STACK=stack, **_settings(query, key, value, window, softcap), **_launch("forward", query))
    return out, lse


@attention_op.register_fake
def _(query, key, value, index, counts, order, end, position_ids, scale, window, softcap):
    _, heads, n, width = query.shape
    return query.new_empty(1, n, heads, width), query.new_empty(heads, n, dtype=torch.float32)


@torch.library.custom_op("tree::attention_backward", mutates_args=())
def _backward_op(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, index: Tensor, counts: Tensor, order: Tensor,
                 end: Tensor, position_ids: Tensor, scale: float, window: int, softcap: float) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = (x if x.stride(3) == 1 else x.contiguous() for x in (query, key, value))
    grad = grad.contiguous()                                                              # like out
    _, heads, n, width = query.shape
    groups, tiles, stack = key.shape[1], index.shape[1], _stack(query, key)
    dq, dk, dv = query.new_empty(1, n, heads, width), key.new_empty(1, n, groups, width), value.new_empty(1, n, groups, width)
    delta, settings, strides = torch.empty_like(lse), _settings(query, key, value, window, softcap), _strides(query, key, value)
    _backward_queries[(tiles, heads // stack)](
        query, key, value, out, grad, lse, delta, dq, index[0], counts[0], order[0], end, position_ids, n, tiles, *strides, width, heads * width,
        scale, softcap, STACK=stack, **settings, **_launch("queries", query))
    _backward_keys[(tiles, groups)](
        query, key, value, grad, lse, delta, dk, dv, index[1], counts[1], order[1], end, position_ids, n, tiles, *strides, width, heads * width,
        width, groups * width, scale, softcap, **settings, **_launch("keys", query))
    return tuple(x.transpose(1, 2) for x in (dq, dk, dv))


@_backward_op.register_fake
def _(grad, query, key, value, out, lse, index, counts, order, end, position_ids, scale, window, softcap):
    return tuple(x.new_empty(1, x.shape[2], x.shape[1], x.shape[3]).transpose(1, 2) for x in (query, key, value))


def _keep_for_backward(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:3], *output, *inputs[3:8])
    ctx.numbers = inputs[8:]


def _backward(ctx, grad, _):
    return *_backward_op(grad, *ctx.saved_tensors, *ctx.numbers), *[None] * 8


attention_op.register_autograd(_backward, setup_context=_keep_for_backward)
