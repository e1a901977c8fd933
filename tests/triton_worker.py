"""Run with TRITON_INTERPRET=1: the Triton kernels, on a CPU, against the dense mask in float64. A process of its own, because
triton reads the variable when it is first imported.

    triton_worker.py OUT.json        writes {case: {result: relative error}}
"""
import json
import sys
from pathlib import Path

import numpy as np
import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
from conftest import CountOps, make_sample, random_group, tensors_of, tiny_lm      # noqa: E402

import attention                                                         # noqa: E402
from model import Policy, prepare_layers                                 # noqa: E402
from packing import pack_row                                             # noqa: E402


def rows():
    """Tiles have 64 tokens: of these rows some are wholly visible, some partly, some not at all."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 37, n).tolist() for n in (66, 20)]
    groups = [random_group(rng, g, prompt, 3, 40) for g, prompt in enumerate(prompts)]
    turns = [make_sample([*prompts[0], *turn, *tail], 66) for turn in (range(10, 16), range(20, 36))
             for tail in ([1, 2, 3], rng.integers(0, 37, 30))]
    return dict(shared_prompt=pack_row(groups[0]), two_prompts=pack_row(groups[0] + groups[1]), two_levels=pack_row(turns),
                multiple_of_64=pack_row(turns, 64), one_token=pack_row([make_sample([5], 1)]), only_filler=pack_row([], 64))


CASES = dict(                           # row, heads, groups, width, and what differs from the plain call
    plain=("shared_prompt", 4, 2, 16, {}),
    not_a_multiple_of_the_tile=("two_prompts", 4, 2, 16, {}),
    multiple_of_the_tile=("multiple_of_64", 4, 2, 16, {}),
    odd_number_of_heads_sharing_keys=("two_levels", 3, 1, 16, {}),
    no_shared_keys_heads_before_tokens=("two_levels", 2, 2, 16, dict(layout="heads first")),
    one_key_head_width_before_tokens=("two_levels", 4, 1, 16, dict(layout="width first")),
    width_no_power_of_two=("two_levels", 4, 2, 24, {}),
    scaled=("shared_prompt", 2, 1, 16, dict(scaling=0.7)),
    window=("two_levels", 4, 2, 16, dict(sliding_window=20)),
    window_of_one=("shared_prompt", 2, 1, 16, dict(sliding_window=1)),
    window_wider_than_the_samples=("shared_prompt", 2, 1, 16, dict(sliding_window=500)),
    softcap=("two_levels", 4, 2, 16, dict(softcap=1.5)),
    window_and_softcap=("multiple_of_64", 3, 1, 24, dict(sliding_window=70, softcap=2.0)),
    one_token=("one_token", 4, 2, 16, {}),
    only_filler=("only_filler", 4, 2, 16, {}),
    in_16_bits=("two_levels", 4, 2, 16, dict(dtype="float16")))        # triton's interpreter cannot multiply bf16


def inputs(n, heads, width, generator, dtype, layout):
    """(1, heads, n, width): as a projection gives it, tokens before heads; or contiguous; or with a stride between its numbers."""
    made = dict(zip(("tokens first", "heads first", "width first"), ((1, n, heads, width), (1, heads, n, width), (1, heads, width, n))))[layout]
    x = torch.randn(made, generator=generator).to(dtype)
    return {"tokens first": x.transpose(1, 2), "heads first": x, "width first": x.transpose(2, 3)}[layout].requires_grad_()


def errors(row, heads, groups, width, layout="tokens first", dtype="float32", **options):
    generator, n = torch.Generator().manual_seed(0), len(row.end)
    qkv = [inputs(n, h, width, generator, getattr(torch, dtype), layout) for h in (heads, groups, groups)]
    direction, results = torch.randn(1, n, heads, width, generator=generator).to(qkv[0].dtype), {}
    for backend in ("sdpa", "triton"):
        given = [x.detach().double().requires_grad_() for x in qkv] if backend == "sdpa" else qkv
        tree = tensors_of(row)[0]["tree"].prepare(backend, {options.get("sliding_window")})
        out, _ = attention.tree_attention(None, *given, tree=tree, **options)
        results[backend] = out, *torch.autograd.grad(out, given, direction.to(out.dtype))
    largest = max(x.norm() for x in results["sdpa"])         # of one token alone, the gradients of query and key are 0
    return {name: ((a - b).norm() / b.norm().clamp(min=0.1 * largest)).item()
            for name, a, b in zip(("out", "query", "key", "value"), results["triton"], results["sdpa"])}


def model_errors(checkpointing):
    """A whole model, both backends: the custom op under activation checkpointing."""
    row, results = rows()["two_levels"], {}
    for backend in ("sdpa", "triton"):
        policy = Policy(tiny_lm(num_hidden_layers=1), 0.8, backend)
        prepare_layers(policy.lm, checkpointing, False)
        logprobs = policy(tensors_of(row)[0])[0]
        with CountOps() as count:
            gradients = torch.autograd.grad(logprobs @ torch.linspace(-1, 2, len(logprobs)), list(policy.parameters()))
        results[backend] = logprobs, torch.cat([g.flatten() for g in gradients])
    return dict(logprobs=(results["triton"][0] - results["sdpa"][0]).abs().max().item(), recomputed=count["tree::attention"],
                gradients=((results["triton"][1] - results["sdpa"][1]).norm() / results["sdpa"][1].norm()).item())


if __name__ == "__main__":
    torch.set_num_threads(1)
    made = rows()
    found = {name: errors(made[row], heads, groups, width, **options) for name, (row, heads, groups, width, options) in CASES.items()}
    found |= {f"model, checkpointing {kept}": model_errors(kept) for kept in (True, "selective")}
    Path(sys.argv[1]).write_text(json.dumps(found, indent=1))
