"""Shared by the tests: tiny models, random samples, and the small real model."""
import ctypes
import os
import sys
import tempfile
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from config import Config          # noqa: E402
from packing import Sample         # noqa: E402

torch.set_num_threads(1)           # tensors are tiny here: two threads on two busy cores wait for each other

SMALL_MODEL = ROOT / "models" / "SmolLM2-135M-Instruct"


def make_sample(ids, trained_from, group_id=0, advantage=1.0, version=0, top_k=3, vocab=37, seed=0):
    """A sample that trains every token from position `trained_from` on, with made-up sampler log-probs."""
    rng = np.random.default_rng(seed)
    trained = np.arange(max(trained_from, 1), len(ids), dtype=np.int32)
    return Sample(np.asarray(ids, np.int32), trained, rng.uniform(-4, -2, len(trained)).astype(np.float32),
                  rng.integers(0, vocab, (len(trained), top_k)).astype(np.int32), rng.uniform(-4, -2, (len(trained), top_k)).astype(np.float32),
                  advantage, group_id, version)


def random_group(rng, group_id, prompt, rollouts, length, vocab=37, top_k=3):
    return [make_sample([*prompt, *rng.integers(0, vocab, rng.integers(1, length + 1))], len(prompt), group_id,
                        float(rng.normal()), top_k=top_k, vocab=vocab, seed=int(rng.integers(1 << 30))) for _ in range(rollouts)]


def until(condition, seconds=60.0):
    """Wait for what happens soon on any machine, however busy: the limit only ends a test that hangs."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def tiny_config(**changes):
    return Config(**(dict(model="tiny", reward_funcs=len, gradient_checkpointing=False, use_cpu=True, bf16=False) | changes))


def tiny_lm(vocab=37, tied=True, dtype=torch.float32, seed=0, **changes):
    """A random Llama with tree attention."""
    import attention
    from transformers import LlamaConfig, LlamaForCausalLM
    attention.register()
    torch.manual_seed(seed)
    config = LlamaConfig(**(dict(vocab_size=vocab, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                                 num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=tied, initializer_range=0.2) | changes))
    config._attn_implementation = attention.NAME
    return LlamaForCausalLM(config).to(dtype)


def tiny_moe(seed=0, vocab=37):
    """A random Qwen3-MoE with 4 experts, 2 of them a token."""
    import attention
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
    attention.register()
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(vocab_size=vocab, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2, num_attention_heads=4,
                            num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2, max_position_embeddings=128, initializer_range=0.2)
    config._attn_implementation = attention.NAME
    return Qwen3MoeForCausalLM(config)


def tiny_lora(seed=0, std=0.05, lm=None, **options):
    """A tiny Llama with LoRA whose B is not zero."""
    import peft
    from adapters import add_adapters
    from model import Policy
    policy = Policy(lm or tiny_lm(), 1.0, "sdpa")
    policy.peft_config = add_adapters(policy.lm, peft.LoraConfig(**(dict(r=4, lora_alpha=8, target_modules="all-linear") | options)))
    torch.manual_seed(seed)
    for name, p in policy.lm.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=std)
    return policy


def alone(policy, sample, implementation="sdpa"):
    """Log-probs of the sample's trained tokens by the model's ordinary causal forward, nothing packed."""
    ids = torch.tensor(sample.input_ids, dtype=torch.int64)
    policy.lm.config._attn_implementation = implementation
    try:
        logits = policy.lm(input_ids=ids[None], use_cache=False).logits[0].double() / policy.temperature
    finally:
        policy.lm.config._attn_implementation = "tree"
    return logits.log_softmax(-1)[sample.trained_index - 1].gather(1, ids[sample.trained_index][:, None])[:, 0]


def tensors_of(row):
    from model import to_device
    return to_device(row, torch.device("cpu"))


def varlen_attention(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale=None, causal=False,
                     window_size=(-1, -1), softcap=0.0, deterministic=False):
    """Stand-in for the hub's kernels, with their signature: sequence after sequence, the mask aligned to the bottom right.

    q (T, H, D), k and v (U, G, D), cu_seqlens (S + 1,) int32 -> (T, H, D). Computes in fp32 or wider.
    """
    wide, outs = torch.promote_types(q.dtype, torch.float32), []
    for (a, b), (c, d) in zip(pairwise(cu_seqlens_q.tolist()), pairwise(cu_seqlens_k.tolist())):
        keys, values = (x[c:d].to(wide).repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))        # (m, H, D)
        scores = torch.einsum("ihd,jhd->hij", q[a:b].to(wide), keys) * (softmax_scale or q.shape[-1] ** -0.5)  # (H, n, m)
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        ago = torch.arange(d - c - b + a, d - c)[:, None] - torch.arange(d - c)                                # (n, m)
        left, right = window_size[0], 0 if causal else window_size[1]
        hidden = (ago > left if left >= 0 else ago < -d) | (-ago > right if right >= 0 else ago < -d)
        outs.append(torch.einsum("hij,jhd->ihd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values))
    return torch.cat(outs).to(q.dtype)


def forked(ranks, work):
    """`work()` on so many ranks of a gloo group, each a fork of this process: they and further groups share the seconds of its imports."""
    def run(rank, store):
        ctypes.CDLL(None).prctl(1, 9)            # dies with its parent, if that is killed by a test's timeout
        torch.set_num_threads(1)
        dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
        work()
        dist.destroy_process_group()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(run, (f"{folder}/store",), ranks, start_method="fork")


class CountOps(TorchDispatchMode):
    """While entered, counts the operations that run, by name; those whose kept results are reused do not run."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __getitem__(self, name: str) -> int:
        return self.counts[name]

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.counts[op.name()] += 1
        return op(*args, **(kwargs or {}))


