"""One training step (forward, backward, AdamW) on one GPU: ours beside TRL's packing, attention and head on the same samples.

    python bench/step.py [shape=1.7B] [checkpointing=false] [sharing=true] [trl=true] [backend=auto] [groups=3] [rollouts=8] [prompt=512]
                         [shortest=256] [longest=768] [repeats=10] [seed=6661] [random=20]

shape: 0.6B, 1.7B or 4B (Qwen3), or 2B-hybrid (Qwen3.5); random weights, fp32 masters, bf16 compute. One JSON object a line.
Trained tokens are the same on both sides, so the ratio of tokens/s is that of the seconds. TRL trains through the classes of its
asynchronous trainer under accelerate's bf16 autocast; its attention kernel comes from the Hub, and torch's own varlen flash
attention stands in for it here. Ours takes the sampler's top 8 tokens into account, TRL's loss does not have them.
random=20 trains on as many random rows after the warm-up instead, and counts the graphs that torch compiles meanwhile.
sharing=false packs every sample by itself (plain padding-free packing) and gives the base of the tree's own speed-up.
"""
import gc
import json
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import attention  # noqa: E402
from flops import cost_of, step_flops  # noqa: E402
from head import measure  # noqa: E402
from loss import Objective  # noqa: E402
from model import Policy, attention_shapes, kept_logits, prepare_layers  # noqa: E402
from packing import Sample, pack_row  # noqa: E402
from planning import Share  # noqa: E402
from shard import shard  # noqa: E402
from train import forward_backward  # noqa: E402

SHAPES = {"0.6B": dict(hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16),
          "1.7B": dict(hidden_size=2048, intermediate_size=6144, num_hidden_layers=28, num_attention_heads=16),
          "4B": dict(hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32)}
PEAK_FLOPS = 989e12      # bf16, dense: H100 and H200 SXM


def make_samples(groups, rollouts, prompt, shortest, longest, seed, vocab=151_936, top_k=8):
    """Groups with a common prompt. Without a common token anywhere else."""
    rng = np.random.default_rng(seed)
    lengths, samples = rng.integers(shortest, longest + 1, (groups, rollouts)), []
    for group in range(groups):
        head = rng.integers(0, vocab, prompt)
        for length in lengths[group]:
            trained = np.arange(prompt, prompt + length, dtype=np.int32)
            samples.append(Sample(np.concatenate([head, rng.integers(0, vocab, length)]).astype(np.int32), trained, np.full(length, -12.0, np.float32),
                                  rng.integers(0, vocab, (length, top_k)).astype(np.int32), np.full((length, top_k), -12.0, np.float32),
                                  float(rng.normal()), group, 0))
    return samples


def make_lm(shape, implementation):
    from transformers import AutoModelForCausalLM, Qwen3_5TextConfig, Qwen3Config
    if shape == "2B-hybrid":
        config = Qwen3_5TextConfig(hidden_size=2048, intermediate_size=6144, num_hidden_layers=24, num_attention_heads=8, num_key_value_heads=2, head_dim=256,
                                   linear_num_value_heads=16, tie_word_embeddings=True)
    else:
        config = Qwen3Config(**SHAPES[shape], num_key_value_heads=8, head_dim=128, tie_word_embeddings=True, vocab_size=151_936, rope_theta=1e6)
    torch.manual_seed(0)
    with torch.device("cuda"):
        return AutoModelForCausalLM.from_config(config, attn_implementation=implementation, dtype=torch.float32).train()


def warmed(step, repeats):
    """(median milliseconds, peak bytes, seconds of the first step) of `step`."""
    started = time.perf_counter()
    step()
    torch.cuda.synchronize()
    first = time.perf_counter() - started
    return *measure(step, repeats), first


def adamw(module):
    return torch.optim.AdamW(module.parameters(), lr=1e-6, fused=True)


def make_ours(shape, checkpointing, compiled, backend):
    """(a function that trains one step on a row, the model's config)"""
    attention.register()
    lm = make_lm(shape, attention.NAME)
    prepare_layers(lm, checkpointing, compiled)
    policy = shard(Policy(lm, 1.0, attention.choose_backend(backend, torch.device("cuda"), shapes=attention_shapes(lm)), keep_logits=kept_logits(checkpointing, lm)), dist.init_device_mesh("cuda", (1,)), torch.bfloat16)
    optimizer = adamw(policy)

    def step(row):
        forward_backward(policy, Objective(), Share([row], [float(len(row.targets))], [row.num_tokens], [1.0]), torch.device("cuda"))
        optimizer.step()
        optimizer.zero_grad()
    return step, lm.config


def ours(shape, checkpointing, row, repeats, compiled, backend):
    step, config = make_ours(shape, checkpointing, compiled, backend)
    return warmed(lambda: step(row), repeats), step_flops(cost_of(config), [row])


