"""What is sent: every tensor, whole, in one order on all ranks, under the names that were announced; and failures that all ranks see."""
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import make_sample, tensors_of, tiny_lm, tiny_lora, tiny_moe

from model import Policy
from packing import pack_row
from weights import announced, gathered_weights, pieces

WORKER = Path(__file__).with_name("sync_worker.py")


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request, tmp_path_factory):
    """What each rank saw: two processes of torchrun's, in which sets have orders of their own, and three forks of one."""
    out, n = tmp_path_factory.mktemp("sync") / "out", str(request.param)
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", n, str(WORKER), str(out)] if n == "2" else [str(WORKER), str(out), n]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(Path(f"{out}.{n}.{rank}.json").read_text()) for rank in range(request.param)]


def test_ranks_gather_the_unsharded_policys_tensors_bitwise_in_one_order_as_announced(ranks):
    """A gather that some rank leaves out, or a name that goes out twice, once stopped such systems for ever or sent old halves."""
    for kind, first in ranks[0]["gather"].items():
        assert first["same"] and first["announced"] and first["count"] > 10, kind
        assert len({rank["gather"][kind]["gathers"] for rank in ranks}) == 1 and first["gathers"] > 10, kind


@pytest.mark.parametrize("phase", ["pause", "start", "transfer", "writing", "finish", "resume"])
def test_a_failure_at_any_phase_is_raised_on_all_ranks_after_the_same_gathers(ranks, phase):
    seen = [rank["failures"][phase] for rank in ranks]
    assert all(f"phase '{phase}'" in one["error"] and one["seconds"] < 120 for one in seen), seen
    assert len({one["gathers"] for one in seen}) == 1 and seen[0]["gathers"] == ranks[0]["failures"]["null"]["gathers"] and seen[0]["chunks"] > 2
    resumed = [path for path in seen[0]["asked"] if path == "/resume"]
    assert len(resumed) == (phase in ("pause", "resume")), "half new weights never serve, whole old ones may"


def test_after_a_failure_the_next_sync_works(ranks):
    assert all(rank["failures"]["null"]["error"] is None for rank in ranks)


def test_adapters_train_in_fp32_beside_a_frozen_base_in_bf16_on_several_ranks(ranks):
    with torch.no_grad():
        exact = tiny_lora()(tensors_of(pack_row([make_sample(range(3, 20), 4)]))[0])[0]
    for rank in ranks:
        mixed = rank["mixed"]
        assert mixed["trained"] == mixed["adapters"] and mixed["dtypes"] == ["torch.float32"]
        torch.testing.assert_close(torch.tensor(mixed["logprobs"]), exact, rtol=0, atol=0.15)


@pytest.mark.parametrize("make", [lambda: Policy(tiny_lm(), 1.0, "sdpa"), lambda: Policy(tiny_moe(), 1.0, "sdpa"), tiny_lora])
def test_the_announced_list_is_the_sent_list(group, make):
    policy = make()
    sent = gathered_weights(policy, torch.bfloat16)
    assert [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in sent.items()] == announced(policy.lm, pieces(policy, torch.bfloat16))


def test_frozen_parameters_stay_at_home_unless_the_server_fuses_them_with_trained_ones(group):
    policy = Policy(tiny_lm(), 1.0, "sdpa")
    for name, p in policy.lm.named_parameters():
        p.requires_grad_(name.endswith("layers.1.self_attn.q_proj.weight") or name.endswith("model.norm.weight"))
    prefix = "model.layers.1.self_attn."
    assert list(gathered_weights(policy, torch.float32)) == [*(f"{prefix}{x}_proj.weight" for x in "qkvo"), "model.norm.weight"]


def test_an_update_too_small_for_the_servers_dtype_stays_in_the_masters(group):
    policy = Policy(tiny_lm(), 1.0, "sdpa")
    before = gathered_weights(policy, torch.bfloat16)["model.norm.weight"]
    with torch.no_grad():
        policy.lm.model.norm.weight += 1e-6
    assert torch.equal(gathered_weights(policy, torch.bfloat16)["model.norm.weight"], before)
    assert policy.lm.model.norm.weight.dtype == torch.float32 and policy.lm.model.norm.weight[0] != 1
