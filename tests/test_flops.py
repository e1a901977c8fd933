"""FLOPs from the config are those that torch counts in the model; a utilization is absent where something about it is not known."""
import importlib

import numpy as np
import pytest
import torch
import transformers
from conftest import make_sample, tiny_lm
from test_families import EXPERTS, FAMILIES, RECURRENT
from torch.utils.flop_counter import FlopCounterMode

from flops import PEAKS, Cost, cost_of, peak_flops, step_flops, utilization_of
from packing import pack_row

N = 11
SHARED = dict(shared_expert_intermediate_size=16)
MORE = dict(
    qwen3_moe_mixed=("Qwen3MoeConfig", "Qwen3MoeForCausalLM", EXPERTS | dict(mlp_only_layers=[0])),
    qwen3_5_moe=("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", RECURRENT | EXPERTS | SHARED),
    qwen3_vl=("Qwen3VLTextConfig", "Qwen3VLTextModel", {}), qwen3_vl_moe=("Qwen3VLMoeTextConfig", "Qwen3VLMoeTextModel", EXPERTS))


def tiny(family):
    """Any model of the family, with eager attention over every pair: a head where it has one."""
    config, lm, own = (FAMILIES | MORE)[family]
    config = getattr(transformers, config)(**dict(
        vocab_size=37, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        max_position_embeddings=512, pad_token_id=None) | own)
    config._attn_implementation = config._experts_implementation = "eager"
    module = transformers if hasattr(transformers, lm) else importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    return getattr(module, lm)(config)


def counted(function):
    with FlopCounterMode(display=False) as counter:
        function()
    return {str(op).removeprefix("aten."): n for op, n in counter.get_flop_counts()["Global"].items()}


@pytest.mark.parametrize("family", FAMILIES | MORE)
def test_a_forward_is_what_torch_counts(family):
    """Its convolution and delta rule apart: torch's own reference computes those otherwise than the model is defined."""
    lm = tiny(family)
    cost, config = cost_of(lm.config), lm.config
    ops = counted(lambda: lm(input_ids=torch.arange(N)[None], use_cache=False))
    head = cost.head * N if hasattr(lm, "lm_head") else 0
    recurrent = [kind for kind in getattr(config, "layer_types", None) or () if kind == "linear_attention"]
    if not recurrent:
        assert sum(ops.values()) == 2 * (cost.weights * N + head + sum(cost.pairs.values()) * N * N)
        return
    channels = 2 * config.linear_num_key_heads * config.linear_key_head_dim + config.linear_num_value_heads * config.linear_value_head_dim
    convolutions = len(recurrent) * channels * config.linear_conv_kernel_dim
    assert ops["mm"] == 2 * ((cost.weights - convolutions) * N + head)
    assert cost.state == len(recurrent) * 3 * config.linear_num_value_heads * config.linear_key_head_dim * config.linear_value_head_dim
    assert cost.pairs == {None: 2 * config.num_attention_heads * 8 * (config.num_hidden_layers - len(recurrent))}


def test_the_delta_rule_of_one_token_and_head_is_three_products_with_its_state():
    key, value, state = torch.randn(8, 1), torch.randn(1, 6), torch.randn(8, 6)
    ops = counted(lambda: (key.T @ state, key @ value, key.T @ state))
    assert sum(ops.values()) == 2 * 3 * 8 * 6


def test_forward_and_backward_are_three_forwards():
    lm = tiny("qwen3")
    forward = sum(counted(lambda: lm(input_ids=torch.arange(N)[None], use_cache=False)).values())
    both = sum(counted(lambda: lm(input_ids=torch.arange(N)[None], use_cache=False).logits.sum().backward()).values())
    assert both == 3 * forward


def test_a_packed_row_counts_shared_tokens_once_the_head_at_its_terms_and_each_pair_by_its_window():
    """Prompt 1 2 3 and two replies of two tokens: 8 forwarded, 4 terms, depths 1 2 | 3 4 5 | 3 4 5."""
    row = pack_row([make_sample([1, 2, 3, 4, 5], 3), make_sample([1, 2, 3, 6, 7], 3)], 4)
    cost = Cost(weights=1000, state=70, head=500, pairs={None: 3, 4: 5})
    pairs = 3 * (1 + 2 + 3 + 4 + 5 + 3 + 4 + 5) + 5 * (1 + 2 + 3 + 4 + 4 + 3 + 4 + 4)
    assert step_flops(cost, [row]) == 2 * 3 * (8 * (1000 + 70) + 4 * 500 + pairs)
    assert step_flops(cost, [row, row], trained_share=0.0) == 2 * (2 * (2 * (8 * 1000 + 4 * 500)) + 3 * 2 * (8 * 70 + pairs))


@pytest.mark.parametrize("device,dtype,tf32,peak", [
    ("NVIDIA H200 NVL", "bfloat16", False, 835e12), ("NVIDIA H200", "bfloat16", False, 989e12), ("NVIDIA H100 80GB HBM3", "float16", False, 989e12), ("NVIDIA H100 PCIe", "bfloat16", False, 756e12),
    ("NVIDIA A100-SXM4-80GB", "float32", True, 156e12), ("NVIDIA A100-SXM4-80GB", "float32", False, 19.5e12), ("NVIDIA B200", "bfloat16", True, 2250e12),
    ("NVIDIA H20", "bfloat16", False, 148e12), ("NVIDIA H20", "float32", False, None), ("cpu", "bfloat16", False, None), ("NVIDIA RTX A1000", "bfloat16", False, None)])
def test_peaks_are_those_of_the_device_and_the_precision_or_unknown(device, dtype, tf32, peak):
    assert peak_flops(device, dtype, tf32) == peak


def test_a_utilization_is_the_share_of_all_devices_peaks_and_absent_when_unknown(monkeypatch):
    lm, cpu = tiny_lm(), torch.device("cpu")
    row = pack_row([make_sample(np.arange(9), 3)])
    assert utilization_of(lm, cpu, torch.float32, False, 1)([row]) is None
    monkeypatch.setitem(PEAKS, "cpu", dict(float32=1e9))
    assert utilization_of(lm, cpu, torch.float32, False, 2)([row]) == pytest.approx(100 * step_flops(cost_of(lm.config), [row]) / 2e9)
    lm.requires_grad_(False)
    assert utilization_of(lm, cpu, torch.float32, False, 1)([row]) == pytest.approx(100 * step_flops(cost_of(lm.config), [row], 0.0) / 1e9)
    lm.config.model_type = "unheard_of"
    assert utilization_of(lm, cpu, torch.float32, False, 1)([row]) is None