def scope(nodeid: str) -> str:
    """What one of several test processes runs: a file, or the files that serve the real model, one after the other."""
    file = nodeid.split("::")[0]
    return "real vLLM" if file.endswith(("test_end_to_end.py", "test_sync_vllm.py")) else file


LONGEST = ("real vLLM", "test_sync.py", "test_feed.py", "test_resume.py", "test_distributed.py", "test_evaluate.py", "test_metrics.py", "test_weights.py", "test_vlm.py")


def pytest_collection_modifyitems(items):
    """The longest first, so that no process is left with one at the end."""
    order = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(scope(item.nodeid).split("/")[-1], len(LONGEST)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    from xdist.scheduler import LoadScopeScheduling

    class ByScope(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return scope(nodeid)
    return ByScope(config, log)


@pytest.fixture(scope="module")
def hub():
    """The hub's kernel module as far as attention.py knows: the stand-in under the repository's name."""
    import attention
    module = SimpleNamespace(flash_attn_varlen_func=varlen_attention)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(attention._hub_kernels, attention.hub_repository(torch.device("cpu"))[0], module)
        yield module


@pytest.fixture(scope="session")
def small_model():
    assert SMALL_MODEL.is_dir(), f"fetch the small model first: make {SMALL_MODEL.relative_to(ROOT)}"
    return str(SMALL_MODEL)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory, small_model):
    """A random one-layer Llama with the small model's tokenizer: loads and saves in no time."""
    from transformers import AutoTokenizer
    folder = tmp_path_factory.mktemp("tiny")
    AutoTokenizer.from_pretrained(small_model).save_pretrained(folder)
    tiny_lm(vocab=49152, num_hidden_layers=1, hidden_size=16).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def untied_folder(tmp_path_factory, small_model):
    """A random Llama with a head of its own, of a size that vLLM takes."""
    from transformers import AutoTokenizer
    folder = tmp_path_factory.mktemp("untied")
    AutoTokenizer.from_pretrained(small_model).save_pretrained(folder)
    tiny_lm(vocab=49152, tied=False, hidden_size=64, num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=2).save_pretrained(folder)
    return str(folder)
