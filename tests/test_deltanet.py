"""Gated DeltaNet over a packed row: every token has its own predecessors and its own state, as if its sample were forwarded alone."""
import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from conftest import CountOps, alone, make_sample, random_group, tensors_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.utils import counters

import attention
import delta_rule
import deltanet
from delta_rule import torch_delta_rule
from deltanet import Segments, install, tree_conv, tree_delta_rule
from model import Policy, prepare_layers
from packing import pack_row

CPU = torch.device("cpu")
FAMILIES = dict(qwen3_5=("Qwen3_5TextConfig", "Qwen3_5ForCausalLM"), qwen3_next=("Qwen3NextConfig", "Qwen3NextForCausalLM"),
                qwen3_5_moe=("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM"))


def tiny_hybrid(family, dtype=torch.float32, seed=0, **changes):
    """Three Gated DeltaNet layers and one of attention. They forget slowly enough for a state to matter over tens of tokens.

    A wide norm epsilon: a sample's first outputs are v·(k·q), and normalising a tiny k·q would amplify its rounding a hundredfold.
    """
    attention.register()
    torch.manual_seed(seed)
    config, lm = (getattr(transformers, name) for name in FAMILIES[family])
    experts = {} if family == "qwen3_5" else dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16)
    config = config(**(dict(vocab_size=37, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
                            head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8,
                            max_position_embeddings=512, initializer_range=0.2, rms_norm_eps=1e-2) | experts | changes))
    config._attn_implementation = attention.NAME
    lm = lm(config).to(dtype)
    for name, parameter in lm.named_parameters():
        if name.endswith("A_log"):
            parameter.data.uniform_(0.01, 0.4).log_()
    return lm


def hybrid_policy(family, **changes):
    return Policy(tiny_hybrid(family, **changes), 0.8, "sdpa").train()


def weighted_gradients(policy, logprobs):
    weights = torch.linspace(-1, 2, len(logprobs), dtype=torch.float64)
    return torch.autograd.grad((logprobs.double() * weights).sum(), list(policy.parameters()))


def assert_same(policy, packed, separate, tolerance=1e-4):
    assert (packed.double() - separate).abs().max() < tolerance
    for (name, _), a, b in zip(policy.named_parameters(), weighted_gradients(policy, packed), weighted_gradients(policy, separate)):
        assert (a - b).norm() <= tolerance * b.norm().clamp(min=1e-3), name


def shapes():
    rng = np.random.default_rng(1)
    prompt = [1, 2, 3, 4, 5, 6]
    two_levels = [make_sample([*prompt, 7, 8, *tail], 6, seed=i) for i, tail in enumerate(([9, 10, 11], [12, 13], [14, 15, 16, 17]))]
    three_levels = [make_sample([*prompt, *tail], 6, seed=i) for i, tail in enumerate(
        ([7, 8, 9, 10, 11, 12, 13, 14], [7, 8, 9, 10, 11, 12, 15, 16, 17, 18], [7, 8, 9, 19, 20, 21], [7, 8, 9, 19, 22, 23, 24], [25, 26]))]
    long = rng.integers(0, 37, 140).tolist()
    return dict(
        shared_prompt=random_group(rng, 0, prompt, 5, 7), forks_at_two_levels=[*two_levels, make_sample([*prompt, 20, 21], 6)],
        forks_at_three_levels=three_levels,
        prefix_of_another=[make_sample([1, 2, 3, 4, 5, 6], 2), make_sample([1, 2, 3, 4], 2), make_sample([1, 2, 3, 9], 2)],
        duplicates=[make_sample([5, 6, 7, 8], 1), make_sample([5, 6, 7, 8], 1), make_sample([5, 6, 7, 8], 2)],
        nothing_shared=[make_sample([i, 2, 3, 4, i], 2) for i in range(4)],
        common_system_prompt=[s for g in range(3) for s in random_group(rng, g, [9, 9, 9, g, g], 3, 6)],
        segments_shorter_than_the_convolution=[make_sample(ids, 1, seed=i) for i, ids in enumerate(
            ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 7, 8], [1, 2, 3, 9, 9, 9], [1, 2, 10], [1, 11, 12, 13], [14, 15]))],
        longer_than_a_chunk=[make_sample([*long[:70], *tail], 60, seed=i) for i, tail in enumerate((long[70:], [1, 2], long[80:]))])


@pytest.mark.parametrize("shape", shapes())
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_logprobs_and_gradients_equal_separate_forwards(family, shape):
    samples = shapes()[shape]
    policy = hybrid_policy(family)
    packed = policy(tensors_of(pack_row(samples, multiple=16))[0])[0]
    assert_same(policy, packed, torch.cat([alone(policy, sample) for sample in samples]))


