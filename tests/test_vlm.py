"""Vision-language checkpoints trained on text: the text model learns as any other, and what lies outside it is loaded, frozen and kept.

Run by torchrun it is its own worker:    test_vlm.py CHECKPOINTS OUT       two folders, the first with one checkpoint a family
"""
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from transformers import AutoModelForImageTextToText, AutoTokenizer

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
from conftest import forked, make_sample, random_group, tensors_of, tiny_config            # noqa: E402

from export import save_model, write_model                                                    # noqa: E402
from config import ConfigError                                                      # noqa: E402
from loss import Objective                                                          # noqa: E402
from model import check_packing, load_policy, make_optimizer  # noqa: E402
from shard import ComputeCopies, shard  # noqa: E402
from packing import pack_row, plan_micro_batch                                      # noqa: E402
from planning import Share, make_step, scatter_step                                 # noqa: E402
from train import forward_backward                                                  # noqa: E402
from weights import gathered_weights                                                 # noqa: E402

CPU, VOCAB = torch.device("cpu"), 64
TEXT = dict(vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
            max_position_embeddings=128, initializer_range=0.3, bos_token_id=1, eos_token_id=2, pad_token_id=2)
QWEN_VISION = dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, patch_size=4, out_hidden_size=16)
MROPE = dict(rope_type="default", rope_theta=100.0, mrope_section=[2, 1, 1])


def configs():
    """A config a family: half of an untied head, half of a tied one; rotary angles large enough for a wrong position to show."""
    hybrid = dict(layer_types=["linear_attention", "full_attention"], linear_num_key_heads=1, linear_num_value_heads=2, linear_key_head_dim=8,
                  linear_value_head_dim=8, rope_parameters=MROPE | dict(partial_rotary_factor=1.0))
    sliding = dict(layer_types=["sliding_attention", "full_attention"], sliding_window=4, query_pre_attn_scalar=8, tie_word_embeddings=True,
                   rope_parameters={kind: dict(rope_type="default", rope_theta=100.0) for kind in ("sliding_attention", "full_attention")})
    siglip = dict(num_hidden_layers=1, hidden_size=16, intermediate_size=16, num_attention_heads=2, image_size=16, patch_size=4)
    return dict(
        qwen3_5=transformers.Qwen3_5Config(text_config=TEXT | hybrid, vision_config=QWEN_VISION | dict(num_position_embeddings=16)),
        qwen3_vl=transformers.Qwen3VLConfig(text_config=TEXT | dict(rope_parameters=MROPE), tie_word_embeddings=True,
                                            vision_config=QWEN_VISION | dict(num_position_embeddings=16, deepstack_visual_indexes=[0])),
        qwen2_5_vl=transformers.Qwen2_5_VLConfig(text_config=TEXT | dict(rope_parameters=MROPE),
                                                 vision_config=QWEN_VISION | dict(fullatt_block_indexes=[0])),
        gemma3=transformers.Gemma3Config(text_config=TEXT | sliding, vision_config=siglip, mm_tokens_per_image=4))


FAMILIES = ("qwen3_5", "qwen3_vl", "qwen2_5_vl", "gemma3")
TOWER = ("visual.", "vision_tower.", "multi_modal_projector.")                      # in memory after "model.", and in some checkpoints


def of_tower(name):
    return name.removeprefix("model.").startswith(TOWER)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory, small_model):
    """A random checkpoint a family, in one folder, with the small model's tokenizer."""
    folder, tokenizer = tmp_path_factory.mktemp("vlm"), AutoTokenizer.from_pretrained(small_model)
    for seed, (family, config) in enumerate(configs().items()):
        torch.manual_seed(seed)
        AutoModelForImageTextToText.from_config(config).save_pretrained(folder / family)
        tokenizer.save_pretrained(folder / family)
        (folder / family / "preprocessor_config.json").write_text('{"patch_size": 4}')
    return folder


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def policy_of(folder, **changes):
    return load_policy(tiny_config(model=str(folder), **changes), CPU)


def samples():
    """Two groups that share a start, and one sample apart; positions reach 20, the sliding window is 4."""
    rng = np.random.default_rng(0)
    return [*random_group(rng, 0, [5, 6, 7, 8, 9, 10], 3, 14), *random_group(rng, 1, [5, 6, 7, 20, 21], 2, 9), make_sample([30, 31, 32, 33], 2, 2)]


