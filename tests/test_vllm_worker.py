"""The copy plan without vLLM: which loaders can be followed, that tracing writes nothing, and what sends a model back to vLLM's own reload."""
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from vllm_worker import CopyPlan, trace_copies, view


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
    torch._foreach_copy_(*copies)
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


def test_chunks_are_reloaded_until_all_of_them_are_learnt_and_then_copied():
    """Two chunks in one buffer, one after the other, as a large model is sent."""
    chunks = [sent("q", "k"), sent("v", "embed", seed=1)]
    model, reloads = Fused(), []
    worker = CopyPlan()
    worker.device, worker.model_runner = torch.device("cpu"), SimpleNamespace(get_model=lambda: model)
    worker.sync_buffer = torch.zeros(max(buffer.numel() for buffer, _ in chunks), dtype=torch.uint8)
    shapes = [[("q", (6, 4), 0), ("k", (6, 4), 96)], [("v", (6, 4), 0), ("embed", (5, 4), 96)]]
    worker.sync_chunks = [[(name, view(worker.sync_buffer, "float32", shape, at)) for name, shape, at in chunk] for chunk in shapes]
    worker.sync_plan, worker.sync_reason = [], "the plan is not complete"
    worker._reload = lambda chunk: (reloads.append(chunk), model.load_weights(worker.sync_chunks[chunk]))

    def push(act, chunks):
        replies = []
        for number, (buffer, _) in enumerate(chunks):
            worker.sync_buffer[:buffer.numel()] = buffer
            replies.append(act(number))
        return replies
    push(worker.load_weights_chunk, chunks)
    assert push(worker.learn_weights_chunk, chunks)[-1] == dict(reason=None, copies=4) and reloads == [0, 1]
    later = [sent("q", "k", seed=2), sent("v", "embed", seed=3)]
    assert all(reply["by_plan"] for reply in push(worker.load_weights_chunk, later)) and reloads == [0, 1]
    twin = Fused()
    for _, layout in later:
        twin.load_weights(layout)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters()))
