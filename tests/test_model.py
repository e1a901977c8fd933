"""A packed row is a layout change only: every trained token's log-prob is that of its sample forwarded alone."""
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import alone, make_sample, random_group, tensors_of, tiny_config, tiny_lm, tiny_moe

import attention
import deltanet
from config import ConfigError
from loss import Objective, load_balancing_loss
from model import Policy, aux_loss_coef, check_packing, compute_dtype, load_policy, refuse_unsupported
from packing import pack_row


def shapes():
    rng = np.random.default_rng(1)
    prompt = [1, 2, 3, 4, 5, 6]
    two_levels = [make_sample([*prompt, 7, 8, *tail], 6, seed=i) for i, tail in enumerate(([9, 10, 11], [9, 12], [13, 14]))]
    return dict(
        shared_prompt=random_group(rng, 0, prompt, 5, 7), two_levels=[*two_levels, make_sample([*prompt, 20, 21], 6)],
        prefix_of_another=[make_sample([1, 2, 3, 4, 5, 6], 2), make_sample([1, 2, 3, 4], 2), make_sample([1, 2, 3, 9], 2)],
        duplicates=[make_sample([5, 6, 7, 8], 1, advantage=1.0), make_sample([5, 6, 7, 8], 1, advantage=-2.0), make_sample([5, 6, 7, 8], 2)],
        nothing_shared=[make_sample([i, 2, 3, 4, i], 2) for i in range(4)],
        common_system_prompt=[s for g in range(3) for s in random_group(rng, g, [9, 9, 9, g, g], 3, 6)],
        first_token_trained_right_after_one=[make_sample([1, 2], 1), make_sample([3, 4, 5], 1)])


@pytest.mark.parametrize("shape", shapes())
@pytest.mark.parametrize("checkpointing", [False, True])
def test_packed_logprobs_and_gradients_equal_separate_forwards(shape, checkpointing):
    samples = shapes()[shape]
    policy = Policy(tiny_lm(), 0.8, "sdpa").train()
    parameters = list(policy.parameters())
    separate = torch.cat([alone(policy, sample) for sample in samples])
    weights = torch.linspace(-1, 2, len(separate), dtype=torch.float64)
    wanted = torch.autograd.grad((separate * weights).sum(), parameters)
    if checkpointing:
        policy.lm.gradient_checkpointing_enable(dict(use_reentrant=False))
    logprobs = policy(tensors_of(pack_row(samples))[0])[0]
    assert (logprobs.double() - separate).abs().max() < 1e-4
    packed = torch.autograd.grad((logprobs.double() * weights).sum(), parameters)
    for a, b in zip(packed, wanted):
        assert (a - b).norm() <= 1e-4 * b.norm().clamp(min=1e-3)


def test_a_packed_row_of_the_real_model_equals_its_samples_alone(small_model):
    from transformers import AutoTokenizer
    policy = load_policy(tiny_config(model=small_model), torch.device("cpu"))
    tokenizer = AutoTokenizer.from_pretrained(small_model)
    texts = ["2 + 2 = 4.", "2 + 2 = 5.", "2 + 2", "2 + 2 = 4.", "A dog."]
    samples = [make_sample(tokenizer(t).input_ids, 1, vocab=1000) for t in texts]
    with torch.no_grad():
        logprobs = policy(tensors_of(pack_row(samples))[0])[0]
        separate = torch.cat([alone(policy, sample) for sample in samples])
    assert (logprobs.double() - separate).abs().max() < 1e-4


def test_flex_and_dense_masks_agree_in_the_forward():
    """FlexAttention has no backward on a CPU; its forward does run here."""
    samples = shapes()["two_levels"]
    row = tensors_of(pack_row(samples))[0]
    with torch.no_grad():
        dense, flex = (Policy(tiny_lm(), 1.0, backend)(row)[0] for backend in ("sdpa", "flex"))
    assert (dense - flex).abs().max() < 1e-5


def test_top_tokens_and_entropy_come_from_the_position_that_predicts_the_target():
    policy = Policy(tiny_lm(), 1.3, "sdpa")
    sample = make_sample([1, 2, 3, 4, 5], 2, top_k=4)
    _, topk, entropy, _ = policy(tensors_of(pack_row([sample]))[0])
    policy.lm.config._attn_implementation = "sdpa"
    full = (policy.lm(input_ids=torch.tensor(sample.input_ids, dtype=torch.int64)[None]).logits[0, 1:4] / 1.3).log_softmax(-1)
    assert (topk - full.gather(1, torch.tensor(sample.topk_ids, dtype=torch.int64))).abs().max() < 1e-5
    assert (entropy + (full.exp() * full).sum(-1)).abs().max() < 1e-5