def close_samples(policy):
    """`samples` with sampler log-probs near the policy's, so that ratios stay inside the bounds."""
    rng, made = np.random.default_rng(1), samples()
    for sample in made:
        with torch.no_grad():
            logprobs, topk, _, _ = policy(tensors_of(pack_row([sample]))[0])
        sample.sampler_logprobs[:] = logprobs.numpy() + rng.normal(0, 0.2, len(logprobs))
        sample.topk_logprobs[:] = topk.numpy() + rng.normal(0, 0.2, topk.shape)
    return made


def train_on(policy, made):
    row = pack_row(made)
    forward_backward(policy, Objective(), Share([row], [40.0], [row.num_tokens], [1.0]), CPU)


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_logprobs_are_those_of_the_models_own_forward_of_each_sample_alone(checkpoints, family):
    """Its own forward: class of the checkpoint, its attention, 3-D rotary positions that it makes from the tokens, no packing."""
    policy = policy_of(checkpoints / family, temperature=0.8)
    reference = AutoModelForImageTextToText.from_pretrained(checkpoints / family).eval()
    assert type(policy.lm) is type(reference) and policy.lm.get_decoder().config._attn_implementation == "tree"
    wanted = []
    with torch.no_grad():
        packed = policy(tensors_of(pack_row(samples()))[0])[0]
        for sample in samples():
            ids = torch.tensor(sample.input_ids, dtype=torch.int64)
            logprobs = (reference(input_ids=ids[None]).logits[0] / 0.8).double().log_softmax(-1)
            wanted.append(logprobs[sample.trained_index - 1].gather(1, ids[sample.trained_index][:, None])[:, 0])
    assert (packed.double() - torch.cat(wanted)).abs().max() < 1e-4
    check_packing(policy, CPU, torch.float32)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_lies_outside_the_text_model_is_loaded_and_gets_no_gradient_and_no_optimizer_state(checkpoints, family):
    policy = policy_of(checkpoints / family)
    frozen = {name for name, p in policy.lm.named_parameters() if not p.requires_grad}
    assert frozen == {name for name, _ in policy.lm.named_parameters() if of_tower(name)} and len(frozen) > 8
    before = {name: p.detach().clone() for name, p in policy.lm.named_parameters()}
    optimizer = make_optimizer(tiny_config(learning_rate=0.1), policy)
    train_on(policy, close_samples(policy))
    optimizer.step()
    for name, p in policy.lm.named_parameters():
        assert (p.grad is None) == (p not in optimizer.state) == (name in frozen), name
        assert torch.equal(p, before[name]) == (name in frozen), name