@pytest.mark.parametrize("family", FAMILIES)
def test_activation_checkpointing_changes_nothing(family):
    samples = shapes()["forks_at_three_levels"]
    policy = hybrid_policy(family)
    plain = policy(tensors_of(pack_row(samples))[0])[0]
    wanted = weighted_gradients(policy, plain)
    policy.lm.gradient_checkpointing_enable(dict(use_reentrant=False))
    again = policy(tensors_of(pack_row(samples))[0])[0]
    assert torch.equal(plain, again)
    assert all(torch.equal(a, b) for a, b in zip(weighted_gradients(policy, again), wanted))


def test_in_bf16_a_packed_row_is_no_further_from_fp32_than_separate_forwards():
    samples = shapes()["forks_at_three_levels"]
    exact, rounded = (hybrid_policy("qwen3_5", initializer_range=0.1) for _ in range(2))
    rounded.to(torch.bfloat16)
    wanted, separate = (torch.cat([alone(policy, sample) for sample in samples]) for policy in (exact, rounded))
    packed = rounded(tensors_of(pack_row(samples))[0])[0]
    assert (packed.double() - wanted).norm() < 1.2 * (separate - wanted).norm()
    flat = [torch.cat([g.double().flatten() for g in weighted_gradients(*pair)])
            for pair in ((exact, wanted), (rounded, separate), (rounded, packed))]
    assert (flat[2] - flat[0]).norm() < 1.2 * (flat[1] - flat[0]).norm()


def test_install_leaves_the_ordinary_forward_as_it_was():
    ids = torch.arange(1, 12)[None]
    for family in FAMILIES:
        lm = tiny_hybrid(family, linear_conv_kernel_dim=3)
        lm.config._attn_implementation = "sdpa"
        before = lm(input_ids=ids).logits
        install(lm)
        assert torch.equal(lm(input_ids=ids).logits, before)
    assert deltanet.layers(nn.Linear(2, 2)) == []


# The core in float64, against one token after the other

