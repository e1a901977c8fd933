"""The fused head on one GPU: time against the bare matrix products it needs, and peak extra memory, beside TRL's fused head.

    python bench/head.py [terms=16384] [hidden=2048] [top_k=8] [repeats=20]

One JSON object a line. The bare products are those of forward, recomputation and the two gradients, over the same blocks.
TRL's head gives the target's log-prob and the entropy; ours also the sampler's top K. It is left out where TRL is missing.
"""
import json
import statistics
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from loss import BLOCK, fused_logprobs  # noqa: E402


def measure(step, repeats, held=0):
    """(median milliseconds, peak bytes beyond `held`) of `step`, after warm-up."""
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        step()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times), torch.cuda.max_memory_allocated() - held


def run(vocab, terms=16384, hidden=2048, top_k=8, repeats=20):
    torch.manual_seed(0)
    h = torch.randn(terms, hidden, device="cuda", dtype=torch.bfloat16).requires_grad_()
    w = (torch.randn(vocab, hidden, device="cuda", dtype=torch.bfloat16) / hidden**0.5).requires_grad_()
    targets = torch.randint(vocab, (terms,), device="cuda")
    top_ids = torch.randint(vocab, (terms, top_k), device="cuda")
    seeds = torch.randn(terms, 1 + top_k, device="cuda")

    def bare():
        with torch.no_grad():
            total = torch.zeros(terms, hidden, device="cuda")
            grad = torch.empty_like(w)
            for start in range(0, vocab, BLOCK):
                part = w[start:start + BLOCK]
                logits = h @ part.T
                logits = h @ part.T
                torch.addmm(total, logits, part, out_dtype=torch.float32, out=total)
                torch.mm(logits.T, h, out=grad[start:start + BLOCK])

    def ours():
        h.grad = w.grad = None
        logprobs, topk, _ = fused_logprobs(h, w, targets, top_ids)
        (torch.cat([logprobs[:, None], topk], 1) * seeds).sum().backward()

    held = torch.cuda.memory_allocated()                     # inputs; gradients count as extra
    results = dict(bare=measure(bare, repeats, held), ours=measure(ours, repeats, held))
    h.grad = w.grad = None
    try:
        from trl.kernels.chunked_logprob import ChunkedLogProbFunction
    except ImportError:
        ChunkedLogProbFunction = None
    if ChunkedLogProbFunction:
        def theirs():
            h.grad = w.grad = None
            logprobs = ChunkedLogProbFunction.apply(h, w, None, targets, 1.0, 32768, None, 1.0, ("log_probs", "entropy"))[0]
            (logprobs * seeds[:, 0]).sum().backward()
        results["trl"] = measure(theirs, repeats, held)
    line = dict(bench="head", vocab=vocab, terms=terms, hidden=hidden, top_k=top_k, gpu=torch.cuda.get_device_name())
    for name, (ms, extra) in results.items():
        line |= {f"{name}_ms": round(ms, 2), f"{name}_peak_extra_gb": round(extra / 1e9, 3)}
    line["over_bare_ratio"] = round(results["ours"][0] / results["bare"][0], 3)
    if "trl" in results:
        line["over_trl_ratio"] = round(results["ours"][0] / results["trl"][0], 3)
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    options = {key: int(value) for key, value in (argument.split("=") for argument in sys.argv[1:])}
    for vocab in (151_936, 248_320):
        run(vocab, **options)
