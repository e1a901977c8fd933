"""The gradient depends on the samples alone, to 1e-6 in fp64 (1e-5 for the fp32 MoE): not on ranks, rows, micro-batches, filler or padding."""
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import make_sample, random_group, tensors_of, tiny_config, tiny_lm, tiny_moe

from loss import Objective, policy_loss
from metrics import Window
from model import Policy
from packing import pack_row
from planning import Share, make_step, speed
from train import forward_backward

HERE = Path(__file__).parent


def reference(samples, denominator, tied=True):
    """One forward a sample, one process, nothing packed."""
    policy = Policy(tiny_lm(tied=tied), 1.0, "sdpa").double()
    for sample in samples:
        row = tensors_of(pack_row([sample]))[0]
        logprobs, topk, _, _ = policy(row)
        (policy_loss(Objective(), logprobs, topk, row["sampler_logprobs"], row["topk_logprobs"], row["advantages"]).sum() / denominator).backward()
    return {name: p.grad for name, p in policy.lm.named_parameters()}


def assert_same(a, b, tolerance=1e-6):
    assert a.keys() == b.keys()
    for name in a:
        assert (a[name] - b[name]).norm() <= tolerance * b[name].norm(), name


def close_samples(seed=0, groups=3, vocab=37):
    """Samples whose sampler log-probs are near the tiny model's, so that ratios stay inside the bounds."""
    rng = np.random.default_rng(seed)
    samples = [s for g in range(groups) for s in random_group(rng, g, list(rng.integers(0, vocab, 8)), 4, 9, vocab=vocab)]
    policy = Policy(tiny_lm(vocab=vocab), 1.0, "sdpa")
    for sample in samples:
        with torch.no_grad():
            logprobs, topk, _, _ = policy(tensors_of(pack_row([sample]))[0])
        sample.sampler_logprobs[:] = logprobs.numpy() + rng.normal(0, 0.2, len(logprobs))
        sample.topk_logprobs[:] = topk.numpy() + rng.normal(0, 0.2, topk.shape)
    return samples


