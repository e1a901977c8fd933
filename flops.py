"""Floating-point operations of a training step from the model's config, and the peaks that make a utilization of them.

Counted is what the objective needs, not what was executed: forward and backward of each forwarded token once (a shared prefix once,
nothing that checkpointing recomputes), the head at the loss terms alone, attention at the (query, key) pairs of the tree. A multiply and
its add are two. Left out: norms, activations, rotary embeddings, softmax, the optimizer; they are not matrix products.
"""
import re
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from packing import Row

PLAIN = ("llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "qwen3_vl_text")
EXPERTS = ("qwen3_moe", "qwen3_vl_moe_text", "qwen3_next", "qwen3_5_moe_text")
HYBRID = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")     # Gated DeltaNet layers; the others' attention has an output gate
# Dense FLOP/s of the data sheets, without sparsity; the first name among the words of the device's is taken. Half precisions share one number.
PEAKS = {"B200": dict(half=2250e12, tf32=1120e12), "H200 NVL": dict(half=835e12, tf32=417e12, float32=60e12),
         "H200": dict(half=989e12, tf32=494e12, float32=67e12), "H100 PCIe": dict(half=756e12, tf32=378e12),
         "H100 NVL": dict(half=835e12, tf32=417e12), "H100": dict(half=989e12, tf32=494e12, float32=67e12), "H800": dict(half=989e12),
         "H20": dict(half=148e12), "GH200": dict(half=989e12, tf32=494e12), "GB200": dict(half=2500e12), "A100": dict(half=312e12, tf32=156e12, float32=19.5e12),
         "A800": dict(half=312e12, tf32=156e12, float32=19.5e12), "L40S": dict(half=362e12, tf32=183e12), "MI300X": dict(half=1307e12),
         "MI325X": dict(half=1307e12), "MI250X": dict(half=191.5e12)}      # of one of its two dies, which is one device


@dataclass
class Cost:
    """Multiply-adds of one forward."""

    weights: int = 0                     # a forwarded token: products with weights
    state: int = 0                       # a forwarded token: the delta rule's three products with its state
    head: int = 0                        # a loss term
    pairs: dict[int | None, int] = field(default_factory=dict)      # a (query, key) pair, by the layers' sliding window; None: none


def cost_of(config) -> Cost | None:
    """Of the text model that a transformers config describes; None where its architecture is not among the supported ones."""
    config = config.get_text_config()
    if config.model_type not in (*PLAIN, *EXPERTS, *HYBRID):
        return None
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    cost = Cost(head=config.hidden_size * config.vocab_size)
    for index, kind in enumerate(kinds):
        cost.weights += _mlp(config, index)
        if kind == "linear_attention":
            key, value = config.linear_num_key_heads * config.linear_key_head_dim, config.linear_num_value_heads * config.linear_value_head_dim
            cost.weights += config.hidden_size * (2 * key + 3 * value + 2 * config.linear_num_value_heads) + config.linear_conv_kernel_dim * (2 * key + value)
            cost.state += 3 * value * config.linear_key_head_dim     # what the state holds for the key, what it gets, what it gives the query
            continue
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        queries, keys = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
        cost.weights += config.hidden_size * ((3 if config.model_type in HYBRID else 2) * queries + 2 * keys)
        window = config.sliding_window if kind == "sliding_attention" else None
        cost.pairs[window] = cost.pairs.get(window, 0) + 2 * queries
    return cost


def _mlp(config, index: int) -> int:
    """Weights of layer `index`'s gated MLP that one token meets: its experts, the router and the shared expert, or the dense one."""
    dense = index in (getattr(config, "mlp_only_layers", None) or ()) or (index + 1) % getattr(config, "decoder_sparse_step", 1)
    if config.model_type not in EXPERTS or dense:
        return 3 * config.hidden_size * config.intermediate_size
    shared = getattr(config, "shared_expert_intermediate_size", 0)
    width = config.num_experts_per_tok * config.moe_intermediate_size + shared
    return config.hidden_size * (3 * width + config.num_experts + bool(shared))


def step_flops(cost: Cost, rows: list[Row], trained_share: float = 1.0) -> float:
    """Forward and backward of the rows. A gradient costs two forwards; that of a frozen weight, which needs its inputs' alone, one."""
    tokens, terms = sum(row.num_tokens for row in rows), sum(len(row.targets) for row in rows)
    pairs = sum(a_pair * int(np.minimum(row.position_ids[:row.num_tokens] + 1, window or np.inf).sum())
                for window, a_pair in cost.pairs.items() for row in rows)
    return 2 * ((cost.weights * tokens + cost.head * terms) * (2 + trained_share) + (cost.state * tokens + pairs) * 3)


def peak_flops(device_name: str, dtype: str, tf32: bool = False) -> float | None:
    """Of one device at "bfloat16", "float16" or "float32"; None where it is not known."""
    of_device = next((peaks for name, peaks in PEAKS.items() if re.search(rf"\b{name}\b", device_name)), {})
    return of_device.get("half" if dtype in ("bfloat16", "float16") else "tf32" if tf32 and dtype == "float32" else dtype)


def utilization_of(lm: torch.nn.Module, device: torch.device, dtype: torch.dtype, tf32: bool, world_size: int) -> Callable[[list[Row]], float | None]:
    """A step's rows on all ranks -> percent of the devices' peak, times seconds; None where the peak or the architecture is not known."""
    cost, weights = cost_of(lm.config), list(lm.get_decoder().layers.parameters())
    trained = sum(p.numel() for p in weights if p.requires_grad) / sum(p.numel() for p in weights)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    peak = peak_flops(name, str(dtype).removeprefix("torch."), tf32)
    return lambda rows: 100 * step_flops(cost, rows, trained) / (peak * world_size) if cost and peak else None
