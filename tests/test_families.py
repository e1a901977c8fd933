"""Families of models: in a packed row every trained token's log-prob, and so every gradient, is that of its sample forwarded alone.

The reference is the model's own eager attention over one sample at a time, with its own masks; nothing of it is ours.
"""
from functools import cache

import numpy as np
import pytest
import torch
import transformers
from conftest import alone, make_sample, random_group, tensors_of, tiny_config
from hypothesis import given, settings
from hypothesis import strategies as st

import attention
from config import ConfigError
from model import Policy, attention_shapes, check_packing, load_policy, refuse_unsupported
from packing import pack_row

CPU = torch.device("cpu")
WINDOW = 5
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
# A wide norm epsilon: a sample's first outputs are v·(k·q), and normalising a tiny k·q would amplify its rounding a hundredfold.
RECURRENT = dict(num_hidden_layers=4, rms_norm_eps=1e-2, linear_num_key_heads=2, linear_num_value_heads=4,
                 linear_key_head_dim=8, linear_value_head_dim=8)
LOCAL = dict(sliding_window=WINDOW, query_pre_attn_scalar=5)
FAMILIES = dict(
    llama=("LlamaConfig", "LlamaForCausalLM", {}),
    qwen2=("Qwen2Config", "Qwen2ForCausalLM", {}),
    qwen2_windowed=("Qwen2Config", "Qwen2ForCausalLM", dict(use_sliding_window=True, max_window_layers=1, sliding_window=WINDOW)),
    qwen3=("Qwen3Config", "Qwen3ForCausalLM", dict(head_dim=6)),
    gemma2=("Gemma2Config", "Gemma2ForCausalLM", LOCAL | dict(attn_logit_softcapping=2.0, final_logit_softcapping=3.0)),
    gemma3=("Gemma3TextConfig", "Gemma3ForCausalLM", LOCAL | dict(layer_types=["sliding_attention", "full_attention"])),
    qwen3_moe=("Qwen3MoeConfig", "Qwen3MoeForCausalLM", EXPERTS),
    qwen3_5=("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", RECURRENT),
    qwen3_next=("Qwen3NextConfig", "Qwen3NextForCausalLM", RECURRENT | EXPERTS | dict(shared_expert_intermediate_size=16)))
WINDOWED = ("qwen2_windowed", "gemma2", "gemma3")


def tiny_family(family, **changes):
    """A random model of a family, prepared as load_policy does it. Recurrent layers forget slowly enough for a state to matter."""
    config, lm, own = FAMILIES[family]
    attention.register()
    torch.manual_seed(0)
    config = getattr(transformers, config)(**dict(
        vocab_size=37, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        max_position_embeddings=512, initializer_range=0.2, bos_token_id=0, eos_token_id=0, pad_token_id=None) | own | changes)
    config._attn_implementation = attention.NAME
    lm = getattr(transformers, lm)(config)
    for name, parameter in lm.named_parameters():
        if name.endswith("A_log"):
            parameter.data.uniform_(0.01, 0.4).log_()
    refuse_unsupported(family, lm)
    return lm


@cache
def policy_of(family):
    return Policy(tiny_family(family), 0.8, "sdpa").train()


def gradients(policy, logprobs):
    weights = torch.linspace(-1, 2, len(logprobs), dtype=torch.float64)
    return torch.autograd.grad((logprobs.double() * weights).sum(), list(policy.parameters()))


def separately(policy, samples):
    logprobs = torch.cat([alone(policy, sample, "eager") for sample in samples])
    return logprobs.detach(), gradients(policy, logprobs)


def assert_packed_equals(policy, backend, samples, multiple, wanted, wanted_gradients):
    policy.backend = backend
    logprobs = policy(tensors_of(pack_row(samples, multiple))[0])[0]
    assert (logprobs.double() - wanted).abs().max() < 1e-4
    smallest = 1e-2 * max(b.norm().item() for b in wanted_gradients)      # a gradient that is 0 in exact arithmetic has no relative error
    for (name, _), a, b in zip(policy.named_parameters(), gradients(policy, logprobs), wanted_gradients):
        assert (a - b).norm() <= 1e-4 * b.norm().clamp(min=smallest), name