@pytest.mark.parametrize("family", FAMILIES)
def test_with_lora_only_the_text_models_adapters_are_trained_and_no_head_tied_or_not(checkpoints, family):
    policy = policy_of(checkpoints / family, peft_config=peft.LoraConfig(r=2, target_modules="all-linear"))
    trained = {name for name, p in policy.lm.named_parameters() if p.requires_grad}
    assert trained == {name for name, _ in policy.lm.named_parameters() if ".lora_" in name} and len(trained) > 20
    assert all(name.startswith("model.language_model.") for name in trained) and not policy.lm.get_output_embeddings().weight.requires_grad
    before = {name: p.detach().clone() for name, p in policy.lm.named_parameters()}
    optimizer = make_optimizer(tiny_config(learning_rate=0.1), policy)
    train_on(policy, close_samples(policy))
    optimizer.step()
    moved = {name for name, p in policy.lm.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {name for name in trained if ".lora_B." in name}, "B is zero at first, so A has no gradient yet"


@pytest.mark.parametrize("family, words", [("qwen3_5", "outside its text model"), ("qwen2_5_vl", "outside its text model"), ("qwen3_vl", "ties them"), ("gemma3", "ties them")])
def test_a_head_named_in_modules_to_save_is_refused_instead_of_left_untrained(checkpoints, family, words):
    with pytest.raises(ConfigError, match=f"modules_to_save names the head .*{words}"):
        policy_of(checkpoints / family, peft_config=peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"]))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_server_is_sent_exactly_what_is_trained_under_the_names_of_save_pretrained(checkpoints, group, tmp_path, family):
    policy = policy_of(checkpoints / family)
    policy.lm.save_pretrained(tmp_path)
    saved, sent = load_file(tmp_path / "model.safetensors"), gathered_weights(policy, torch.float32)
    assert sent.keys() == {name for name in saved if not of_tower(name)} < saved.keys()
    assert all(torch.equal(sent[name], saved[name]) for name in sent)
    assert ("lm_head.weight" in sent) == (family in ("qwen3_5", "qwen2_5_vl")), "a tied head comes once"
    adapted = policy_of(checkpoints / family, peft_config=peft.LoraConfig(r=2, target_modules=["q_proj"]))
    assert gathered_weights(adapted, torch.float32, text=True).keys() == sent.keys(), "a first sync brings what adapters leave frozen, but never the tower"


def test_a_buffer_of_the_tower_is_not_sent_but_saved(checkpoints, group):
    policy = policy_of(checkpoints / "qwen3_5")
    policy.lm.model.visual.register_buffer("scale", torch.ones(1))
    policy.lm.get_decoder().register_buffer("scale", torch.ones(1))
    assert [name for name in gathered_weights(policy, torch.bfloat16) if "scale" in name] == ["model.language_model.scale"]
    assert len([name for name in gathered_weights(policy, torch.bfloat16, frozen=True) if "scale" in name]) == 2


@pytest.mark.parametrize("family", FAMILIES)
def test_the_folder_at_the_end_holds_everything_and_reloads_bit_for_bit(checkpoints, group, tmp_path, family):
    policy = policy_of(checkpoints / family)
    with torch.no_grad():
        for p in policy.parameters():
            p += p.requires_grad * 0.125
    save_model(policy, AutoTokenizer.from_pretrained(checkpoints / family), tmp_path / "model", torch.float32)
    again, info = AutoModelForImageTextToText.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not any(info.values()) and again.state_dict().keys() == policy.lm.state_dict().keys()
    assert all(torch.equal(value, policy.lm.state_dict()[name]) for name, value in again.state_dict().items())
    assert (tmp_path / "model" / "preprocessor_config.json").read_text() == '{"patch_size": 4}'


def test_the_image_processors_settings_are_those_of_the_revision_that_was_loaded(checkpoints, tmp_path, monkeypatch):
    """They once came from the main branch."""
    monkeypatch.setattr(transformers.utils.hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(transformers.utils.hub, "is_offline_mode", lambda: True)
    repo = tmp_path / "models--us--them"
    for branch, commit in dict(main="a" * 40, old="b" * 40).items():
        shutil.copytree(checkpoints / "qwen3_5", repo / "snapshots" / commit)
        (repo / "snapshots" / commit / "preprocessor_config.json").write_text(branch)
        (repo / "refs").mkdir(exist_ok=True)
        (repo / "refs" / branch).write_text(commit)
    for branch in ("main", "old"):
        policy = load_policy(tiny_config(model="us/them", model_init_kwargs=dict(revision=branch)), CPU)
        write_model({"x": torch.zeros(1)}, policy, AutoTokenizer.from_pretrained(checkpoints / "qwen3_5"), tmp_path)
        assert (tmp_path / "preprocessor_config.json").read_text() == branch


def test_in_mixed_precision_on_one_rank_the_tower_is_cast_once_and_has_no_master(checkpoints, group):
    policy = policy_of(checkpoints / "qwen3_5", bf16=True)
    made = close_samples(policy)
    assert {p.dtype for p in policy.parameters()} == {torch.float32}
    shard(policy, dist.init_device_mesh("cpu", (1,)), torch.bfloat16)
    assert isinstance(policy.compute_weights, ComputeCopies) and all(p.requires_grad for _, _, p, _ in policy.compute_weights.slots)
    train_on(policy, made)
    for p in policy.parameters():
        assert (p.dtype, p.grad is None) == ((torch.float32, False) if p.requires_grad else (torch.bfloat16, True))


def test_what_is_no_text_decoder_with_a_plain_head_is_refused_in_one_sentence(tmp_path, small_model):
    """A speech model has a text part too, but is none that answers text; and a head with a bias stays refused inside a tower's model."""
    transformers.WhisperConfig().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="could not be loaded") as error:
        policy_of(tmp_path)
    assert "\n" not in str(error.value)
    from model import refuse_unsupported
    lm = AutoModelForImageTextToText.from_config(configs()["qwen3_5"])
    lm.lm_head = torch.nn.Linear(16, VOCAB)
    with pytest.raises(ConfigError, match="a bias in its output head"):
        refuse_unsupported("m", lm)


# Over ranks

def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def step_of(folder, out):
    """One micro-batch on this many ranks: full gradients, the weights sent, and that no rank ever shards or gathers a frozen weight."""
    rank, world = dist.get_rank(), dist.get_world_size()
    policy = policy_of(folder).double()
    made = close_samples(policy)
    shard(policy, dist.init_device_mesh("cpu", (world,)), torch.float64)
    frozen = [p for p in policy.parameters() if not p.requires_grad]
    where = [p.data_ptr() for p in frozen]
    plan = make_step(tiny_config(), [plan_micro_batch(made, world, 60)[0]], 0, 60) if rank == 0 else None
    stats = forward_backward(policy, Objective(), scatter_step(plan, rank, world), CPU, dist.group.WORLD)[1]
    kept = not any(isinstance(p, DTensor) for p in frozen) and where == [p.data_ptr() for p in frozen]
    sharded = all(isinstance(p, DTensor) for p in policy.parameters() if p.requires_grad) or world == 1
    norm = full(torch.nn.utils.clip_grad_norm_(policy.parameters(), 1e9)).item()
    grads = {name: full(p.grad) for name, p in policy.lm.named_parameters() if p.requires_grad}
    save_model(policy, AutoTokenizer.from_pretrained(folder), out, torch.float32)
    found = [None] * world
    dist.all_gather_object(found, (kept, sharded, norm))
    return dict(grads=grads, loss=stats.reduce(Objective(), dist.group.WORLD)[2], sent=gathered_weights(policy, torch.float32), ranks=found)


@pytest.fixture(scope="module")
def over_ranks(checkpoints, tmp_path_factory):
    """over_ranks[ranks][family], and the folder where each saved its models."""
    out = tmp_path_factory.mktemp("ranks")
    run = subprocess.run([sys.executable, __file__, str(checkpoints), str(out)], capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr[-3000:]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    alone = {family: step_of(checkpoints / family, out / "alone" / family) for family in FAMILIES}
    dist.destroy_process_group()
    return {1: alone, 2: torch.load(out / "two.pt"), "folder": out}


@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_give_the_gradient_of_one_and_leave_the_tower_whole(over_ranks, family):
    one, two = over_ranks[1][family], over_ranks[2][family]
    assert [rank[:2] for rank in two["ranks"]] == [(True, True)] * 2
    assert two["loss"] == pytest.approx(one["loss"], rel=1e-6)
    assert [rank[2] for rank in two["ranks"]] == pytest.approx([one["ranks"][0][2]] * 2, rel=1e-6)
    assert one["grads"].keys() == two["grads"].keys() and sum(g.norm() > 0 for g in one["grads"].values()) > 10
    for name, grad in one["grads"].items():
        assert (two["grads"][name] - grad).norm() <= 1e-6 * grad.norm(), name


@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_send_and_save_what_one_does(over_ranks, checkpoints, family):
    one, two, original = over_ranks[1][family], over_ranks[2][family], load_file(checkpoints / family / "model.safetensors")
    assert one["sent"].keys() == two["sent"].keys() and all(torch.equal(one["sent"][name], value) for name, value in two["sent"].items())
    saved = load_file(over_ranks["folder"] / family / "model.safetensors")
    assert saved.keys() == original.keys() and all(torch.equal(saved[name], value) for name, value in original.items())


if __name__ == "__main__":
    def work():
        checkpoint_folder, out_folder = map(Path, sys.argv[1:])
        results = {family: step_of(checkpoint_folder / family, out_folder / family) for family in FAMILIES}
        if dist.get_rank() == 0:
            torch.save(results, out_folder / "two.pt")
    forked(2, work)
