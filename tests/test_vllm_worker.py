"""The copy plan without vLLM: which loaders can be followed, that tracing writes nothing, and what sends a model back to vLLM's own reload."""
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from vllm_worker import CopyPlan, open_group, trace_copies, view


class Fused(nn.Module):
    """q, k, v in one parameter as vLLM holds them, for rank 1 of 2 (each has half of the rows); an embedding padded from 5 to 8 rows."""

    def __init__(self, scale=1.0, pad=0.0):
        super().__init__()
        self.qkv, self.embed = nn.Parameter(torch.randn(9, 4)), nn.Parameter(torch.randn(8, 4))
        self.scale, self.pad = scale, pad

    def load_weights(self, weights):
        for name, tensor in weights:
            if name == "embed":
                self.embed.data[:5].copy_(tensor)
                self.embed.data[5:].fill_(self.pad)
            elif name == "unknown":
                raise KeyError(name)
            else:
                at = "qkv".index(name) * 3
                half = tensor.narrow(0, 3, 3)
                self.qkv.data[at:at + 3].copy_(half if self.scale == 1 else half * self.scale)


def sent(*names, seed=0):
    """(buffer, [(name, view of it)])"""
    torch.manual_seed(seed)
    shapes = dict(q=(6, 4), k=(6, 4), v=(6, 4), embed=(5, 4), unknown=(2,))
    sizes = [torch.Size(shapes[name]).numel() * 4 for name in names]
    buffer, layout, at = torch.randn(sum(sizes) // 4).view(torch.uint8), [], 0
    for name, size in zip(names, sizes):
        layout.append((name, view(buffer, "float32", shapes[name], at)))
        at += size
    return buffer, layout


def test_a_plan_puts_later_weights_where_the_loader_would_padding_and_slices_included():
    model, (buffer, layout) = Fused(), sent("q", "k", "v", "embed")
    model.load_weights(layout)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    copies, reason = trace_copies(model, layout)
    assert reason is None and all(torch.equal(p, before[name]) for name, p in model.named_parameters()), "tracing writes nothing"
    buffer.copy_(sent("q", "k", "v", "embed", seed=1)[0])
    twin = Fused()
    twin.load_weights(layout)
    torch._foreach_copy_(*map(list, zip(*copies)))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters())) and not torch.equal(model.qkv, before["qkv"])


@pytest.mark.parametrize("model,names,words", [
    (Fused(scale=2.0), "qkv", "computes new values"), (Fused(), ("q", "unknown"), "KeyError"), (Fused(), (), "copies nothing")])
def test_a_loader_that_cannot_be_followed_is_named(model, names, words):
    _, layout = sent(*names)
    if "unknown" not in names:
        model.load_weights(layout)
    assert words in trace_copies(model, layout)[1]


def test_a_model_that_does_not_hold_what_was_sent_is_not_trusted_to_a_plan():
    """Weights that vLLM rearranges after loading."""
    model, (_, layout) = Fused(), sent("q", "k", "v")
    model.load_weights(layout)
    with torch.no_grad():
        model.qkv.copy_(model.qkv.flip(1))
    assert "does not hold" in trace_copies(model, layout)[1]
    model, (_, layout) = Fused(), sent("embed")
    model.load_weights(layout)
    model.pad = 1.0
    assert "fill_" in trace_copies(model, layout)[1]


@pytest.mark.parametrize("name", ["kv_lora_rank", "W_UK_T", "W_UV"])
def test_a_model_that_computes_with_what_was_derived_from_its_weights_is_not_trusted_to_a_plan(name):
    """Latent attention multiplies kv_b_proj in once after loading: copied into, the parameter is new and what the forward uses is old."""
    model, (_, layout) = nn.Sequential(Fused()), sent("q", "k", "v")
    model.load_weights = model[0].load_weights
    model.load_weights(layout)
    assert trace_copies(model, layout)[1] is None
    setattr(model[0], name, torch.zeros(2))
    assert "latent attention" in trace_copies(model, layout)[1]