def tree(prompt, *tails):
    return [make_sample([*prompt, *tail], len(prompt), seed=i) for i, tail in enumerate(tails)]


def shapes():
    """Samples longer than the sliding window, forked before, inside and beyond it."""
    rng = np.random.default_rng(1)
    prompt = rng.integers(1, 37, 9).tolist()
    turn, other = [*range(10, 17)], [*range(20, 24)]
    long = rng.integers(1, 37, 14)
    return dict(
        shared_prompt=random_group(rng, 0, prompt, 4, 8),
        two_levels=tree(prompt, [*turn, 1, 2, 3, 4, 5, 6], [*turn, 1, 7, 8], [*turn, 9], [*other, 1, 2, 3], [*other, 4, 5], [30, 31, 32, 33, 34, 35]),
        one_a_prefix_of_another=[make_sample(long, 2), make_sample(long[:8], 2), make_sample(long[:3], 1), make_sample([*long[:8], 9, 9], 2)],
        identical=[make_sample(long, 5, advantage=a) for a in (1.0, -2.0)] + [make_sample(long, 9)],
        nothing_shared=[make_sample([i, *rng.integers(0, 37, 8)], 2) for i in range(3)],
        common_system_prompt=[s for g in range(3) for s in random_group(rng, g, [*prompt[:7], g, g], 2, 6)])


@cache
def wanted(family, shape):
    return separately(policy_of(family), shapes()[shape])


@pytest.mark.parametrize("backend", ["sdpa", "hub"])
@pytest.mark.parametrize("shape", shapes())
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_logprobs_and_gradients_equal_separate_forwards(family, shape, backend, hub):
    assert_packed_equals(policy_of(family), backend, shapes()[shape], 16 if backend == "hub" else 1, *wanted(family, shape))


SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=12), min_size=1, max_size=5)


@pytest.mark.parametrize("family", FAMILIES)
@settings(deadline=None, max_examples=6)
@given(sequences=SEQUENCES, multiple=st.sampled_from([1, 8]))
def test_random_tries_equal_separate_forwards(family, hub, sequences, multiple):
    samples = [make_sample(ids, 1, seed=i) for i, ids in enumerate(sequences)]
    expected = separately(policy_of(family), samples)
    for backend in ("sdpa", "hub"):
        assert_packed_equals(policy_of(family), backend, samples, multiple, *expected)


@pytest.mark.parametrize("family", WINDOWED)
def test_without_its_window_a_model_gives_other_logprobs(family):
    """So the tests above would see a backend that ignores windows."""
    for shape, samples in shapes().items():
        row = tensors_of(pack_row(samples))[0]
        with torch.no_grad():
            near, far = (Policy(tiny_family(family, **change), 0.8, "sdpa")(row)[0] for change in ({}, dict(sliding_window=512)))
        assert (near - far).abs().max() > 0.05, shape


# Refused at start

SMALL = dict(vocab_size=37, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
             num_local_experts=4, num_experts=4, num_experts_per_tok=2, max_position_embeddings=64, pad_token_id=None, bos_token_id=0, eos_token_id=0)
REFUSED = dict(
    GptOss=({}, "has attention sinks, which are not supported"),
    Jamba=({}, "has layers of kind linear_attention, which a packed tree does not support"),
    FalconH1=(dict(mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8), "has layers of kind hybrid"),
    Lfm2=(dict(layer_types=["conv", "full_attention"]), "has layers of kind conv"),
    MiniMax=({}, "has layers of kind linear_attention"),
    GPT2=({}, "has no `layers` in its decoder"))


def tiny_other(name, **changes):
    attention.register()
    torch.manual_seed(0)
    config = getattr(transformers, name + ("TextConfig" if name == "Gemma4" else "Config"))(**SMALL | changes)
    config._attn_implementation = attention.NAME
    return next(getattr(transformers, name + suffix) for suffix in ("ForCausalLM", "LMHeadModel") if hasattr(transformers, name + suffix))(config)


