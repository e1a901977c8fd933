"""Planning and packing one micro-batch on one CPU core: samples in, one row a rank out, beside TRL's packer on the same samples.

    python bench/planner.py [tokens=100000] [rows=8] [group=8] [top_k=8] [budget=16384] [repeats=20]

One JSON object a line, for samples of about 1024 and of about 200 tokens; of each, the first half is its group's prompt. Times are
medians; ours and TRL's take turns. Both place every sample in one micro-batch and lay out all of its rows; ours also carries
the sampler's top K of each trained token. Samples are made outside of both timings, anew each time, so that none comes with
something already computed. TRL's times are left out where TRL is missing.
"""
import json
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from packing import Sample, pack_row, plan_micro_batch  # noqa: E402

VOCAB = 151_936


def make_samples(tokens, length, group, top_k):
    """Groups of `group` samples of one prompt, in all `tokens` tokens; completions are half to one and a half times as long as prompts."""
    rng, samples, prompt = np.random.default_rng(0), [], None
    while tokens > 0:
        group_id, member = divmod(len(samples), group)
        if member == 0:
            prompt = rng.integers(VOCAB, size=length // 2, dtype=np.int32)
        trained = int(rng.integers(length // 4, 3 * length // 4 + 1))
        ids = np.concatenate([prompt, rng.integers(VOCAB, size=trained, dtype=np.int32)])
        logprobs = -rng.random((trained, 1 + top_k), dtype=np.float32)
        samples.append(Sample(ids, np.arange(length // 2, len(ids), dtype=np.int32), logprobs[:, 0].copy(),
                              rng.integers(VOCAB, size=(trained, top_k), dtype=np.int32), logprobs[:, 1:].copy(), 1.0, group_id, 0))
        tokens -= len(ids)
    return samples


def ours(samples, rows, budget):
    planned, left = plan_micro_batch(samples, rows, budget)
    packed = [pack_row(row) for row in planned]
    assert left is None and all(row.num_samples for row in packed)
    return sum(row.num_tokens for row in packed), sum(len(row.targets) for row in packed)


def make_trl():
    """(samples → its sample dicts, the same work as `ours`), or None where TRL is missing."""
    try:
        import torch
        from trl.experimental.async_grpo.async_grpo_trainer import TokenBudgetBatcher, TreeRow
    except ImportError:
        return None
    torch.set_num_threads(1)

    def convert(samples):
        converted = []
        for s in samples:
            mask, logprobs = np.zeros(len(s.input_ids), np.int64), np.zeros(len(s.input_ids), np.float32)
            mask[s.trained_index], logprobs[s.trained_index] = 1, s.sampler_logprobs
            converted.append(dict(input_ids=torch.tensor(s.input_ids, dtype=torch.long), completion_mask=torch.tensor(mask),
                                  old_log_probs=torch.tensor(logprobs), advantage=s.advantage, group_id=s.group_id))
        return converted

    def theirs(samples, rows, budget):
        batcher = TokenBudgetBatcher(samples, rows, budget, {})
        open_rows = [TreeRow() for _ in range(rows)]
        for sample in samples:                   # its iterator's loop: that one gives a micro-batch only once a sample fits nowhere
            batcher._place(open_rows, sample).add(sample)
        packed = [row.pack() for row in open_rows]
        return sum(len(row["input_ids"]) for row in packed), sum(len(row["token_index"]) for row in packed)
    return convert, theirs


def run(length, trl, tokens=100_000, rows=8, group=8, top_k=8, budget=16_384, repeats=20):
    made = make_samples(tokens, length, group, top_k)
    packers = dict(ours=(lambda samples: [replace(s) for s in samples], ours), **({"trl": trl} if trl else {}))
    times, results = {name: [] for name in packers}, {}
    for _ in range(repeats):
        for name, (fresh, packer) in packers.items():
            samples = fresh(made)
            started = time.perf_counter()
            results[name] = packer(samples, rows, budget)
            times[name].append(1e3 * (time.perf_counter() - started))
    line = dict(bench="planner", tokens=sum(len(s.input_ids) for s in made), samples=len(made), rows=rows, top_k=top_k)
    for name, (forwarded, trained) in results.items():
        line |= {f"{name}_ms": round(statistics.median(times[name]), 2), f"{name}_forwarded_tokens": forwarded}
        assert trained == sum(len(s.trained_index) for s in made)
    if trl:
        line["trl_over_ours_ratio"] = round(statistics.median(times["trl"]) / statistics.median(times["ours"]), 2)
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    options = {key: int(value) for key, value in (argument.split("=") for argument in sys.argv[1:])}
    trl = make_trl()
    for length in (1024, 200):
        run(length, trl, **options)
