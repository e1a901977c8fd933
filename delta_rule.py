"""The gated delta rule of one level of segments in plain torch, chunk by chunk: what runs where flash-linear-attention does not."""
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from arrays import on_device
from loss import fused

CHUNK = 64           # tokens whose influence on each other is solved for at once
SHORT = 16           # the same where many segments are so short that a level would be mostly padding
LONG = 2048          # of one beside them, which takes four times the steps then
MANY = 256           # chunks from which on that costs memory worth a second compilation


@lru_cache(maxsize=64)
def _chunks(lengths: tuple[int, ...], device: torch.device):
    """Segments, the longest first, cut into chunks of L tokens: the first chunk of each, then the second of each that has one, and so on.

    -> segments at each step, which are the first ones; (chunks, L) token at each place (T: padding), a chunk of padding added to a single one, for
    which compiled code would be made anew; place of each token; the segments in this order, and back.
    """
    lengths, total = np.array(lengths), sum(lengths)
    chunks = (-(-lengths // CHUNK)).sum()
    size = SHORT if chunks > MANY and chunks * CHUNK > 4 * total and lengths.max() <= LONG else CHUNK         # L
    order = np.argsort(-lengths, kind="stable")
    counts = [int((lengths > begin).sum()) for begin in range(0, lengths.max(), size)]
    segment = np.concatenate([order[:count] for count in counts])[:, None]         # (chunks, 1)
    offset = np.repeat(np.arange(len(counts)), counts)[:, None] * size + np.arange(size)        # (chunks, L)
    token = np.where(offset < lengths[segment], (np.cumsum(lengths) - lengths)[segment] + offset, total).ravel()
    place = np.argsort(token, kind="stable")[:total]
    if len(token) == size:
        token = np.append(token, np.full(size, total))
    token, *moved = on_device([token, place, order, np.argsort(order)], device)
    return counts, token.view(-1, size), *moved


def _within_chunks(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, token: Tensor) -> tuple[Tensor, ...]:
    """What each chunk gives before it knows the state it starts from: the factors of torch_delta_rule's loop, (chunks · H, L, ...)."""
    wide = torch.promote_types(query.dtype, torch.float32)

    def chunked(x):                                                                 # (T, H, ...) -> (chunks, H, L, ...)
        return F.pad(x.to(wide), (0, 0) * (x.ndim - 1) + (0, 1)).index_select(0, token.flatten()).unflatten(0, token.shape).transpose(1, 2)

    q, k, v, total, beta = chunked(query), chunked(key), chunked(value), chunked(g).cumsum(-1), chunked(beta)[..., None]   # total: G
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q = q * q.shape[-1] ** -0.5
    future = torch.ones(2 * token.shape[1:], dtype=torch.bool, device=q.device).triu(1)
    decay = (total[..., :, None] - total[..., None, :]).masked_fill(future, -torch.inf).exp()   # (chunks, H, L, L)
    solved = torch.linalg.solve_triangular(beta * (k @ k.mT) * decay, beta * torch.cat([v, -k * total.exp()[..., None]], -1),
                                           upper=False, unitriangular=True)
    write, erase = solved.split([v.shape[-1], k.shape[-1]], -1)                     # u = write + erase @ S_0
    parts = (write, erase, q * total.exp()[..., None], (q @ k.mT) * decay, (k * (total[..., -1:] - total).exp()[..., None]).mT,
             total[..., -1].exp()[..., None, None])
    return tuple(part.flatten(0, 1) for part in parts)


class Recurrence(torch.autograd.Function):
    """The states of all chunks, one after the other, and what is read from them, all at once.

    sizes: chunks · heads at each step, those of step t+1 being the first of step t. states (S · H, K, V); write, erase, read, within, keep, left as
    _within_chunks gives them -> out (chunks · H, L, V), final states (S · H, K, V). By hand, since a step is a few small products: autograd's own
    bookkeeping, and the gradients of each step's factors one by one, took the host longer than the GPU.
    """

    @staticmethod
    def forward(ctx, sizes, states, write, erase, read, within, keep, left):
        before, u, last = read.new_empty(len(write), *states.shape[1:]), torch.empty_like(write), states.clone()
        steps = [x.split(sizes) for x in (before, u, write, erase, keep, left)]
        for here, u_t, write_t, erase_t, keep_t, left_t in zip(*steps):              # here (A · H, K, V): of the A segments that go on
            here.copy_(last[:len(here)])
            torch.baddbmm(write_t, erase_t, here, out=u_t)
            torch.baddbmm(left_t * here, keep_t, u_t, out=last[:len(here)])
        ctx.sizes = sizes
        ctx.save_for_backward(before, u, erase, read, within, keep, left)
        return torch.baddbmm(torch.bmm(read, before), within, u), last

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out, d_last):
        before, u, erase, read, within, keep, left = ctx.saved_tensors
        d_here = d_last.clone()                                                      # of the states at a step's end, then at its start
        d_u, d_before, d_after = torch.bmm(within.mT, d_out), torch.bmm(read.mT, d_out), torch.empty_like(before)
        steps = [x.split(ctx.sizes) for x in (d_after, d_u, d_before, erase, keep, left)]
        for d_after_t, d_u_t, d_before_t, erase_t, keep_t, left_t in zip(*(reversed(step) for step in steps)):
            here = d_here[:len(d_u_t)]
            d_after_t.copy_(here)
            d_u_t.baddbmm_(keep_t.mT, here)
            torch.baddbmm(d_before_t.addcmul_(left_t, here), erase_t.mT, d_u_t, out=here)
        return (None, d_here, d_u, torch.bmm(d_u, before.mT), torch.bmm(d_out, before.mT), torch.bmm(d_out, u.mT), torch.bmm(d_after, u.mT),
                torch.mul(d_after, before, out=d_before).sum((1, 2), keepdim=True))


def torch_delta_rule(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, lengths: tuple[int, ...],
                     initial_state: Tensor | None = None, output_final_state: bool = True) -> tuple[Tensor, Tensor | None]:
    """The gated delta rule in chunks of L tokens, in fp32 or wider. query, key (T, H, K), value (T, H, V), g, beta (T, H), segments
    of `lengths` end to end, initial_state (S, H, K, V) -> (T, H, V), final states (S, H, K, V).

    With G the cumulative g of a chunk, S_t = exp(G_t)·S_0 + Σ_{j<=t} exp(G_t - G_j)·k_j u_jᵀ, where u solves the triangular system
    u_t + β_t Σ_{j<t} exp(G_t - G_j) (k_t·k_j) u_j = β_t v_t - β_t exp(G_t)·S_0ᵀ k_t. Padding has β = g = 0 and changes nothing.
    """
    counts, token, place, order, back = _chunks(lengths, query.device)
    tensors = query, key, value, g, beta, token
    parts = fused(_within_chunks, *tensors) if len(query) > 1 else _within_chunks(*tensors)      # of a single token it would be compiled anew
    heads, shape = query.shape[1], (len(lengths), query.shape[1], query.shape[2], value.shape[2])
    sizes = [count * heads for count in counts]
    if sum(sizes) < len(parts[0]):
        parts = [part[:sum(sizes)] for part in parts]
    states = parts[0].new_zeros(shape) if initial_state is None else initial_state.to(parts[0].dtype).index_select(0, order)
    out, states = Recurrence.apply(sizes, states.flatten(0, 1), *parts)
    out = out.unflatten(0, (-1, heads)).transpose(1, 2).flatten(0, 1).index_select(0, place).to(query.dtype)
    return out, states.view(shape).index_select(0, back) if output_final_state else None
