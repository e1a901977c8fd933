"""Attention over a packed trie is the same function in every backend; compiling, checkpointing and copied weights change no gradient."""
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from conftest import CountOps, make_sample, random_group, tensors_of, tiny_lm, tiny_moe, varlen_attention
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode
from triton_worker import CASES

import attention
import model
from config import ConfigError
from model import Policy, prepare_layers
from packing import pack_row
from shard import ComputeCopies

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def rows():
    rng = np.random.default_rng(1)
    prompt = rng.integers(0, 37, 9).tolist()
    groups = [random_group(rng, g, [g, *prompt], 3, 7) for g in range(2)]
    turns = [make_sample([*prompt, *turn, *tail], 9) for turn in ([1, 2, 3], [4, 5]) for tail in ([1], [2, 3, 4, 5], [6, 7])]
    return dict(shared_prompt=pack_row(groups[0]), common_prompt=pack_row(groups[0] + groups[1]),
                two_levels=pack_row(turns), padded=pack_row(turns, 64),
                a_prefix_of_another=pack_row([make_sample(prompt, 2), make_sample(prompt[:4], 2), make_sample([*prompt[:4], 30, 31], 2)]),
                one_token=pack_row([make_sample([5], 1)]), only_filler=pack_row([], 4))


def parents(row):
    """Row index of the token before each token, -1 for a first one; from the segments, not from `end`."""
    stops = np.append(row.segment_start[1:], len(row.end))
    before = np.arange(len(row.end)) - 1
    before[row.segment_start] = [stops[parent] - 1 if parent >= 0 else -1 for parent in row.segment_parent]
    return before


def ancestors(row):
    """Row indices of each token's path from its root, itself last; of a token of padding, itself."""
    paths = []
    for i, parent in enumerate(parents(row)):
        paths.append([*(paths[parent] if parent >= 0 and i < row.num_tokens else []), i])
    return paths


def segment_paths(row):
    """Of each segment, what its last token sees; padding is a segment of its own."""
    return [ancestors(row)[stop - 1] if stop <= row.num_tokens else list(range(start, stop))
            for start, stop in zip(row.segment_start.tolist(), [*row.segment_start[1:].tolist(), len(row.end)])]