def test_a_model_whose_layers_do_not_follow_the_tree_is_refused(monkeypatch):
    """A Qwen3.5 hybrid's recurrent layers as transformers runs them, across sibling branches: found by the check of any model."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
    attention.register()
    config = Qwen3_5TextConfig(vocab_size=37, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
                               linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8, initializer_range=0.5)
    config._attn_implementation = attention.NAME
    lm = Qwen3_5ForCausalLM(config)
    with monkeypatch.context() as patch, pytest.raises(ConfigError, match="some layer does not follow the tree"):
        patch.setattr(deltanet, "install", lambda lm: None)
        check_packing(Policy(lm, 1.0, "sdpa"), torch.device("cpu"), torch.float32)
    for followed in (lm, tiny_lm(), tiny_moe()):
        check_packing(Policy(followed, 1.0, "sdpa"), torch.device("cpu"), torch.float32)
    lm.config.layer_types = ["full_attention", "conv"]
    with pytest.raises(ConfigError, match="layers of kind conv, which a packed tree does not support"):
        refuse_unsupported("m", lm)


@pytest.mark.parametrize("name,value", [("logit_scale", 0.25), ("logits_scaling", 8.0)])
def test_a_model_that_scales_its_logits_is_refused(name, value):
    lm = tiny_lm()
    setattr(lm.config, name, value)
    with pytest.raises(ConfigError, match=name):
        refuse_unsupported("m", lm)


@pytest.mark.parametrize("kind,refused", [("longrope", True), ("dynamic", True), ("linear", False), ("llama3", False)])
def test_rotary_frequencies_that_depend_on_the_longest_sample_of_a_row_are_refused(kind, refused):
    """The log-probs of a short sample once moved by 2.7 beside one beyond the original length."""
    lm = tiny_lm(max_position_embeddings=512)
    for parameters in (dict(rope_type=kind, rope_theta=1e4, factor=4.0), dict(full_attention=dict(rope_type=kind, rope_theta=1e4), sliding_attention=dict(rope_type="default"))):
        lm.config.rope_parameters = parameters
        for longest in (None, 513):
            with pytest.raises(ConfigError, match="longest sample of a row .* set vllm_max_model_length=512 or less") if refused else nullcontext():
                refuse_unsupported("m", lm, longest)
        refuse_unsupported("m", lm, 512)


@pytest.mark.parametrize("rewarded", [0, 255])
def test_in_bf16_the_gradients_of_rollouts_that_share_a_token_are_summed_in_fp32(rewarded):
    """256 that begin alike, one of them rewarded: their advantages sum to 0, and so must their gradients there. In bf16 the small ones vanished beside the large."""
    G = 256
    advantages = np.zeros(G)
    advantages[rewarded] = 1
    advantages = (advantages - advantages.mean()) / advantages.std()
    samples = [make_sample([1, 2, 3, 4, 5], 4, advantage=float(a)) for a in advantages]
    policy, hidden = Policy(tiny_lm().bfloat16(), 1.0, "sdpa"), []
    policy.lm.get_decoder().register_forward_hook(lambda module, args, out: hidden.append(out.last_hidden_state))
    tensors, _ = tensors_of(pack_row(samples))
    assert tensors["term_index"].tolist() == [3] * G
    logprobs = policy(tensors)[0]
    gradient, = torch.autograd.grad((logprobs * tensors["advantages"]).sum(), hidden)
    one, = torch.autograd.grad(policy(tensors)[0][rewarded] * advantages[rewarded], hidden[1:])
    assert gradient[0, 3].float().norm() < 0.01 * one[0, 3].float().norm()


@pytest.mark.parametrize("changes,masters,computed", [
    (dict(bf16=True, model_init_kwargs=dict(dtype="bfloat16")), torch.float32, torch.bfloat16), (dict(bf16=True, dtype="bfloat16"), torch.float32, torch.bfloat16),
    (dict(model_init_kwargs=dict(dtype=torch.bfloat16)), torch.bfloat16, torch.bfloat16), (dict(dtype="auto"), torch.bfloat16, torch.bfloat16),
    (dict(model_init_kwargs=dict(dtype="auto", trust_remote_code=True)), torch.bfloat16, torch.bfloat16),
    (dict(dtype="bfloat16", model_init_kwargs=dict(dtype="float32")), torch.float32, torch.float32)])
def test_mixed_precision_has_fp32_masters_whatever_the_dtype_and_else_the_dtype_is_that_of_the_server_too(small_model, changes, masters, computed):
    config = tiny_config(model=small_model, **changes)
    policy = load_policy(config, torch.device("cpu"))
    assert {p.dtype for p in policy.parameters()} == {masters} and compute_dtype(config, torch.device("cpu")) == computed


def test_a_checkpoint_in_float16_is_not_trained_in_it_without_a_scaler(small_model, tmp_path):
    (tmp_path / "config.json").write_text((Path(small_model) / "config.json").read_text().replace("bfloat16", "float16"))
    with pytest.raises(ConfigError, match="set fp16=True"):
        compute_dtype(tiny_config(model=str(tmp_path), dtype="auto"), torch.device("cpu"))


# Mixture of experts

@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_aux_loss_is_transformers_own_over_physical_tokens(checkpointing):
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func
    policy = Policy(tiny_moe(), 1.0, "sdpa", aux_loss_coef=0.1)
    if checkpointing:
        policy.lm.gradient_checkpointing_enable(dict(use_reentrant=False))
    policy.train()
    row = pack_row(shapes()["shared_prompt"])
    routers = policy(tensors_of(row)[0])[3]
    assert routers.shape == (2, len(row.input_ids), 4)
    ours = load_balancing_loss(routers, 2, len(row.input_ids))
    theirs = load_balancing_loss_func(tuple(routers), 4, 2)
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-6)
    gates = [p for name, p in policy.named_parameters() if "gate.weight" in name]
    for a, b in zip(torch.autograd.grad(ours, gates, retain_graph=True), torch.autograd.grad(theirs, gates)):
        assert (a - b).norm() <= 1e-5 * b.norm() and b.norm() > 0


def test_shares_of_the_aux_loss_with_global_counts_do_not_depend_on_the_split():
    logits = torch.randn(2, 10, 4, generator=torch.Generator().manual_seed(0))
    whole = load_balancing_loss(logits, 2, 10)
    p = logits.softmax(-1)
    f = torch.zeros(4).index_add_(0, p.topk(2).indices.flatten(), torch.ones(40)) / 20
    assert whole.item() == pytest.approx(4 * (f * p.mean((0, 1))).sum().item(), rel=1e-6)
    assert load_balancing_loss(logits[:, :0], 2, 10).item() == 0


def test_an_aux_coefficient_for_a_dense_model_is_refused_and_a_moe_models_own_is_the_default():
    with pytest.raises(ConfigError, match="not a Mixture-of-Experts"):
        aux_loss_coef(tiny_config(router_aux_loss_coef=0.1), tiny_lm())
    assert aux_loss_coef(tiny_config(), tiny_lm()) == 0
    assert aux_loss_coef(tiny_config(), tiny_moe()) == 0.001
    assert aux_loss_coef(tiny_config(router_aux_loss_coef=0.0), tiny_moe()) == 0


def test_forward_backward_adds_the_scaled_aux_loss_and_reports_it():
    from planning import Share
    from train import forward_backward
    rows = [pack_row(shapes()["shared_prompt"]), pack_row(shapes()["duplicates"])]
    share = Share(rows, [10.0, 20.0], [len(r.input_ids) for r in rows], [0.25, 0.75])
    losses, aux = {}, {}
    for coef in (1e-9, 0.5):
        policy = Policy(tiny_moe(), 1.0, "sdpa", aux_loss_coef=coef)
        metrics, _, losses[coef] = forward_backward(policy, Objective(), share, torch.device("cpu"))[1].reduce(Objective())
        aux[coef] = metrics["aux_loss"]
    assert losses[0.5] - losses[1e-9] == pytest.approx(0.5 * aux[0.5], rel=1e-4) and aux[0.5] == pytest.approx(aux[1e-9])


@pytest.mark.parametrize("changes", [dict(lr_scheduler_type="warmup_stable_decay"), dict(lr_scheduler_type="cosine_with_min_lr"),
                                     dict(lr_scheduler_type="cosine", lr_scheduler_kwargs=dict(a=1))])
def test_a_schedule_that_lacks_its_numbers_is_one_sentence(changes):
    import train
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    with pytest.raises(ConfigError, match="lr_scheduler_kwargs"):
        train.make_scheduler(tiny_config(max_steps=30, **changes), optimizer)


@pytest.mark.parametrize("share,steps,warmup", [(0.05, 10, 1), (0.29, 100, 29), (0.07, 100, 7), (3.0, 10, 3)])
def test_a_share_of_warm_up_is_rounded_up_to_steps(share, steps, warmup):
    """Rounded down, a short run had none."""
    import train
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    scheduler = train.make_scheduler(tiny_config(max_steps=steps, warmup_steps=share, lr_scheduler_type="constant_with_warmup"), optimizer)
    rates = []
    for _ in range(steps):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step(), scheduler.step()
    assert sum(rate < 0.1 for rate in rates) == warmup