def random_rows(shape, checkpointing, row, rows, compiled, backend, seed):
    """Train on `row` until nothing compiles any more, then on random ones, counting the graphs that torch compiles."""
    rng, graphs = np.random.default_rng(seed), torch._dynamo.utils.counters["stats"]
    step, _ = make_ours(shape, checkpointing, compiled, backend)
    started, steps, before = time.perf_counter(), 0, -1
    while graphs["unique_graphs"] != before:
        before = graphs["unique_graphs"]
        step(row if steps != 1 else draw_row(rng))
        steps += 1
    torch.cuda.synchronize()
    warm_up, seconds = time.perf_counter() - started, []
    for _ in range(rows):
        drawn = draw_row(rng)
        started = time.perf_counter()
        step(drawn)
        torch.cuda.synchronize()
        seconds.append((time.perf_counter() - started) / drawn.num_tokens)
    return dict(bench="random_rows", shape=shape, checkpointing=checkpointing, rows=rows, recompilations=graphs["unique_graphs"] - before, warm_up_s=round(warm_up, 1),
                warm_up_steps=steps, median_us_per_token=round(1e6 * statistics.median(seconds), 2), worst_us_per_token=round(1e6 * max(seconds), 2))


def draw_row(rng):
    groups, rollouts, prompt, shortest = (int(rng.integers(*bounds)) for bounds in ((1, 4), (2, 9), (16, 1025), (1, 257)))
    return pack_row(make_samples(groups, rollouts, prompt, shortest, int(rng.integers(shortest, 769)), int(rng.integers(1 << 31))), attention.MULTIPLE)


def theirs(shape, checkpointing, samples, repeats):
    from accelerate import Accelerator
    from torch.nn.attention.varlen import varlen_attn
    from trl.experimental.async_grpo import packing
    from trl.trainer.utils import add_fused_lm_head

    class VarlenFlash:
        @staticmethod
        def flash_attn_varlen_func(q, k, v, cu_q, cu_k, max_q, max_k, softmax_scale, causal, window_size):
            return varlen_attn(q, k, v, cu_q, cu_k, max_q, max_k, scale=softmax_scale, window_size=(-1, 0))
    packing._flash_attn = lambda: VarlenFlash
    packing.register_tree_attention()
    lm = make_lm(shape, packing.TREE_ATTENTION)
    add_fused_lm_head(lm, outputs=("log_probs", "entropy"))
    if checkpointing:
        lm.gradient_checkpointing_enable(dict(use_reentrant=False))
    model = Accelerator(mixed_precision="bf16").prepare_model(lm)
    optimizer = adamw(lm)
    row = packing.TreeRow()
    for sample in samples:
        mask, old = torch.zeros(2, len(sample.input_ids))
        mask[sample.trained_index], old[sample.trained_index] = 1, torch.tensor(sample.sampler_logprobs)
        row.add(dict(input_ids=torch.tensor(sample.input_ids), completion_mask=mask, old_log_probs=old, advantage=sample.advantage,
                     group_id=sample.group_id))
    batch = {name: value.cuda() for name, value in row.pack().items()}
    max_q, max_k = batch["tree_max_seqlens"].tolist()
    inputs = {name: batch[name][None] for name in ("input_ids", "position_ids", "shift_labels")}
    inputs |= {name: batch[name] for name in ("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k")}

    def step():
        out = model(**inputs, fused_lm_head=True, tree_max_seqlen_q=max_q, tree_max_seqlen_k=max_k)
        ratio = torch.exp(out.log_probs.flatten()[batch["token_index"]] - batch["old_log_probs"])
        advantages = batch["advantages"]
        loss = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).sum() / len(advantages)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return warmed(step, repeats)


def main(shape="1.7B", checkpointing="false", sharing="true", trl="true", compiled="true", backend="auto", groups=3, rollouts=8, prompt=512, shortest=256,
         longest=768, repeats=10, seed=6661, random=0):
    samples = make_samples(int(groups), int(rollouts), int(prompt), int(shortest), int(longest), int(seed))
    checkpointing = {"true": True, "false": False}.get(checkpointing, checkpointing)
    if sharing == "false":
        for i, sample in enumerate(samples):        # another first token each: the same lengths and terms, nothing to share
            sample.input_ids[0] = i
    row = pack_row(samples, attention.MULTIPLE)
    if int(random):
        return print(json.dumps(random_rows(shape, checkpointing, row, int(random), compiled == "true", backend, int(seed))), flush=True)
    (ms, peak, warm_up), work = ours(shape, checkpointing, row, int(repeats), compiled == "true", backend)
    line = dict(bench="step", shape=shape, checkpointing=checkpointing, gpu=torch.cuda.get_device_name(), tokens=row.num_tokens, padded_tokens=len(row.input_ids),
                trained_tokens=len(row.targets), packing_ratio=round(row.raw_tokens / row.num_tokens, 3), ours_ms=round(ms, 1),
                ours_trained_tokens_per_s=round(1e3 * len(row.targets) / ms), ours_mfu_ratio=round(1e3 * work / ms / PEAK_FLOPS, 4),
                ours_peak_gb=round(peak / 1e9, 2), ours_warm_up_s=round(warm_up, 1))
    if trl == "true" and checkpointing != "selective":          # TRL has no such thing to compare it with
        gc.collect()                                     # ours is gone: the peaks are each side's own
        trl_ms, peak_trl, _ = theirs(shape, bool(checkpointing), samples, int(repeats))
        line |= dict(trl="eager, torch's varlen flash attention for its hub kernel", trl_ms=round(trl_ms, 1), trl_trained_tokens_per_s=round(1e3 * len(row.targets) / trl_ms), trl_peak_gb=round(peak_trl / 1e9, 2),
                     over_trl_ratio=round(trl_ms / ms, 3))
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    main(**dict(argument.split("=") for argument in sys.argv[1:]))
    dist.destroy_process_group()