def worker_of(model, buffer, chunks, reloads):
    """One as vLLM makes it, whose own reload is the model's."""
    worker = CopyPlan()
    worker.device, worker.model_runner, worker.rank = torch.device("cpu"), SimpleNamespace(get_model=lambda: model), 0
    worker.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_index=0, world_size=1))
    worker._reload = lambda chunk: (reloads.append(chunk), model.load_weights(worker.sync_chunks[chunk]))
    worker.attach_weights(buffer, chunks)
    return worker


CHUNKS = [[["q", "float32", [6, 4], 0], ["k", "float32", [6, 4], 96]], [["v", "float32", [6, 4], 0], ["embed", "float32", [5, 4], 96]]]
NAMES = ("q", "k"), ("v", "embed")


def loaded(seed):
    """A model to which vLLM's loader gave what `seed` sends."""
    twin = Fused()
    for names in NAMES:
        twin.load_weights(sent(*names, seed=seed)[1])
    return twin


def same(model, twin):
    return all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters()))


def test_chunks_are_reloaded_until_all_of_them_are_learnt_and_then_copied(tmp_path):
    """Two chunks in one buffer, one after the other, as a large model is sent."""
    model, reloads, size = Fused(), [], 192
    buffer = torch.from_file(str(tmp_path / "buffer"), shared=True, size=size, dtype=torch.uint8)
    worker = worker_of(model, dict(file=str(tmp_path / "buffer"), bytes=size), CHUNKS, reloads)
    for seed in range(3):
        for chunk, names in enumerate(NAMES):
            content = sent(*names, seed=seed)[0]
            buffer[:content.numel()] = content
            reply = worker.load_weights_chunk(chunk)
        assert reply["by_plan"] and reply["reason"] is None and reloads == [0, 1] and same(model, loaded(seed))


def test_chunks_broadcast_to_a_worker_are_reloaded_once_and_then_copied():
    model, reloads = Fused(), []
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    with ThreadPoolExecutor(1) as server:
        worker = server.submit(worker_of, model, dict(address="127.0.0.1", port=port, world_size=2, bytes=192), CHUNKS, reloads)
        group = open_group("127.0.0.1", port, 0, 2, torch.device("cpu"))
        worker = worker.result()
        for seed in range(3):
            reply = server.submit(worker.receive_weights)
            for names in NAMES:
                group.broadcast(sent(*names, seed=seed)[0], 0)
            assert reply.result()["by_plan"] and reloads == [0, 1] and same(model, loaded(seed))


def test_a_model_without_a_plan_is_reloaded_each_time_and_says_why(tmp_path):
    model, reloads = Fused(scale=2.0), []
    buffer = torch.from_file(str(tmp_path / "buffer"), shared=True, size=192, dtype=torch.uint8)
    worker = worker_of(model, dict(file=str(tmp_path / "buffer"), bytes=192), CHUNKS, reloads)
    for seed in range(2):
        for chunk, names in enumerate(NAMES):
            content = sent(*names, seed=seed)[0]
            buffer[:content.numel()] = content
            reply = worker.load_weights_chunk(chunk)
        assert not reply["by_plan"] and "computes new values" in reply["reason"]
    assert reloads == [0, 1, 0, 1] and worker.sync_kept is None


def test_a_load_that_was_cut_short_is_closed_before_the_next_begins(monkeypatch, tmp_path):
    """vLLM keeps what it has of a layer that is not whole, and would count it towards the next load."""
    calls, model = [], SimpleNamespace(parameters=list, buffers=list, load_weights=lambda weights: calls.append([name for name, _ in weights]))
    monkeypatch.setitem(sys.modules, "vllm.config", SimpleNamespace(set_current_vllm_config=lambda config: nullcontext()))
    monkeypatch.setitem(sys.modules, "vllm.model_executor.model_loader.reload", SimpleNamespace(
        initialize_layerwise_reload=lambda model: calls.append("begin"), finalize_layerwise_reload=lambda model, config: calls.append("end")))
    worker = worker_of(model, dict(file=str(tmp_path / "buffer"), bytes=192), CHUNKS, [])
    worker._reload, worker.model_config, worker.sync_kept = partial(CopyPlan._reload, worker), None, None
    for chunk in (0, 0, 1, 0, 1):
        worker.load_weights_chunk(chunk)
    first, second = map(list, NAMES)
    assert calls == ["begin", first, "end", "begin", first, second, "end", "begin", first, second, "end"]