JOBS = dict(
    plain=lambda: dict(micro_batches=[close_samples()]),
    one_group=lambda: dict(micro_batches=[close_samples(groups=1)]),
    tight=lambda: dict(micro_batches=[close_samples()], budget=130),
    step=lambda: dict(micro_batches=[close_samples()[:1], close_samples()[1:]], normalization="step"),
    mean=lambda: dict(micro_batches=[close_samples()[:1], close_samples()[1:]]),
    moe=lambda: dict(micro_batches=[[make_sample(s.input_ids, 4, group_id=i) for i, s in enumerate(close_samples(groups=8)[::4])]], model="tiny_moe"),
    lora=lambda: dict(micro_batches=[close_samples()], model="tiny_lora"),
    untied=lambda: dict(micro_batches=[close_samples()], model="tiny_untied"),
    broken=lambda: dict(micro_batches=[[replace(close_samples()[0], advantage=float("nan")), *close_samples()[4:]]]),
    odd=lambda: dict(micro_batches=[close_samples(groups=2, vocab=13)], model="tiny13", steps=3),
    untied_steps=lambda: dict(micro_batches=[close_samples()], model="tiny_untied", steps=3))


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """results[ranks][job]: every job on 1, 2 and 3 gloo ranks."""
    folder, jobs = tmp_path_factory.mktemp("gradients"), {name: make() for name, make in JOBS.items()}
    alone = {name: job for name, job in jobs.items() if name != "tight"}             # 12 samples do not fit one row of 130 tokens
    (folder / "jobs.pkl").write_bytes(pickle.dumps({1: alone, 2: jobs, 3: jobs}))
    run = subprocess.run([sys.executable, str(HERE / "gradient_worker.py"), str(folder / "jobs.pkl"), str(folder / "out")], capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr[-3000:]
    return {ranks: torch.load(folder / f"out.{ranks}") for ranks in (1, 2, 3)}


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_any_number_of_ranks_gives_the_gradient_of_separate_forwards(results, ranks):
    """Norms are the same on all ranks and that of the whole gradient; metrics are over all ranks."""
    got, alone, samples = results[ranks]["plain"], results[1]["plain"], close_samples()
    wanted = reference(samples, got["trained"])
    assert_same(got["values"], wanted)
    full = torch.cat([g.flatten() for g in wanted.values()]).norm().item()
    assert got["norms"] == pytest.approx([full] * ranks, rel=1e-5)
    assert got["terms"] == got["trained"] == sum(len(s.trained_index) for s in samples) and got["loss"] == pytest.approx(alone["loss"], rel=1e-5)
    for name, value in alone["metrics"].items():
        assert got["metrics"][name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_an_untied_head_gets_the_gradient_of_separate_forwards_too(results, ranks):
    got = results[ranks]["untied"]
    assert_same(got["values"], reference(close_samples(), got["trained"], tied=False))
    assert got["values"]["lm_head.weight"].norm() > 0


@pytest.mark.parametrize("ranks", [2, 3])
def test_adapters_get_one_gradient_on_any_number_of_ranks(results, ranks):
    assert_same(results[ranks]["lora"]["values"], results[1]["lora"]["values"])
    assert all(".lora_" in name for name in results[1]["lora"]["values"])


def test_many_small_rows_give_the_gradient_of_one(results):
    """A budget of 130 unique tokens leaves no room for a group in the first row alone: samples spread over 2 and 3 rows."""
    for ranks in (2, 3):
        assert_same(results[ranks]["tight"]["values"], results[1]["plain"]["values"])


def test_ranks_without_a_sample_forward_filler_that_changes_nothing(results):
    """One group fits one row, so with 3 ranks two of them have no sample: gradient, loss and token counts stay."""
    one, three = results[1]["one_group"], results[3]["one_group"]
    assert_same(three["values"], one["values"])
    assert (three["trained"], three["forwarded"]) == (one["trained"], one["forwarded"]) and three["loss"] == pytest.approx(one["loss"], rel=1e-5)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_in_step_mode_micro_batches_give_one_mean_and_in_micro_batch_mode_a_mean_of_means(results, ranks):
    """Micro-batches of 1 and of 11 samples; step mode equals one micro-batch of all 12."""
    parts = [close_samples()[:1], close_samples()[1:]]
    counts = [sum(len(s.trained_index) for s in part) for part in parts]
    assert_same(results[ranks]["step"]["values"], reference(sum(parts, []), sum(counts)))
    first, second = (reference(part, count * 2) for part, count in zip(parts, counts))
    assert_same(results[ranks]["mean"]["values"], {name: first[name] + second[name] for name in first})


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_split_a_moe_batch_without_changing_its_aux_gradient(results, ranks):
    """Nothing is shared between these samples, so the physical tokens are the same on any number of ranks."""
    one, more = results[1]["moe"], results[ranks]["moe"]
    assert one["forwarded"] == more["forwarded"] and one["metrics"]["aux_loss"] > 0
    assert more["metrics"]["aux_loss"] == pytest.approx(one["metrics"]["aux_loss"], rel=1e-5)
    assert_same(more["values"], one["values"], 1e-5)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_rank_sees_a_norm_that_is_not_finite_on_one(results, ranks):
    """One sample of one row has a NaN advantage: all ranks decide alike whether to step, and the loss is not hidden."""
    assert np.isnan(results[ranks]["broken"]["norms"]).all() and np.isnan(results[ranks]["broken"]["loss"])


@pytest.mark.parametrize("job", ["odd", "untied_steps"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_three_steps_train_every_parameter_on_any_number_of_ranks_alike(results, ranks, job):
    """The embedding, norm and head of the root unit too, whatever forward came before the optimizer; and a tied head of 13 rows, which no number of ranks divides."""
    assert_same(results[ranks][job]["values"], results[1][job]["values"])
    before = (tiny_lm(vocab=13) if job == "odd" else tiny_lm(tied=False)).state_dict()
    moved = {name: (value - before[name]).abs() for name, value in results[ranks][job]["values"].items()}
    assert all(change.max() > 1e-6 for change in moved.values()) and (job == "untied_steps" or (moved["model.embed_tokens.weight"].amax(1) > 0).all())


def test_a_rank_leaves_when_gloos_threads_have_freed_what_they_hold(tmp_path):
    """CPython 3.11 ends a thread that wants its lock while the interpreter ends, and C++ aborts then: code -6, after a complete run."""
    ranks = [subprocess.Popen([sys.executable, HERE / "leave_worker.py", str(rank), tmp_path / "store"]) for rank in (0, 1)]
    assert [process.wait(120) for process in ranks] == [0, 3]


def test_tokens_that_are_context_count_in_no_divisor_and_a_step_without_a_trained_token_is_finite():
    """Two completions of 10 tokens, one masked out: the divisor is 10. None trained: loss and gradient are 0, not 0/0."""
    sample = make_sample(np.arange(15) % 37, 5)
    masked = replace(make_sample(np.arange(3, 18) % 37, 5), trained_index=np.empty(0, np.int32), sampler_logprobs=np.empty(0, np.float32),
                     topk_ids=np.empty((0, 3), np.int32), topk_logprobs=np.empty((0, 3), np.float32))
    plan = make_step(tiny_config(), [[[sample, masked]]], 0, 100)
    assert plan.shares[0].denominators == [10.0] and plan.metrics["batch/masked_token_frac"] == (pytest.approx(2 / 3), 30)
    policy = Policy(tiny_lm(), 1.0, "sdpa")
    _, stats = forward_backward(policy, Objective(), make_step(tiny_config(), [[[masked]]], 0, 100).shares[0], torch.device("cpu"))
    assert stats.reduce(Objective()) == ({}, 0, 0.0) and all(torch.equal(p.grad, torch.zeros_like(p)) for p in policy.parameters())


def test_tokens_per_second_are_of_the_step_not_since_the_start():
    plan = make_step(tiny_config(), [[[make_sample(np.arange(15) % 37, 5)]]], 0, 100)
    assert speed(plan, 2.0, 5.0) == {"perf/step_s": 5.0, "perf/fwd_bwd_forwarded_tokens_per_s": (7.5, 2.0), "perf/wall_clock_forwarded_tokens_per_s": (3.0, 5.0),
                                     "perf/wall_clock_trained_tokens_per_s": (2.0, 5.0)}
    window = Window()
    for training_s in (1.0, 9.0):
        window.add_all(speed(plan, training_s, training_s))
    assert window.result()["perf/fwd_bwd_forwarded_tokens_per_s"] == pytest.approx(2 * 15 / 10)


def test_a_windows_means_are_over_samples_not_over_steps():
    """Age 0 over 1 sample, then age 1 over 3: 0.75."""
    window = Window()
    for version, count in ((0, 1), (1, 3)):
        window.add_all(make_step(tiny_config(), [[[make_sample([1, 2, 3, 4 + i], 3) for i in range(count)]]], version, 100).metrics)
    assert window.result()["sample/staleness_mean"] == 0.75


def test_the_two_means_of_the_public_report_are_065_and_125():
    """100 tokens of loss 2.0 and 900 of loss 0.5: 0.65 over the step, 1.25 as a mean of micro-batch means."""
    batches = [[[make_sample(np.arange(101) % 37, 1)]], [[make_sample(np.arange(901) % 37, 1)]]]
    for mode, value in (("step", 0.65), ("micro_batch", 1.25)):
        share = make_step(tiny_config(loss_normalization=mode), batches, 0, 1000).shares[0]
        assert sum(total / d for total, d in zip((100 * 2.0, 900 * 0.5), share.denominators)) == pytest.approx(value)


@pytest.mark.parametrize("lm", [tiny_lm, tiny_moe])
def test_padding_does_not_change_the_gradient(lm):
    samples, grads = close_samples(groups=1), []
    for multiple in (1, 64):
        row = pack_row(samples, multiple)
        policy = Policy(lm(), 1.0, "sdpa", 0.5) if lm is tiny_moe else Policy(lm(), 1.0, "sdpa").double()
        forward_backward(policy, Objective(), Share([row], [30.0], [row.num_tokens], [1.0]), torch.device("cpu"))
        grads.append({name: p.grad for name, p in policy.lm.named_parameters()})
    assert len(row.input_ids) % 64 == 0
    assert_same(grads[1], grads[0], 1e-5 if lm is tiny_moe else 1e-6)


def test_unused_columns_of_top_tokens_do_not_change_the_gradient():
    """A row mixes samples with 3 and with 5 reported top tokens: each gradient is that of its own sample."""
    a, b = close_samples(groups=1)[:2]
    wide = make_sample(list(b.input_ids), 8, top_k=5)
    both, parts = reference([a], 1), reference([wide], 1)
    policy = Policy(tiny_lm(), 1.0, "sdpa").double()
    row = tensors_of(pack_row([a, wide]))[0]
    logprobs, topk, _, _ = policy(row)
    policy_loss(Objective(), logprobs, topk, row["sampler_logprobs"], row["topk_logprobs"], row["advantages"]).sum().backward()
    assert_same({name: p.grad for name, p in policy.lm.named_parameters()}, {name: both[name] + parts[name] for name in both})