@pytest.mark.parametrize("name", REFUSED)
def test_an_architecture_that_a_packed_row_would_get_wrong_is_refused_with_the_reason(name):
    changes, sentence = REFUSED[name]
    with pytest.raises(ConfigError, match=f"^{name} {sentence}"):
        refuse_unsupported(name, tiny_other(name, **changes))


def test_a_checkpoint_with_attention_sinks_is_refused_when_it_is_loaded(tmp_path):
    tiny_other("GptOss").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="has attention sinks"):
        load_policy(tiny_config(model=str(tmp_path)), CPU)


def test_attention_sinks_are_refused_by_the_attention_too():
    policy = Policy(tiny_other("GptOss"), 1.0, "sdpa")
    with pytest.raises(ValueError, match="GptOssAttention has attention sinks"):
        policy(tensors_of(pack_row([make_sample([1, 2, 3], 1)]))[0])


def test_recurrent_layers_that_do_not_name_themselves_are_found_by_running_them():
    """RecurrentGemma's config lists no layer kinds. The same check accepts every family above."""
    lm = tiny_other("RecurrentGemma", block_types=["recurrent", "attention"], lru_width=32, attention_window_size=64, w_init_variance_scale=4.0)
    refuse_unsupported("m", lm)
    with pytest.raises(ConfigError, match="recurrent_gemma: .* some layer does not follow the tree"):
        check_packing(Policy(lm, 1.0, "sdpa"), CPU, torch.float32)
    for family in FAMILIES:
        check_packing(policy_of(family), CPU, torch.float32)


def test_a_checkpoint_with_dropout_is_trained_without_it(tmp_path):
    """Two forwards of one row would differ, and neither be the policy that the server samples from."""
    tiny_other("Phi3", resid_pdrop=0.5, embd_pdrop=0.5).save_pretrained(tmp_path)
    policy = load_policy(tiny_config(model=str(tmp_path), gradient_checkpointing=True), CPU)
    row = tensors_of(pack_row(tree([1, 2, 3], [4, 5], [6, 7])))[0]
    assert torch.equal(policy(row)[0], policy(row)[0])
    check_packing(policy, CPU, torch.float32)


def test_the_shapes_of_attention_are_read_off_the_modules_and_nothing_is_asked_of_a_model_without():
    assert all(attention_shapes(tiny_family(family)) == {(4, 2, 6, 6) if family == "qwen3" else (4, 2, 8, 8)} for family in FAMILIES)
    assert attention_shapes(tiny_other("Phi3")) == {(4, 2, 8, 8)}
    deepseek = dict(moe_intermediate_size=16, num_key_value_heads=4, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, q_lora_rank=16, kv_lora_rank=16,
                    qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=8, first_k_dense_replace=1)
    assert attention_shapes(tiny_other("DeepseekV3", **deepseek)) == {(4, 4, 12, 8)}
    gemma = dict(num_hidden_layers=6, head_dim=8, global_head_dim=16, hidden_size_per_layer_input=8, vocab_size_per_layer_input=37)
    assert attention_shapes(tiny_other("Gemma4", **gemma)) == {(4, 2, 8, 8), (4, 2, 16, 16)}
    assert attention_shapes(tiny_other("Mamba")) == set()


def test_the_backend_is_chosen_by_the_models_softcap_its_heads_width_and_the_runs_dtype(tmp_path, monkeypatch):
    """Most hub kernels cannot cap logits, and none computes in fp32."""
    told = []
    monkeypatch.setattr(attention, "choose_backend", lambda *arguments: told.append(arguments) or "sdpa")
    for family in ("gemma2", "qwen3"):
        tiny_family(family).save_pretrained(tmp_path / family)
        load_policy(tiny_config(model=str(tmp_path / family), attention_backend="hub"), CPU)
    assert [arguments[:4] for arguments in told] == [("hub", CPU, torch.float32, 2.0), ("hub", CPU, torch.float32, None)]
    assert [arguments[4] for arguments in told] == [{(4, 2, 8, 8)}, {(4, 2, 6, 6)}]
