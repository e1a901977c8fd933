"""Attention over a packed trie: query i sees key j exactly when j <= i < end[j].

Registered with transformers under the name "tree", so the model's own code calls it in every layer. The mask travels as the
keyword `tree`, a `TreeMask`, made once a forward and shared by the layers. Source: torch's FlexAttention for "flex"; a dense
mask for "sdpa", the reference and the CPU path.
"""
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

NAME = "tree"


class TreeMask:
    """Who sees whom in one packed row, in the form the backend wants; one mask per sliding window, made when first asked for.

    end, position_ids: (N,) int64 on the device. Sliding windows count positions (depth in the trie), not row indices.
    """

    def __init__(self, end: Tensor, position_ids: Tensor, backend: str):
        self.end, self.position_ids, self.backend = end, position_ids, backend
        self.masks = {}

    def _sees(self, i: Tensor, j: Tensor, window: int | None) -> Tensor:
        sees = (j <= i) & (i < self.end[j])
        return sees if window is None else sees & (self.position_ids[i] - self.position_ids[j] < window)

    def get(self, window: int | None):
        """(1, 1, N, N) bool for "sdpa", a BlockMask for "flex"."""
        if window not in self.masks:
            n = len(self.end)
            if self.backend == "sdpa":
                index = torch.arange(n, device=self.end.device)
                self.masks[window] = self._sees(index[:, None], index[None, :], window)[None, None]
            else:
                def mask_mod(batch, head, i, j):
                    return self._sees(i, j, window)
                self.masks[window] = create_block_mask(mask_mod, None, None, n, n, device=self.end.device)
        return self.masks[window]


@cache
def _flex():
    return torch.compile(flex_attention, dynamic=False) if torch.cuda.is_available() else flex_attention


def tree_attention(module, query: Tensor, key: Tensor, value: Tensor, attention_mask=None, *, tree: TreeMask,
                   scaling: float | None = None, sliding_window: int | None = None, softcap: float | None = None, **kwargs):
    """transformers' attention signature. query (1, H, N, D), key and value (1, G, N, D) -> (1, N, H, D)."""
    if kwargs.get("s_aux") is not None:
        raise ValueError(f"{type(module).__name__} has attention sinks, which are not supported.")
    mask = tree.get(sliding_window)
    if tree.backend == "flex":
        cap = None if softcap is None else lambda score, b, h, i, j: softcap * torch.tanh(score / softcap)
        out = _flex()(query, key, value, score_mod=cap, block_mask=mask, scale=scaling, enable_gqa=True)
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


def choose_backend(name: str, device: torch.device) -> str:
    """`auto` resolved: flex on a GPU, sdpa (a dense mask) elsewhere, since FlexAttention has no backward on a CPU."""
    if name == "flex" and device.type == "cpu":
        raise ValueError("attention_backend='flex' has no backward on a CPU: use 'sdpa'.")
    return ("sdpa" if device.type == "cpu" else "flex") if name == "auto" else name


def register() -> None:
    """Make `attn_implementation="tree"` known to transformers, with no mask of its own."""
    AttentionInterface.register(NAME, tree_attention)
    AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)