def naive_layer(x, weight, g, beta, key_heads, key_dim):
    """One sample alone: x (n, C) convolved by weight (C, kernel), then the delta rule. Value heads share their key head. -> (n, H, V)"""
    heads = g.shape[1]
    state, outs = 0, []
    for i in range(len(x)):
        mixed = nn.functional.silu(sum(weight[:, -1 - k] * x[i - k] for k in range(weight.shape[1]) if k <= i))
        q, k, v = mixed.split([key_heads * key_dim, key_heads * key_dim, len(mixed) - 2 * key_heads * key_dim])
        q, k = (part.view(key_heads, key_dim).repeat_interleave(heads // key_heads, 0) for part in (q, k))
        q, k = (part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt() for part in (q, k))      # (H, K)
        state = g[i].exp()[:, None, None] * state
        error = v.view(heads, -1) - (k[:, :, None] * state).sum(1)                                  # (H, V)
        state = state + beta[i][:, None, None] * k[:, :, None] * error[:, None, :]                  # (H, K, V)
        outs.append((q[:, :, None] * state).sum(1) / key_dim ** 0.5)
    return torch.stack(outs)


def paths_of(row):
    """Row indices of the path from the root to each token, itself included; padding, whose values nobody reads, left out."""
    index = np.arange(row.num_tokens)
    return [index[(index <= i) & (row.end[index] > i)] for i in index]


def core(x, weight, g, beta, segments):
    """(N, C) -> (N, 2, 3): 2 heads, keys of 2, values of 3; all in row order."""
    order = segments.order
    q, k, v = tree_conv(x[order], weight[:, None], segments.heads, segments.sources, segments.slots).split([4, 4, 6], -1)
    out = tree_delta_rule(q.view(-1, 2, 2), k.view(-1, 2, 2), v.view(-1, 2, 3), g[order], beta[order], segments.levels)
    return out[segments.inverse]


tries = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=6)


@settings(deadline=None, max_examples=60)
@given(tries, st.integers(1, 5), st.sampled_from([1, 2, 64]), st.sampled_from([1, 5]))
def test_convolution_and_delta_rule_of_any_trie_equal_the_naive_recurrence_of_every_token_and_so_do_gradients(lists, kernel_size, chunk, multiple):
    row = pack_row([make_sample(ids, 1) for ids in lists], multiple)
    n, real = len(row.end), row.num_tokens
    generator = torch.Generator().manual_seed(n)
    x, weight, g, beta, upstream = (torch.randn(shape, generator=generator, dtype=torch.float64)
                                    for shape in ((n, 14), (14, kernel_size), (n, 2), (n, 2), (n, 2, 3)))
    leaves = [t.requires_grad_() for t in (x, weight, g, beta)]
    segments = Segments(row.segment_start, row.segment_parent, n, CPU, kernel_size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delta_rule, "CHUNK", chunk)
        delta_rule._chunks.cache_clear()
        out = core(x, weight, -g.abs(), beta.sigmoid(), segments)
        delta_rule._chunks.cache_clear()
    wanted = {}
    for path in (path for i, path in enumerate(paths_of(row)) if row.end[i] == i + 1):       # every token lies on the path of a leaf
        wanted.update(zip(path.tolist(), naive_layer(x[path], weight, -g[path].abs(), beta[path].sigmoid(), 2, 2)))
    wanted = torch.stack([wanted[i] for i in range(real)])
    assert (out[:real] - wanted).abs().max() < 1e-10
    for a, b in zip(*(torch.autograd.grad((y[:real] * upstream[:real]).sum(), leaves) for y in (out, wanted))):
        assert (a - b).abs().max() < 1e-9


@pytest.mark.parametrize("long", [1, 200])
def test_a_level_of_many_short_segments_is_not_mostly_padding_and_equals_the_recurrence(long):
    """Three thousand replies of a few tokens each once took 64 places each."""
    lengths = (*[2 + n % 4 for n in range(600)], long)
    N = sum(lengths)
    generator = torch.Generator().manual_seed(0)
    q, k, v, g, beta, start = (torch.randn(shape, generator=generator, dtype=torch.float64)
                               for shape in ((N, 2, 2), (N, 2, 2), (N, 2, 3), (N, 2), (N, 2), (len(lengths), 2, 2, 3)))
    tensors = (q, k, v, -g.abs(), beta.sigmoid())
    counts, token, *_ = delta_rule._chunks(lengths, CPU)
    assert delta_rule._chunks((*lengths, 5000), CPU)[1].shape[1] == 64, "nor four times the steps for a long one beside them"
    assert token.numel() < 6 * N and sum(counts) == len(token) and len(counts) == -(-max(lengths) // token.shape[1])
    out, states = delta_rule.torch_delta_rule(*tensors, lengths, initial_state=start)
    for n, parts in enumerate(zip(*(x.split(lengths) for x in (*tensors, out)))):
        if n % 50 == 0 or lengths[n] == long:
            *parts, got = parts
            wanted, state = delta_rule.torch_delta_rule(*parts, (len(got),), initial_state=start[n:n + 1])
            assert (got - wanted).abs().max() < 1e-10 and (states[n] - state[0]).abs().max() < 1e-10


def test_a_step_over_chunks_starts_eight_kernels_forward_and_backward():
    """On a GPU the host's time for each is what a row of few tokens takes: it was 19 when autograd kept the steps' books."""
    def kernels(steps):
        tensors = [torch.rand(shape, requires_grad=True) for shape in ((steps * 64 + 64, 1, 4),) * 3 + ((steps * 64 + 64, 1),) * 2]
        with CountOps() as ops:
            out, states = torch_delta_rule(*(tensor * -1 if n == 3 else tensor for n, tensor in enumerate(tensors)), (steps * 64, 64))
            (out.sum() + states.sum()).backward()
        views = {"transpose.int", "slice.Tensor", "view", "split_with_sizes", "unsqueeze", "expand", "detach", "squeeze.dim", "select.int"}
        return sum(count for name, count in ops.counts.items() if name.removeprefix("aten::") not in views)
    assert kernels(21) - kernels(11) == 10 * 8


class WideGatedNorm(nn.Module):
    """transformers' gated RMSNorm without its casts to fp32."""

    def __init__(self, norm):
        super().__init__()
        self.weight, self.eps = norm.weight, norm.variance_epsilon

    def forward(self, x, gate):
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * nn.functional.silu(gate)


@pytest.mark.parametrize("family", FAMILIES)
def test_in_fp64_a_layer_gives_each_token_what_its_path_alone_gives(family):
    lm = tiny_hybrid(family, torch.float64)
    layer = lm.model.layers[0].linear_attn
    layer.norm = WideGatedNorm(layer.norm)
    install(lm)
    row = pack_row(shapes()["forks_at_three_levels"], 32)
    hidden = torch.randn(1, len(row.end), 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def run(x, start, parent):
        return layer(hidden_states=x, tree=SimpleNamespace(segments=Segments(start, parent, x.shape[1], CPU)))[0]
    packed = run(hidden, row.segment_start, row.segment_parent)
    single = torch.stack([run(hidden[:, path], np.array([0]), np.array([-1]))[-1] for path in paths_of(row)])
    packed = packed[:row.num_tokens]
    assert (packed - single).abs().max() < 1e-12
    sums = [torch.autograd.grad((y * hidden[0, -len(y):]).sum(), list(layer.parameters())) for y in (packed, single)]
    for a, b in zip(*sums):
        assert (a - b).norm() <= 1e-10 * b.norm()


def test_many_branches_sum_the_gradient_of_their_bf16_prefix_in_fp32():
    """One token read by 1,000 branches of one token each: in bf16 a sum of ones stops growing at 256."""
    n, device = 1001, torch.device("cuda" if torch.cuda.is_available() else "cpu")
    segments = Segments(np.arange(n), np.where(np.arange(n) > 0, 0, -1), n, device)
    x = torch.zeros(n, 1, dtype=torch.bfloat16, device=device, requires_grad=True)
    out = tree_conv(x, torch.tensor([[[0.0, 0.0, 1.0, 0.0]]], dtype=torch.bfloat16, device=device), segments.heads, segments.sources, segments.slots)
    out.sum().backward()
    assert x.grad[0].item() == 500 and x.grad[1:].count_nonzero() == 0         # silu'(0) = 1/2


# How it is computed

def test_a_call_serves_a_whole_level_and_one_group_needs_no_permutation(monkeypatch):
    calls = []
    monkeypatch.setattr(deltanet, "torch_delta_rule", lambda *args, **options: calls.append(args[5]) or torch_delta_rule(*args, **options))
    policy = hybrid_policy("qwen3_5")
    for shape, levels in dict(nothing_shared=1, forks_at_two_levels=3, forks_at_three_levels=4).items():
        row = pack_row(shapes()[shape], 16)
        calls.clear()
        policy(tensors_of(row)[0])
        assert len(calls) == 3 * levels                                         # three such layers
        assert sum(map(len, calls)) == 3 * len(row.segment_start) and sum(map(sum, calls)) == 3 * len(row.end)
    one_group = pack_row(random_group(np.random.default_rng(0), 0, [1, 2, 3, 4], 4, 5), 64)
    assert Segments(one_group.segment_start, one_group.segment_parent, len(one_group.end), CPU).in_order


def varlen_kernel(calls):
    """A stand-in for flash-linear-attention's kernel: each sequence of cu_seqlens by itself."""
    def chunk_gated_delta_rule(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False,
                               use_qk_l2norm_in_kernel=False, cu_seqlens=None):
        calls.append((q, v, initial_state, output_final_state, cu_seqlens))
        assert use_qk_l2norm_in_kernel and q.shape[0] == 1 and q.shape == k.shape and g.dtype == torch.float32
        bounds = cu_seqlens.tolist()
        results = [torch_delta_rule(*(x[0, a:b] for x in (q, k, v, g, beta)), (b - a,), None if initial_state is None else initial_state[i:i + 1])
                   for i, (a, b) in enumerate(zip(bounds, bounds[1:]))]
        outs, states = map(torch.cat, zip(*results))
        return outs[None], states if output_final_state else None
    return chunk_gated_delta_rule


def test_the_varlen_kernel_gets_fp32_states_and_the_bounds_of_each_level_and_gives_the_same_gradients(monkeypatch):
    row = pack_row(shapes()["common_system_prompt"], 16)
    policy = hybrid_policy("qwen3_5")
    own = policy(tensors_of(row)[0])[0]
    wanted = weighted_gradients(policy, own)
    calls = []
    monkeypatch.setattr(deltanet, "fla_kernel", lambda query: varlen_kernel(calls))
    packed = policy(tensors_of(row)[0])[0]
    assert (packed - own).abs().max() < 1e-5
    for a, b in zip(weighted_gradients(policy, packed), wanted):
        assert (a - b).norm() <= 1e-4 * b.norm().clamp(min=1e-3)
    copy.deepcopy(policy).to(torch.bfloat16)(tensors_of(row)[0])
    assert len(calls) == 3 * 4 * 2 and {q.dtype for q, *_ in calls} == {torch.float32, torch.bfloat16}
    for i, (q, v, states, final, cu_seqlens) in enumerate(calls):
        assert q.shape[2:] == (4, 8) and v.shape[2:] == (4, 8)
        assert cu_seqlens.dtype == torch.int64 and cu_seqlens[0] == 0 and cu_seqlens[-1] == q.shape[1] and (cu_seqlens.diff() > 0).all()
        assert final == (i % 4 < 3)
        if i % 4 == 0:
            assert states is None
        else:
            assert states.shape == (len(cu_seqlens) - 1, 4, 8, 8) and states.dtype == torch.float32


def test_a_kernel_that_takes_the_bounds_on_the_host_gets_them(monkeypatch):
    row = pack_row(shapes()["shared_prompt"])
    seen = []

    def kernel(q, k, v, g, beta, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False, cu_seqlens=None, cu_seqlens_cpu=None):
        seen.append(torch.equal(cu_seqlens, cu_seqlens_cpu))
        return varlen_kernel([])(q, k, v, g, beta, None, initial_state, output_final_state, True, cu_seqlens)
    monkeypatch.setattr(deltanet, "fla_kernel", lambda query: kernel)
    hybrid_policy("qwen3_5")(tensors_of(row)[0])
    assert seen == [True] * 6


def test_a_compiled_decoder_layer_leaves_its_graph_once_and_serves_rows_of_any_shape():
    """Nothing of a trie but its length, and whether it lies in level order, reaches the compiled parts."""
    torch._dynamo.reset()
    policy = hybrid_policy("qwen3_5", num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
    names = ("shared_prompt", "forks_at_three_levels", "duplicates", "common_system_prompt")
    rows = [tensors_of(pack_row(shapes()[name], 96))[0] for name in names]
    assert [row["tree"].prepare("sdpa", {None}, recurrent=True).segments.in_order for row in rows] == [True, False, True, False]
    plain = [policy(row)[0] for row in rows]
    graphs, counts = [], []
    layer = policy.lm.model.layers[0]
    layer.forward = torch.compile(layer.forward, dynamic=False, backend=lambda graph, inputs: graphs.append(graph) or graph.forward)
    for row, wanted in zip(rows, plain):
        assert (policy(row)[0] - wanted).abs().max() < 1e-5
        counts.append(len(graphs))
    assert 2 <= counts[0] <= 4                                                  # before and after, in the mixer and in the layer around it
    assert counts[1] == counts[2] == counts[3]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_hybrids_compiled_parts_compile_once_for_rows_of_any_structure_and_their_graphs_do_not_grow_with_the_row(checkpointing, monkeypatch):
    """As inductor's graphs, forward and backward. Traced through a layer of transformers' own, a row of 12,000 tokens took over 200 s."""
    torch._dynamo.reset()
    counters.clear()
    nodes, backend = [], lookup_backend("aot_eager_decomp_partition")

    def counting(graph, inputs):
        nodes.append(len(graph.graph.nodes))
        return backend(graph, inputs)
    kinds = ["linear_attention", "full_attention", "linear_attention"]
    plain, compiled = (hybrid_policy("qwen3_5", num_hidden_layers=3, layer_types=kinds) for _ in range(2))
    prepare_layers(compiled.lm, checkpointing, compiled=True, backend=counting)
    rng = np.random.default_rng(0)
    warm_up = [shapes()[name] for name in ("shared_prompt", "common_system_prompt")]             # in level order, and not
    bench = [[s for g in range(3) for s in random_group(rng, g, rng.integers(0, 37, n), 8, 2 * n)] for n in (10, 40, 60)]
    rows = [pack_row(samples, 16) for samples in (*warm_up, *shapes().values(), *bench)]         # on a GPU, a multiple of 128
    assert min(len(row.end) for row in rows) == 16 and len(rows[-1].end) > 1000
    wanted = [(out := plain(tensors_of(row)[0])[0], weighted_gradients(plain, out)) for row in rows]
    conv = torch.compile(tree_conv, dynamic=True, backend=counting)                              # on a GPU the layers' own
    monkeypatch.setattr(deltanet, "tree_conv", conv)
    chunks = torch.compile(delta_rule._within_chunks, dynamic=False, backend=counting)

    def fused(function, *tensors):
        for tensor in tensors:
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return chunks(*tensors)
    monkeypatch.setattr(delta_rule, "fused", fused)
    counts = []
    for row, (logprobs, gradients) in zip(rows, wanted):
        out = compiled(tensors_of(row)[0])[0]
        assert (out - logprobs).abs().max() < 1e-4
        for a, b in zip(weighted_gradients(compiled, out), gradients):
            assert (a - b).norm() <= 1e-4 * b.norm().clamp(min=1e-3)
        counts.append(counters["stats"]["unique_graphs"])
    # The mixer before and after the delta rule, and the same with a permutation; the layer around it before and after; the convolution; the part within chunks; full attention.
    assert set(counts[1:]) == {9} and max(nodes) < 150