def naive_attention(row, query, key, value, scaling=None, sliding_window=None, softcap=None):
    """query (1, H, N, D), key and value (1, G, N, D) -> (1, N, H, D); one token after the other over its ancestors."""
    outs = []
    for i, path in enumerate(ancestors(row)):
        path = path[-(sliding_window or len(path)):]
        k, v = (x[0, :, path].repeat_interleave(query.shape[1] // key.shape[1], 0) for x in (key, value))          # (H, n, D)
        scores = torch.einsum("hd,hnd->hn", query[0, :, i], k) * (scaling or query.shape[-1] ** -0.5)
        weights = (scores if softcap is None else softcap * torch.tanh(scores / softcap)).softmax(-1)
        outs.append(torch.einsum("hn,hnd->hd", weights, v))
    return torch.stack(outs)[None]


def relative(a, b):
    return ((a - b).norm() / b.norm()).item()


def random_qkv(n, heads=4, groups=2, width=8, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    made = (torch.randn(1, n, h, width, generator=generator, dtype=torch.float64) for h in (heads, groups, groups))
    return [x.to(dtype).transpose(1, 2).requires_grad_() for x in made]


def attend(row, backend, qkv, **options):
    tree = tensors_of(row)[0]["tree"].prepare(backend, {options.get("sliding_window")})
    return attention.tree_attention(None, *qkv, tree=tree, **options)[0]


def with_gradients(row, out, qkv):
    """The outputs of the row's own tokens, and gradients; nothing depends on padding, where backends may differ."""
    out = out[:, :row.num_tokens]
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return out, *torch.autograd.grad(out, qkv, direction.to(out.dtype))


# The function

OPTIONS = dict(plain={}, scaled=dict(scaling=0.9), window=dict(sliding_window=4), window_of_one=dict(sliding_window=1), softcap=dict(softcap=0.8),
               window_and_softcap=dict(sliding_window=5, softcap=1.2))


@pytest.mark.parametrize("backend", ["sdpa", "hub"])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("shape", rows())
def test_a_token_attends_to_its_own_path_and_so_do_its_gradients(shape, options, backend, hub):
    row = rows()[shape]
    for heads, groups, width in ((4, 2, 8), (3, 1, 5), (2, 2, 8), (4, 1, 8)):
        qkv = random_qkv(len(row.end), heads, groups, width)
        wanted = with_gradients(row, naive_attention(row, *qkv, **OPTIONS[options]), qkv)
        for a, b in zip(with_gradients(row, attend(row, backend, qkv, **OPTIONS[options]), qkv), wanted, strict=True):
            assert a.shape == b.shape and torch.allclose(a, b, rtol=1e-6, atol=2e-6 if OPTIONS[options].get("softcap") else 1e-10)


@pytest.mark.parametrize("options", OPTIONS)
def test_flex_attention_gives_the_same_outputs(options):
    """It has no backward on a CPU."""
    for row in map(rows().get, ("common_prompt", "padded")):
        qkv = [x.detach() for x in random_qkv(len(row.end), dtype=torch.float32)]
        difference = attend(row, "flex", qkv, **OPTIONS[options]) - naive_attention(row, *qkv, **OPTIONS[options])
        assert difference.abs().max() < 1e-5


@pytest.fixture(scope="module")
def triton_errors(tmp_path_factory):
    out = tmp_path_factory.mktemp("triton") / "errors.json"
    worker = Path(__file__).parent / "triton_worker.py"
    environment = os.environ | dict(TRITON_INTERPRET="1")
    done = subprocess.run([sys.executable, str(worker), str(out)], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(out.read_text())


@pytest.mark.parametrize("case", CASES)
def test_triton_kernels_give_the_dense_masks_outputs_and_gradients(case, triton_errors):
    """On a CPU, in triton's interpreter."""
    for result, error in triton_errors[case].items():
        assert error < (2e-3 if case == "in_16_bits" else 1e-5), result


def test_a_model_on_the_triton_kernels_keeps_their_results_under_selective_checkpointing(triton_errors):
    for checkpointing, recomputed in ((True, 1), ("selective", 0)):
        found = triton_errors[f"model, checkpointing {checkpointing}"]
        assert found["logprobs"] < 1e-5 and found["gradients"] < 1e-5 and found["recomputed"] == recomputed


def test_triton_refuses_values_of_another_width_than_keys():
    """Its kernels would read past each value's end."""
    q, k, v = random_qkv(4, dtype=torch.float32)
    with pytest.raises(AssertionError, match="use attention_backend='flex'"):
        attend(pack_row([], 4), "triton", [q, k, v[..., :4]])


def test_attention_sinks_are_refused_by_name():
    row = pack_row([make_sample([1, 2, 3], 1)])
    with pytest.raises(ValueError, match="SimpleNamespace has attention sinks, which are not supported"):
        attention.tree_attention(SimpleNamespace(), *random_qkv(3), tree=tensors_of(row)[0]["tree"].prepare("sdpa", {None}), s_aux=torch.zeros(4))


# Lists of tiles

SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=14), min_size=1, max_size=6)
TRIES = st.builds(lambda sequences, multiple: pack_row([make_sample(ids, 1) for ids in sequences], multiple), SEQUENCES, st.sampled_from([1, 8]))
TILINGS = dict(row=TRIES, size=st.sampled_from([1, 2, 3, 8]), window=st.sampled_from([None, 1, 3, 7]))


def visible(row, window):
    """(N, N) bool"""
    sees = torch.zeros(len(row.end), len(row.end), dtype=torch.bool)
    for i, path in enumerate(ancestors(row)):
        sees[i, path[-(window or len(path)):]] = True
    return sees


def in_tiles(sees, size):
    """(N, N) -> (T, T, size, size), nothing visible beyond the row."""
    tail = -len(sees) % size
    return torch.nn.functional.pad(sees, (0, tail, 0, tail)).unflatten(1, (-1, size)).unflatten(0, (-1, size)).transpose(1, 2)


def from_lists(sees, size, listed):
    """What a kernel computes: of each listed tile all pairs if it is listed as wholly visible, else the visible ones. -> (T, T, size, size)"""
    tiles, computed = in_tiles(sees, size), torch.zeros_like(in_tiles(sees, size))
    for (query, key), whole in listed.items():
        computed[query, key] = True if whole else tiles[query, key]
    return computed


@settings(deadline=None, max_examples=150)
@given(**TILINGS)
def test_the_dense_mask_shows_each_token_its_path(row, size, window):
    tree = tensors_of(row)[0]["tree"]
    assert torch.equal(tree.prepare("sdpa", {window}).masks[window][0, 0], visible(row, window))


@settings(deadline=None, max_examples=150)
@given(**TILINGS)
def test_no_visible_pair_lies_outside_the_tiles_and_whole_ones_are_whole(row, size, window):
    tiles = in_tiles(visible(row, window), size)
    some, full = tensors_of(row)[0]["tree"]._tiles(size, window)
    assert not (tiles.any(-1).any(-1) & ~some).any()
    assert tiles[full].all() and not (full & ~some).any()
    if window is None:                                       # then nothing is listed in vain, and only the diagonal is masked in vain
        assert torch.equal(some, tiles.any(-1).any(-1))
        assert torch.equal(full | torch.eye(len(full), dtype=torch.bool), tiles.all(-1).all(-1) | torch.eye(len(full), dtype=torch.bool))


@settings(deadline=None, max_examples=100)
@given(**TILINGS)
def test_flex_attentions_block_mask_lists_the_visible_pairs_from_both_sides(row, size, window):
    sees = visible(row, window)
    with mock.patch.object(attention, "TILE", size):
        mask = tensors_of(row)[0]["tree"].prepare("flex", {window}).masks[window]
    sides = ((mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices, lambda own, other: (own, other)),
             (mask.q_num_blocks, mask.q_indices, mask.full_q_num_blocks, mask.full_q_indices, lambda own, other: (other, own)))
    for *lists, pair in sides:
        assert all(part.is_contiguous() for part in lists), "as FlexAttention's kernels read them"
        partly, indices, fully, full_indices = (x[0, 0] for x in lists)
        listed = {pair(tile, other): False for tile in range(len(partly)) for other in indices[tile, :partly[tile]].tolist()}
        whole = {pair(tile, other): True for tile in range(len(fully)) for other in full_indices[tile, :fully[tile]].tolist()}
        assert not listed.keys() & whole.keys()
        assert torch.equal(from_lists(sees, size, listed | whole), in_tiles(sees, size))
    index = torch.arange(len(sees))
    assert torch.equal(mask.mask_mod(0, 0, index[:, None], index[None, :]), sees)


@settings(deadline=None, max_examples=100)
@given(**TILINGS)
def test_the_triton_kernels_tile_lists_hold_the_visible_pairs_from_both_sides_longest_list_first(row, size, window):
    import tree_kernel
    sees = visible(row, window)
    with mock.patch.object(tree_kernel, "BLOCK", size):
        index, counts, order, end, position_ids = tiles = tensors_of(row)[0]["tree"].prepare("triton", {window}).masks[window]
    assert all(part.is_contiguous() for part in tiles)
    for side in range(2):
        whole, met = counts[side]
        listed = {(tile, other) if side == 0 else (other, tile): rank < whole[tile]
                  for tile in range(len(met)) for rank, other in enumerate(index[side, tile, :met[tile]].tolist())}
        assert len(listed) == met.sum()
        assert torch.equal(from_lists(sees, size, listed), in_tiles(sees, size))
        assert sorted(order[side].tolist()) == list(range(len(met))) and (met[order[side].long()].diff() <= 0).all()
    assert {x.dtype for x in (index, counts, order, end, position_ids)} == {torch.int32}


# The hub's kernels

@pytest.fixture
def calls(hub, monkeypatch):
    """Each call's arguments."""
    made = []

    def recorded(q, k, v, *bounds, **options):
        made.append(SimpleNamespace(q=q, k=k, v=v, bounds=bounds, options=options))
        return varlen_attention(q, k, v, *bounds, **options)
    monkeypatch.setattr(hub, "flash_attn_varlen_func", recorded)
    return made


@pytest.mark.parametrize("shape", ["two_levels", "common_prompt", "padded"])
def test_the_hubs_kernel_is_called_once_a_layer_with_the_bounds_of_segments_and_paths(shape, calls):
    row = rows()[shape]
    Policy(tiny_lm(num_hidden_layers=3), 1.0, "hub")(tensors_of(row)[0])
    assert len(calls) == 3
    lengths, keys = np.diff(np.append(row.segment_start, len(row.end))), np.array([len(path) for path in segment_paths(row)])
    for call in calls:
        assert call.q.shape == (len(row.end), 4, 8) and call.k.shape == call.v.shape == (keys.sum(), 2, 8)
        cu_queries, cu_keys, max_queries, max_keys = call.bounds
        assert cu_queries.dtype == cu_keys.dtype == torch.int32
        assert cu_queries.tolist() == [0, *lengths.cumsum()] and cu_keys.tolist() == [0, *keys.cumsum()]
        assert (max_queries, max_keys) == (lengths.max(), keys.max()) and type(max_queries) is type(max_keys) is int
        assert call.options == dict(softmax_scale=8 ** -0.5, causal=True)      # kernels differ in how they spell the absence of a window


@settings(deadline=None, max_examples=100)
@given(row=TRIES)
def test_gathered_keys_are_each_segments_path_from_the_root(row):
    assert tensors_of(row)[0]["tree"].paths.index.tolist() == sum(segment_paths(row), [])


def test_a_sliding_window_reaches_the_hubs_kernel_as_the_tokens_seen_before_oneself_and_a_softcap_as_it_is(calls):
    row = rows()["two_levels"]
    for options, wanted in ((dict(sliding_window=5), dict(window_size=(4, 0))),
                            (dict(sliding_window=1, softcap=2.0), dict(window_size=(0, 0), softcap=2.0)),
                            (dict(softcap=3.0, scaling=0.25), dict(softcap=3.0, softmax_scale=0.25))):
        attend(row, "hub", random_qkv(len(row.end)), **options)
        assert calls[-1].options == dict(softmax_scale=None, causal=True) | wanted


def test_a_run_that_must_be_deterministic_asks_the_hubs_kernel_for_it(calls):
    """Its backward sums with atomics unless told otherwise, which torch's own switch does not see."""
    row = rows()["two_levels"]
    torch.use_deterministic_algorithms(True)
    try:
        attend(row, "hub", random_qkv(len(row.end)))
    finally:
        torch.use_deterministic_algorithms(False)
    assert calls[-1].options == dict(softmax_scale=None, causal=True, deterministic=True)


def test_padding_changes_nothing(hub):
    samples = random_group(np.random.default_rng(0), 0, [1, 2, 3, 4], 4, 6)
    short, long = pack_row(samples), pack_row(samples, 64)
    n = len(short.end)
    qkv = random_qkv(len(long.end))
    padded = with_gradients(long, attend(long, "hub", qkv), qkv)
    cut = [x.detach()[:, :, :n].requires_grad_() for x in qkv]
    plain = with_gradients(short, attend(short, "hub", cut), cut)
    assert torch.allclose(padded[0], plain[0], rtol=0, atol=1e-12)
    for a, b in zip(padded[1:], plain[1:]):
        assert torch.allclose(a[:, :, :n], b, rtol=0, atol=1e-12) and not a[:, :, n:].any()


class SummedIn(TorchDispatchMode):
    """While entered, collects the dtypes in which values are added at an index."""

    def __init__(self):
        super().__init__()
        self.dtypes = set()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op.name().startswith(("aten::index_add", "aten::scatter_add", "aten::index_put", "aten::scatter_reduce")):
            self.dtypes.add(args[0].dtype)
        return op(*args, **(kwargs or {}))


def test_small_gradients_of_hundreds_of_branches_are_summed_in_fp32(hub):
    """In bf16 a sum stops growing once a term is below half its last digit: at 64, where 600 branches add 0.2 each to the prompt's values."""
    stuck = torch.zeros((), dtype=torch.bfloat16)
    for _ in range(600):
        stuck += 0.2
    assert stuck == 64
    row = pack_row([make_sample([1, 2, 3, 4, 5, i], 5) for i in range(600)])
    qkv = random_qkv(len(row.end), 2, 1, dtype=torch.bfloat16)
    exact = [x.detach().double().requires_grad_() for x in qkv]
    wanted = torch.autograd.grad(attend(row, "hub", exact).sum(), exact)
    assert wanted[2][:, :, :4].mean() > 100
    out = attend(row, "hub", qkv).sum()
    with SummedIn() as summed:                   # recorded, since torch adds in fp32 on a CPU whatever it is given; a GPU does not
        found = torch.autograd.grad(out, qkv)
    assert summed.dtypes == {torch.float32}
    for a, b in zip(found, wanted):
        assert a.dtype == torch.bfloat16 and relative(a[:, :, :4].double(), b[:, :, :4]) < 0.01


# What is checked at start

@pytest.mark.parametrize("window,softcap", [(None, None), (100, None), (None, 20.0), (100, 20.0)])
def test_a_right_attention_has_the_dense_masks_output_and_gradients(window, softcap, hub):
    assert attention.gradient_error("hub", 6, 2, 8, 8, window, softcap, CPU, torch.float64) < 1e-6 < attention.gradient_error("hub", 6, 2, 8, 8, window, softcap, CPU, torch.bfloat16) < 0.01


@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_an_attention_whose_output_is_right_and_a_gradient_is_not_is_refused(which, hub, monkeypatch):
    """A run would have gone on: neither log-probs nor a finite gradient norm show it."""
    def wrong(q, k, v, *bounds, **options):
        parts = dict(q=q, k=k, v=v)
        parts[which] = torch.where(torch.arange(len(parts[which]))[:, None, None] < 100, parts[which].detach(), parts[which])
        return varlen_attention(*parts.values(), *bounds, **options)
    model.check_packing(Policy(tiny_lm(), 1.0, "hub"), CPU, torch.float32)
    monkeypatch.setattr(hub, "flash_attn_varlen_func", wrong)
    with pytest.raises(ConfigError, match="attention_backend='hub' computes gradients here that differ by .* from a dense mask's"):
        model.check_packing(Policy(tiny_lm(), 1.0, "hub"), CPU, torch.float32)


# Choice of a backend

@pytest.fixture
def gpu(monkeypatch):
    """Sets the GPU's capability, and what fetching a kernel gives or raises -> what was fetched."""
    fetched = []

    def set_(capability=(9, 0), hip=None, error=None, memory=227):
        def get_kernel(repository, **version):
            fetched.append((repository, version))
            if error:
                raise error
            return SimpleNamespace(flash_attn_varlen_func=varlen_attention)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: SimpleNamespace(shared_memory_per_block_optin=memory << 10))
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setitem(sys.modules, "kernels", SimpleNamespace(get_kernel=get_kernel))
        monkeypatch.setattr(attention, "_hub_kernels", {})
        return fetched
    return set_


HOPPER, BLACKWELL, ROCM = dict(capability=(9, 0)), dict(capability=(10, 0)), dict(hip="7.0")


@pytest.mark.parametrize("machine,repository,version", [
    (HOPPER, "flash-attn3", dict(version=1)), (BLACKWELL, "flash-attn4", {}), (ROCM, "aiter-flash-attn", dict(version=2))])
def test_auto_takes_the_hubs_kernel_for_the_gpu_and_fetches_it_once(machine, repository, version, gpu):
    fetched = gpu(**machine)
    assert attention.choose_backend("auto", GPU) == attention.choose_backend("hub", GPU) == "hub"
    attention.hub_kernel(GPU)
    assert fetched == [(f"kernels-community/{repository}", version)]


def test_auto_falls_back_to_triton_where_the_kernel_does_not_load_and_hub_says_why(gpu):
    gpu(error=FileNotFoundError("no build for torch 2.13\nlong story"))
    assert attention.choose_backend("auto", GPU) == attention.choose_backend("auto", GPU, shapes=[(8, 1, 256, 256), (8, 8, 64, 64)]) == "triton"
    with pytest.raises(ValueError, match=r"flash-attn3 cannot be loaded \(no build for torch 2.13\): use attention_backend='triton'"):
        attention.choose_backend("hub", GPU)
    gpu(error=RuntimeError())
    with pytest.raises(ValueError, match=r"cannot be loaded \(RuntimeError\(\)\)"):
        attention.choose_backend("hub", GPU)


@pytest.mark.parametrize("machine,dtype,shape,backend", [
    (dict(memory=163), torch.bfloat16, (8, 1, 256, 256), "triton"), (dict(memory=99), torch.bfloat16, (8, 8, 64, 64), "flex"),
    (HOPPER, torch.float32, (8, 8, 256, 256), "flex"), (HOPPER, torch.bfloat16, (8, 8, 512, 512), "flex"), (HOPPER, torch.bfloat16, (8, 8, 192, 128), "flex"),
    (ROCM, torch.bfloat16, (8, 8, 64, 64), "flex"), (HOPPER, torch.bfloat16, None, "flex")])
def test_auto_takes_triton_only_where_its_tiles_fit_the_gpu_and_the_models_heads(machine, dtype, shape, backend, gpu):
    gpu(error=RuntimeError(), **machine)
    assert attention.choose_backend("auto", GPU, dtype, shapes=[(4, 4, 64, 64), shape] if shape else []) == backend


@pytest.mark.parametrize("machine,repository,other", [(BLACKWELL, "flash-attn4", "triton"), (ROCM, "aiter-flash-attn", "flex")])
def test_kernels_that_cannot_cap_logits_are_not_used_for_a_model_that_does(machine, repository, other, gpu):
    fetched = gpu(**machine)
    assert attention.choose_backend("auto", GPU, softcap=50.0) == other
    with pytest.raises(ValueError, match=f"{repository} cannot cap attention logits, as this model does: use attention_backend='{other}'"):
        attention.choose_backend("hub", GPU, softcap=50.0)
    assert not fetched
    gpu(**HOPPER)
    assert attention.choose_backend("auto", GPU, softcap=50.0) == attention.choose_backend("hub", GPU, softcap=50.0) == "hub"


def test_kernels_of_16_bits_are_not_used_for_a_run_in_fp32(gpu):
    gpu(**HOPPER)
    assert attention.choose_backend("auto", GPU, torch.float32) == "triton" and attention.choose_backend("auto", GPU, torch.float16) == "hub"
    with pytest.raises(ValueError, match="flash-attn3 computes in 16 bits, not in float32: use attention_backend='triton'"):
        attention.choose_backend("hub", GPU, torch.float32)


def test_a_named_backend_is_taken_on_a_gpu_without_fetching_anything(gpu):
    fetched = gpu(error=AssertionError("fetched"))
    for name in ("triton", "flex", "sdpa"):
        assert attention.choose_backend(name, GPU, softcap=1.0) == name
    assert not fetched


def test_a_cpu_has_the_dense_mask_only():
    assert attention.choose_backend("auto", CPU) == attention.choose_backend("sdpa", CPU) == "sdpa"
    for name, reason in (("flex", "has no backward on a CPU"), ("triton", "needs a GPU"), ("hub", "needs a GPU")):
        with pytest.raises(ValueError, match=f"attention_backend='{name}' {reason}: use 'sdpa'"):
            attention.choose_backend(name, CPU)


# Layers compiled

PARTITIONED = "aot_eager_decomp_partition"       # inductor's graphs, forward and backward; its 20 C++ kernels would take half a minute to build


def random_rows(count, seed=0):
    """Of 15 to 250 tokens."""
    rng = np.random.default_rng(seed)
    def group(g):
        return random_group(rng, g, rng.integers(0, 37, rng.integers(3, 20)), 4, int(rng.integers(2, 30)))
    return [pack_row(group(0) + group(1)) for _ in range(count)]


def step(policy, row):
    """The row's log-probs, and the gradient as one vector."""
    policy.zero_grad()
    with policy.compute_weights:
        logprobs = policy(tensors_of(row)[0])[0]
        (logprobs * torch.linspace(-1, 2, len(logprobs))).sum().backward()
    return logprobs.detach(), torch.cat([p.grad.flatten().double() for p in policy.parameters()])


@pytest.fixture
def graphs():
    """Names what was compiled since: (graphs, breaks)."""
    torch._dynamo.reset()
    counters.clear()
    yield lambda: (counters["stats"]["unique_graphs"], sum(counters["graph_break"].values()))
    torch._dynamo.reset()


@pytest.mark.parametrize("checkpointing", [False, True, "selective"])
def test_compiled_layers_equal_plain_ones_and_are_one_graph_for_rows_of_any_length(checkpointing, graphs):
    plain, compiled = Policy(tiny_lm(), 0.8, "sdpa"), Policy(tiny_lm(), 0.8, "sdpa")
    prepare_layers(compiled.lm, checkpointing, compiled=True, backend=PARTITIONED)
    warm_up, later = random_rows(2), random_rows(20, seed=1)
    for row in warm_up:
        step(compiled, row)
    assert graphs() == (1, 0)                    # both layers, at every length
    for row in later:
        for a, b in zip(step(compiled, row), step(plain, row)):
            assert relative(a, b) < 1e-5
    assert graphs() == (1, 0) and len({len(row.end) for row in later}) > 15


def test_inductor_is_told_to_make_no_guard_of_a_rows_length():
    """Its sizes for the fusion of a norm's two gradients, which only a GPU's code has."""
    from torch._inductor.config import triton
    with torch._inductor.config.patch({"triton.mix_order_reduction_non_strict_mode": False}):
        prepare_layers(tiny_lm(), False, compiled=True)
        assert triton.mix_order_reduction_non_strict_mode


def test_compiled_layers_take_copied_weights_without_compiling_again(graphs):
    plain, compiled = Policy(tiny_lm(), 1.0, "sdpa"), Policy(tiny_lm(), 1.0, "sdpa")
    prepare_layers(compiled.lm, True, compiled=True, backend="eager")
    for policy in (plain, compiled):
        policy.compute_weights = ComputeCopies(policy, torch.bfloat16)
    for row in random_rows(5):
        assert relative(step(compiled, row)[1], step(plain, row)[1]) < 0.02
        assert graphs() == (1, 0)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_with_the_hubs_kernel_what_surrounds_it_is_compiled_once(checkpointing, graphs, hub):
    """It breaks the graph; inside a checkpoint nothing of a broken graph would be compiled."""
    plain, compiled = Policy(tiny_lm(), 1.0, "sdpa"), Policy(tiny_lm(), 1.0, "hub")
    prepare_layers(compiled.lm, checkpointing, compiled=True, broken=True, backend="eager")
    for row in random_rows(2):
        step(compiled, row)
    found = graphs()
    assert found[0] >= 2
    for row in random_rows(5, seed=1):
        assert relative(step(compiled, row)[1], step(plain, row)[1]) < 1e-5
    assert graphs() == found


# Activation checkpointing

@pytest.mark.parametrize("make", [tiny_lm, tiny_moe])
def test_selective_checkpointing_recomputes_no_product_and_no_attention(make):
    row, ran, gradients = random_rows(1)[0], {}, {}
    for checkpointing in (False, True, "selective"):
        policy = Policy(make(), 1.0, "sdpa")
        prepare_layers(policy.lm, checkpointing, compiled=False)
        logprobs = policy(tensors_of(row)[0])[0]
        with CountOps() as count:
            logprobs.sum().backward()
        ran[checkpointing] = [count[f"aten::{name}"] for name in ("mm", "_grouped_mm", "_scaled_dot_product_flash_attention_for_cpu", "rsqrt")]
        gradients[checkpointing] = torch.cat([p.grad.flatten() for p in policy.parameters()])
    products, grouped, attended, norms = zip(*ran.values())
    assert products[0] == products[2] < products[1]
    assert grouped[0] == grouped[2] and (grouped[1] > grouped[0] or make is tiny_lm)
    assert attended == (0, 2, 0)
    assert norms[0] == 0 and norms[1] == norms[2] > 0            # the rest is recomputed
    assert torch.equal(gradients[True], gradients[False]) and torch.equal(gradients["selective"], gradients[False])


def test_what_is_kept_is_known_by_name_so_a_hub_build_under_any_namespace_counts():
    from torch.utils.checkpoint import CheckpointPolicy
    library = torch.library.Library("_flash_attn3_4f2a1b", "FRAGMENT")
    for name in ("_flash_attn_forward", "_flash_attn_backward"):
        library.define(f"{name}(Tensor x) -> Tensor")
    hub_ops = torch.ops._flash_attn3_4f2a1b
    assert model._keep(None, hub_ops._flash_attn_forward.default) == CheckpointPolicy.MUST_SAVE
    assert model._keep(None, torch.ops.higher_order.flex_attention) == CheckpointPolicy.MUST_SAVE
    for op in (hub_ops._flash_attn_backward.default, torch.ops.aten.mm.out, torch.ops.aten.mul.Tensor, torch.ops.aten.bmm.default):
        assert model._keep(None, op) == CheckpointPolicy.PREFER_RECOMPUTE


# Copies of the weights in bf16

def with_copies(checkpointing=False, make=tiny_lm, **changes):
    policy = Policy(make(**changes), 1.0, "sdpa")
    prepare_layers(policy.lm, checkpointing, compiled=False)
    policy.compute_weights = ComputeCopies(policy, torch.bfloat16)
    return policy


def in_bf16(**changes):
    policy = Policy(tiny_lm(**changes), 1.0, "sdpa")
    for p in policy.parameters():
        p.data = p.data.bfloat16()               # not buffers: the rotary frequencies stay fp32
    return policy


def backward(policy, row):
    with policy.compute_weights:
        policy(tensors_of(row)[0])[0].sum().backward()
    return {name: p.grad for name, p in policy.named_parameters()}


def held(policy):
    return sum(group.buffer.untyped_storage().size() for group in policy.compute_weights.groups)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("checkpointing", [False, True, "selective"])
def test_gradients_of_copied_weights_are_those_of_a_bf16_model_in_fp32(checkpointing, tied):
    row, policy = random_rows(1)[0], with_copies(checkpointing, tied=tied)
    wanted = backward(in_bf16(tied=tied), row)
    for name, grad in backward(policy, row).items():
        assert grad.dtype == torch.float32 and relative(grad, wanted[name].float()) < 2 ** -8


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_of_several_rows_are_summed_in_fp32_where_bf16_loses_some(checkpointing):
    several, copies, rounded = random_rows(6), with_copies(checkpointing), in_bf16()
    apart = [backward(with_copies(checkpointing), row) for row in several]
    for row in several:
        found, lossy = backward(copies, row), backward(rounded, row)
    exact = {name: torch.stack([grads[name].double() for grads in apart]).sum(0) for name in found}
    assert all(relative(found[name], exact[name]) < 1e-6 for name in exact)
    assert all(relative(lossy[name].double(), exact[name]) > 1e-3 for name in exact)


def test_the_masters_are_back_after_the_block_and_after_an_error_in_it():
    policy = with_copies()
    masters = dict(policy.named_parameters())

    def back():
        return all(p is masters[name] and p.dtype == torch.float32 for name, p in policy.named_parameters()) and held(policy) == 0
    assert back()
    with policy.compute_weights:
        inside = dict(policy.named_parameters())
        assert inside.keys() == masters.keys()
        assert all(p.dtype == torch.bfloat16 and torch.equal(p, masters[name].bfloat16()) for name, p in inside.items())
    assert back()
    with pytest.raises(ZeroDivisionError), policy.compute_weights:
        policy(tensors_of(random_rows(1)[0])[0])
        1 / 0
    assert back() and all(p.grad is None for p in masters.values())
    with torch.no_grad(), policy.compute_weights:
        policy(tensors_of(random_rows(1)[0])[0])
    assert back()
    wanted = backward(with_copies(), random_rows(1)[0])          # and the next row is none the worse for it
    assert all(torch.equal(grad, wanted[name]) for name, grad in backward(policy, random_rows(1)[0]).items())


def test_copies_follow_the_masters_from_step_to_step():
    policy, row = with_copies(), random_rows(1)[0]
    backward(policy, row)
    with torch.no_grad():
        for p in policy.parameters():
            p -= 0.1 * p.grad
            p.grad = None
    other = in_bf16()
    for p, master in zip(other.parameters(), policy.parameters()):
        p.data = master.data.bfloat16()
    wanted = backward(other, row)
    assert all(relative(grad, wanted[name].float()) < 2 ** -8 for name, grad in backward(policy, row).items())


@pytest.mark.parametrize("checkpointing", [False, True, "selective"])
def test_each_layers_copies_are_freed_as_soon_as_its_gradients_are_complete(checkpointing):
    policy, freed = with_copies(checkpointing), []
    groups = policy.compute_weights.groups
    with policy.compute_weights:
        logprobs = policy(tensors_of(random_rows(1)[0])[0])[0]
        assert held(policy) == sum(group.nbytes for group in groups)
        for group in groups:
            group.copies[0].register_post_accumulate_grad_hook(lambda _: freed.append([g.buffer.untyped_storage().size() == 0 for g in groups]))
        logprobs.sum().backward()
        assert held(policy) == 0 and all(p.grad is not None for group in groups for p in group.masters)
    assert [sum(state) for state in freed][-1] >= 2 and held(policy) == 0      # both layers' before the embedding's gradient was there


def test_a_frozen_parameter_gets_no_gradient_and_a_frozen_layer_no_copy():
    policy = Policy(tiny_lm(), 1.0, "sdpa")
    frozen = {f"lm.model.layers.0.{name}" for name, _ in policy.lm.model.layers[0].named_parameters()} | {"lm.model.layers.1.mlp.up_proj.weight"}
    for name, p in policy.named_parameters():
        p.requires_grad_(name not in frozen)
        if name in frozen:
            p.data = p.data.bfloat16()
    policy.compute_weights = ComputeCopies(policy, torch.bfloat16)
    row = random_rows(1)[0]
    found, wanted = backward(policy, row), backward(in_bf16(), row)
    assert {name for name, grad in found.items() if grad is None} == frozen
    assert all(relative(found[name], wanted[name].float()) < 2 ** -8 for name in found.keys() - frozen)


def test_a_parameter_without_a_gradient_in_a_row_does_not_hold_the_others_back():
    def with_unused(policy):
        policy.lm.model.layers[0].register_parameter("unused", torch.nn.Parameter(torch.ones(3)))
        return policy
    policy, rows_ = with_unused(Policy(tiny_lm(), 1.0, "sdpa")), random_rows(2)
    policy.compute_weights = ComputeCopies(policy, torch.bfloat16)
    plain = with_copies()
    for row in rows_:
        found, wanted = backward(policy, row), backward(plain, row)
        assert held(policy) == 0 and found["lm.model.layers.0.unused"] is None
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_experts_that_no_token_chose_have_gradient_zero():
    policy, row = with_copies(make=tiny_moe), pack_row([make_sample([1, 2], 1)])
    grads = backward(policy, row)
    experts = [grad for name, grad in grads.items() if "experts" in name]
    assert experts and all(grad.dtype == torch.float32 and (grad.flatten(1).norm(dim=1) == 0).any() for grad in experts) and held(policy) == 0


SIGNATURE = dict(scale="fp32", softcap="fp32", LSE="*fp32", DELTA="*fp32") | dict.fromkeys(("INDEX", "COUNTS", "ORDER", "END", "POSITION"), "*i32") | (
    dict.fromkeys(("Q", "K", "V", "OUT", "DO", "DQ", "DK", "DV"), "*bf16"))


def compiled_for_hopper(name, kernel, width):
    """A kernel of tree_kernel.py as ptxas makes it for sm_90, without a GPU."""
    import tree_kernel
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile as compile_kernel
    function, query = getattr(tree_kernel, kernel), torch.empty(1, 16, 64, width, dtype=torch.bfloat16)
    constants = dict(SHARED=2, D=width, WIDTH=width, BLOCK=tree_kernel.BLOCK, WINDOW=0, CAPPED=False, PRECISION="tf32")
    constants |= {} if name == "keys" else dict(STACK=tree_kernel._stack(query, query[:, :8]))
    signature = {argument: "constexpr" if argument in constants else SIGNATURE.get(argument, "i32") for argument in function.arg_names}
    aligned = {(n,): [["tt.divisibility", 16]] for n, (argument, kind) in enumerate(signature.items()) if kind[0] == "*" or argument.endswith(("_head", "_token"))}     # else nothing is loaded ahead
    source = ASTSource(function, signature, constexprs={(function.arg_names.index(key),): value for key, value in constants.items()}, attrs=aligned)
    return compile_kernel(source, target=GPUTarget("cuda", 90, 32), options=tree_kernel._launch(name, query)).metadata


@pytest.mark.parametrize("name,kernel", [("forward", "_forward"), ("queries", "_backward_queries"), ("keys", "_backward_keys")])
def test_the_widest_kernels_fit_into_a_hoppers_shared_memory(name, kernel):
    """Heads of 256 channels (Qwen3.5, Gemma) in bf16; the interpreter knows no such limit."""
    assert compiled_for_hopper(name, kernel, 256).shared <= 232_448


def test_two_programs_of_the_usual_forward_fit_on_a_hoppers_multiprocessor():
    """233,472 bytes of shared memory, of which each program costs 1,024 more, and 65,536 registers."""
    made = compiled_for_hopper("forward", "_forward", 128)
    assert 2 * (made.shared + 1024) <= 233_472 and 2 * 32 * made.num_warps * made.maxnreg <= 65_536


def test_rows_for_a_gpu_end_with_a_tile_of_flex_attention():
    """Its backward reads the log-sum-exp and delta of queries beyond the row and multiplies by 0, which is nan where they are not finite."""
    lengths = [len(pack_row([make_sample(list(range(n)), n - 1)], attention.MULTIPLE).end) for n in (2, 64, 127, 128, 129, 192, 320)]
    assert lengths == [attention.TILE * tiles for tiles in (1, 1, 1, 1, 2, 2, 3)]
