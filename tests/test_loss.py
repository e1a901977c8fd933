"""The objective and its head against float64 references of a few lines."""

import numpy as np
import pytest
import torch

from loss import Candidates, LossStats, Objective, fused_logprobs, policy_loss

M, D, V = 9, 6, 23


def makeproblem(seed=0, dtype=torch.float64, top_k=3, temperature=1.0, with_sets=False, spread=0.3):
    """Hidden states, a head, and a sampler whose distribution is a perturbed copy of the policy's."""
    g = torch.Generator().manual_seed(seed)
    hidden, weight = torch.randn(M, D, generator=g, dtype=torch.float64), torch.randn(V, D, generator=g, dtype=torch.float64)
    sets = [sorted(torch.randperm(V, generator=g)[:torch.randint(top_k, V, (1,), generator=g)].tolist()) if with_sets and m != 4 else list(range(V)) for m in range(M)]
    mu = reference_logprobs(hidden, weight, temperature, sets) + spread * torch.randn(M, V, generator=g, dtype=torch.float64)
    mu = mu.log_softmax(-1)                                                   # (M, V) sampler log-probs
    targets = torch.stack([torch.multinomial(row.exp(), 1, generator=g)[0] for row in mu])
    top = mu.topk(top_k)
    candidates = None
    if with_sets:
        rows = torch.tensor([m for m in range(M) if m != 4 for _ in sets[m]])
        ids = torch.tensor([v for m in range(M) if m != 4 for v in sets[m]])
        candidates = Candidates(rows, ids, torch.arange(M) == 4)
    return dict(hidden=hidden.to(dtype).requires_grad_(), weight=weight.to(dtype).requires_grad_(), sets=sets, targets=targets,
                sampler=mu.gather(1, targets[:, None])[:, 0].to(dtype), top_ids=top.indices, top=top.values.to(dtype),
                advantages=torch.randn(M, generator=g, dtype=torch.float64).to(dtype), candidates=candidates, mu=mu)


def reference_logprobs(hidden, weight, temperature, sets):
    support = torch.full((M, V), -torch.inf, dtype=torch.float64)
    for m, ids in enumerate(sets):
        support[m, ids] = 0
    return (hidden.double() @ weight.double().T / temperature + support).log_softmax(-1)


def reference_loss(p, objective, temperature):
    """Sum over tokens of the objective, one token and one vocabulary entry at a time."""
    log_pi = reference_logprobs(p["hidden"], p["weight"], temperature, p["sets"])
    loss = 0
    for m in range(M):
        lp, A = log_pi[m, p["targets"][m]], p["advantages"][m].double()
        r = torch.exp(lp - p["sampler"][m].double())
        if not objective.clip_min <= r <= objective.clip_max:
            continue
        if not objective.score_centering:
            loss -= min(r * A, r.clamp(1 - objective.epsilon, 1 + objective.epsilon_high) * A)
            continue
        inner, mass_pi, mass_mu, tail = 0, 0, 0, 0
        for v, s in zip(p["top_ids"][m].tolist(), p["top"][m].double()):
            pi, mu = log_pi[m, v].exp().detach(), s.exp()
            inner += (pi if objective.clip_min <= pi / mu <= objective.clip_max else 0) * log_pi[m, v]
            mass_pi, mass_mu, tail = mass_pi + pi, mass_mu + mu, tail + pi * log_pi[m, v]
        alpha = objective.centering_tail and min(1 - mass_pi, 1 - mass_mu) > 1e-6 and objective.clip_min <= (1 - mass_pi) / (1 - mass_mu) <= objective.clip_max
        loss -= A * (r.detach() * lp - inner + alpha * tail)
    return loss


def our_loss(p, objective, temperature, block=5):
    logprobs, topk, _ = fused_logprobs(p["hidden"], p["weight"], p["targets"], p["top_ids"], temperature=temperature,
                                       candidates=p["candidates"], block=block)
    return policy_loss(objective, logprobs, topk, p["sampler"], p["top"], p["advantages"]).sum()


OBJECTIVES = dict(centered=Objective(), tail=Objective(centering_tail=True), clipped=Objective(score_centering=False, epsilon_high=0.28),
                  tight=Objective(clip_min=0.9, clip_max=1.1), tight_clipped=Objective(score_centering=False, clip_min=0.7, clip_max=1.3, epsilon=0.1))


@pytest.mark.parametrize("dtype,tolerance", [(torch.float64, 1e-6), (torch.float32, 1e-4)])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
@pytest.mark.parametrize("with_sets", [False, True])
@pytest.mark.parametrize("top_k", [1, 8, V])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_loss_and_gradient_equal_the_naive_loop(name, top_k, with_sets, temperature, dtype, tolerance):
    if with_sets and top_k == V:
        top_k = 4                                                              # a set is smaller than the vocabulary
    p = makeproblem(dtype=dtype, top_k=top_k, temperature=temperature, with_sets=with_sets)
    objective = OBJECTIVES[name]
    expected = reference_loss(p, objective, temperature)
    wanted = torch.autograd.grad(expected, (p["hidden"], p["weight"]))
    got_loss = our_loss(p, objective, temperature)
    got = torch.autograd.grad(got_loss, (p["hidden"], p["weight"]))
    assert abs(got_loss.item() - expected.item()) <= tolerance * max(1, abs(expected.item()))
    for a, b in zip(got, wanted):
        assert (a - b).norm() <= tolerance * b.norm()


def test_tight_bounds_really_drop_some_tokens_and_keep_others():
    p = makeproblem(top_k=8)
    ratio = (reference_logprobs(p["hidden"], p["weight"], 1.0, p["sets"]).gather(1, p["targets"][:, None])[:, 0] - p["sampler"]).exp()
    kept = OBJECTIVES["tight"].inside(ratio)
    assert kept.any() and not kept.all()


def expected_gradient(objective, top_k, sampler_shift, temperature=1.0, advantage=1.0):
    """E over o ~ μ of the gradient with respect to one position's logits, all V outcomes enumerated; and of each outcome."""
    g = torch.Generator().manual_seed(3)
    weight = torch.randn(V, D, generator=g, dtype=torch.float64)
    hidden = torch.randn(1, D, generator=g, dtype=torch.float64)
    mu = (hidden @ weight.T / temperature + sampler_shift * torch.randn(1, V, generator=g, dtype=torch.float64)).log_softmax(-1)[0]
    top = mu.topk(top_k)
    grads = []
    for o in range(V):
        head = weight.clone().requires_grad_()
        logprobs, topk, _ = fused_logprobs(hidden, head, torch.tensor([o]), top.indices[None], temperature=temperature)
        policy_loss(objective, logprobs, topk, mu[o:o + 1], top.values[None], torch.tensor([advantage], dtype=torch.float64)).sum().backward()
        grads.append(head.grad)
    grads = torch.stack(grads)
    return (mu.exp()[:, None, None] * grads).sum(0), grads, mu


def test_with_the_whole_vocabulary_a_constant_advantage_moves_nothing_on_average():
    mean, grads, _ = expected_gradient(Objective(), V, 0.2)
    assert mean.abs().max() < 1e-10 < 1e-3 < grads.abs().max()


def test_the_tail_estimator_is_exact_when_the_tail_really_is_proportional():
    g = torch.Generator().manual_seed(5)
    weight, hidden = torch.randn(V, D, generator=g, dtype=torch.float64), torch.randn(1, D, generator=g, dtype=torch.float64)
    log_pi = (hidden @ weight.T).log_softmax(-1)[0]
    top_ids = log_pi.topk(6).indices
    mu = log_pi.clone()
    mu[top_ids] += 0.2 * torch.randn(6, generator=g, dtype=torch.float64)
    tail = torch.ones(V, dtype=torch.bool)
    tail[top_ids] = False
    mu[tail] += torch.log((1 - mu[top_ids].exp().sum()) / log_pi[tail].exp().sum())          # ρ·π on the tail, mass 1 in all
    means = {}
    for on in (True, False):
        total = 0
        for o in range(V):
            head = weight.clone().requires_grad_()
            lp, topk, _ = fused_logprobs(hidden, head, torch.tensor([o]), top_ids[None])
            policy_loss(Objective(centering_tail=on), lp, topk, mu[o:o + 1], mu[top_ids][None], torch.ones(1, dtype=torch.float64)).sum().backward()
            total = total + mu[o].exp() * head.grad
        means[on] = total.abs().max().item()
    assert means[True] < 1e-10 and means[False] > 1e-3


def test_without_centering_the_same_expectation_is_not_zero():
    mean, _, _ = expected_gradient(Objective(score_centering=False, epsilon=0.0, epsilon_high=0.0), V, 0.2)
    assert mean.abs().max() > 1e-3


def test_on_policy_the_centered_gradient_is_reinforce_minus_its_exact_mean():
    _, grads, mu = expected_gradient(Objective(), V, 0.0, advantage=1.7)
    _, plain, _ = expected_gradient(Objective(score_centering=False, epsilon=9, epsilon_high=9), V, 0.0, advantage=1.7)
    assert (grads - (plain - (mu.exp()[:, None, None] * plain).sum(0))).abs().max() < 1e-10


@pytest.mark.parametrize("score_centering", [True, False])
@pytest.mark.parametrize("bad", [100.0, -100.0, float("nan"), -float("inf"), float("inf")])
def test_a_broken_log_ratio_contributes_exactly_zero_and_is_counted(bad, score_centering):
    """±100 are differences from the policy's own log-prob; the rest are sampler log-probs as they came."""
    objective = Objective(score_centering=score_centering)
    for dtype in (torch.float32, torch.float64):
        p, q = makeproblem(dtype=dtype), makeproblem(dtype=dtype)
        logprob = fused_logprobs(p["hidden"], p["weight"], p["targets"], p["top_ids"])[0][2].item()
        p["sampler"][2] = logprob - bad if abs(bad) == 100 else bad
        q["advantages"][2] = 0                                                 # the same problem with token 2 silenced
        results = [(loss := our_loss(x, objective, 1.0), *torch.autograd.grad(loss, (x["hidden"], x["weight"]))) for x in (p, q)]
        for a, b in zip(*results):
            assert torch.equal(a, b) and torch.isfinite(a).all()
        stats = LossStats(torch.device("cpu"))
        lp, _, entropy = fused_logprobs(p["hidden"], p["weight"], p["targets"], p["top_ids"])
        stats.add(objective, lp, entropy, p["sampler"], p["top"], p["advantages"], torch.zeros(M, dtype=torch.int64), 1)
        assert stats.reduce(objective)[0]["sampling/masked_mean"] >= 1 / M


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("options", [dict(), dict(centering_tail=True), dict(score_centering=False)])
def test_with_clip_min_0_a_token_outside_its_candidate_set_contributes_exactly_zero(options, advantage):
    """Its log-prob is -inf and its ratio 0, which that bound encloses."""
    p = makeproblem(with_sets=True)
    m = next(m for m, ids in enumerate(p["sets"]) if len(ids) < V)
    p["targets"][m], p["advantages"][m] = min(set(range(V)) - set(p["sets"][m])), advantage
    logprobs, topk, _ = fused_logprobs(p["hidden"], p["weight"], p["targets"], p["top_ids"], candidates=p["candidates"])
    terms = policy_loss(Objective(clip_min=0.0, **options), logprobs, topk, p["sampler"], p["top"], p["advantages"])
    assert logprobs[m] == -torch.inf and torch.isfinite(p["sampler"][m]) and terms[m] == 0
    for its, whole in zip(*(torch.autograd.grad(term, (logprobs, p["hidden"], p["weight"]), retain_graph=True) for term in (terms[m], terms.sum()))):
        assert torch.equal(its, torch.zeros_like(its)) and torch.isfinite(whole).all() and whole.norm() > 0


@pytest.mark.parametrize("softcap", [None, 2.5])
def test_the_fused_head_equals_a_plain_log_softmax_for_every_block_size(softcap):
    p = makeproblem(top_k=4)

    def plain(hidden, weight):
        logits = hidden @ weight.T
        logits = (logits if softcap is None else softcap * torch.tanh(logits / softcap)) / 0.7
        full = logits.log_softmax(-1)
        return full.gather(1, torch.cat([p["targets"][:, None], p["top_ids"]], 1)), -(full.exp() * full).sum(-1)
    wanted, wanted_entropy = plain(p["hidden"], p["weight"])
    seeds = torch.randn(wanted.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    wanted_grads = torch.autograd.grad((wanted * seeds).sum(), (p["hidden"], p["weight"]))
    for block in (1, 4, V, 100):
        logprobs, topk, entropy = fused_logprobs(p["hidden"], p["weight"], p["targets"], p["top_ids"], temperature=0.7, softcap=softcap, block=block)
        got = torch.cat([logprobs[:, None], topk], 1)
        assert (got - wanted).abs().max() < 1e-12 and (entropy - wanted_entropy).abs().max() < 1e-12
        for a, b in zip(torch.autograd.grad((got * seeds).sum(), (p["hidden"], p["weight"])), wanted_grads):
            assert (a - b).abs().max() < 1e-10


def test_a_missing_top_token_changes_nothing():
    p = makeproblem(top_k=3)
    padded = dict(p, top_ids=torch.cat([p["top_ids"], torch.full((M, 2), -1)], 1), top=torch.cat([p["top"], torch.full((M, 2), -torch.inf, dtype=torch.float64)], 1))
    for objective in (Objective(), Objective(centering_tail=True)):
        a, b = our_loss(p, objective, 1.0), our_loss(padded, objective, 1.0)
        assert torch.equal(a, b)
        for x, y in zip(torch.autograd.grad(a, (p["hidden"], p["weight"])), torch.autograd.grad(b, (p["hidden"], p["weight"]))):
            assert (x - y).abs().max() < 1e-14


@pytest.mark.parametrize("with_sets", [False, True])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_an_unchanged_policy_has_ratio_one_at_every_temperature_and_over_candidate_sets(temperature, with_sets):
    p = makeproblem(temperature=temperature, with_sets=with_sets, spread=0.0)
    logprobs, topk, _ = fused_logprobs(p["hidden"], p["weight"], p["targets"], p["top_ids"], temperature=temperature, candidates=p["candidates"])
    assert ((logprobs - p["sampler"]).exp() - 1).abs().max() < 1e-12 and (topk - p["top"]).abs().max() < 1e-12


def test_a_top_p_set_of_the_public_report_gives_ratio_one_not_the_mass_it_kept():
    """p = [.5, .3, .15, .05], top-p keeps two: log(.5/.8) on both sides."""
    probs = torch.tensor([[0.5, 0.3, 0.15, 0.05]], dtype=torch.float64)
    sets = Candidates(torch.tensor([0, 0]), torch.tensor([0, 1]), torch.tensor([False]))
    logprob, _, entropy = fused_logprobs(torch.ones(1, 1, dtype=torch.float64), probs.log().T, torch.tensor([0]), torch.empty(1, 0, dtype=torch.int64), candidates=sets)
    assert abs(logprob.item() - np.log(0.5 / 0.8)) < 1e-12
    assert abs(entropy.item() + (0.625 * np.log(0.625) + 0.375 * np.log(0.375))) < 1e-12


def test_half_the_temperature_of_the_public_report():
    """logits [2, 1, 0], T = 0.5, token 0: -0.143, not the -0.408 of T = 1."""
    logits = torch.tensor([[2.0, 1.0, 0.0]], dtype=torch.float64)
    none = torch.empty(1, 0, dtype=torch.int64)
    for temperature, value in ((0.5, -0.143), (1.0, -0.408)):
        logprob = fused_logprobs(torch.ones(1, 1, dtype=torch.float64), logits.T, torch.tensor([0]), none, temperature=temperature)[0]
        assert round(logprob.item(), 3) == value


@pytest.mark.parametrize("K", [2, 80])
def test_no_full_size_logits_exist_at_any_time(K):
    """Every tensor made in forward and backward has fewer elements than (M, V), however many top tokens there are."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for t in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(t, torch.Tensor):
                    Largest.seen = max(Largest.seen, t.numel())
            return out
    hidden, weight = torch.randn(400, 4, requires_grad=True), torch.randn(3000, 4, requires_grad=True)
    with Largest():
        logprobs, topk, _ = fused_logprobs(hidden, weight, torch.zeros(400, dtype=torch.int64), torch.zeros(400, K, dtype=torch.int64), block=250)
        (logprobs.sum() + topk.sum()).backward()
    assert Largest.seen <= 400 * max(250, 16 * (1 + K))


def test_bf16_hidden_states_still_get_fp32_reductions():
    p = makeproblem()
    hidden, weight = p["hidden"].detach().bfloat16(), p["weight"].detach().bfloat16()
    logprobs, _, entropy = fused_logprobs(hidden, weight, p["targets"], p["top_ids"])
    wanted = (hidden.float() @ weight.float().T).bfloat16().float().log_softmax(-1).gather(1, p["targets"][:, None])[:, 0]
    assert logprobs.dtype == entropy.dtype == torch.float32 and (logprobs - wanted).abs().max() < 1e-5


@pytest.mark.parametrize("score_centering", [False, True])
@pytest.mark.parametrize("with_sets", [False, True])
def test_in_bf16_the_gradient_of_a_nearly_certain_token_is_right_to_a_few_percent(score_centering, with_sets):
    """1 − p was once lost: the sum of two numbers rounded to bf16 was over 100 % off for p > 0.998."""
    generator = torch.Generator().manual_seed(0)
    M, V, D = 1500, 512, 64
    weight, targets = torch.randn(V, D, generator=generator).bfloat16(), torch.randint(V, (M,), generator=generator)
    hidden = (weight[targets].float() * torch.linspace(0.1, 0.35, M)[:, None] + 0.3 * torch.randn(M, D, generator=generator)).bfloat16()
    rounded = hidden @ weight.T                                                    # the logits that the head sees
    likely = rounded.topk(8).indices
    candidates, forbidden = None, torch.zeros(M, V, dtype=torch.bool)
    if with_sets:
        forbidden = torch.rand(M, V, generator=generator) < 0.3
        forbidden.scatter_(1, torch.cat([targets[:, None], likely], 1), False)
        candidates = Candidates(*(~forbidden).nonzero(as_tuple=True), torch.zeros(M, dtype=torch.bool))

    def gradient(hidden, logprobs, topk):
        loss = policy_loss(Objective(score_centering=score_centering), logprobs, topk, logprobs.detach(), topk.detach(), torch.ones(M))
        return torch.autograd.grad(loss.sum(), hidden)[0].double()
    exact = hidden.double().requires_grad_()
    logits = exact @ weight.double().T
    wanted = (logits + (rounded.double() - logits).detach()).masked_fill(forbidden, -torch.inf).log_softmax(-1)
    p = wanted.detach().gather(1, targets[:, None])[:, 0].exp()
    wanted = gradient(exact, wanted.gather(1, targets[:, None])[:, 0], wanted.gather(1, likely))
    hidden.requires_grad_()
    got = gradient(hidden, *fused_logprobs(hidden, weight, targets, likely, candidates=candidates, block=200)[:2])
    for low, high in ((0.5, 0.9), (0.9, 0.99), (0.99, 0.998), (0.998, 0.9999), (0.9999, 0.999999)):
        inside = (p >= low) & (p < high)
        assert inside.sum() > 20 and (got - wanted)[inside].norm() < 0.03 * wanted[inside].norm()


def test_a_frozen_head_gets_no_gradient_computed():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Products(TorchDispatchMode):
        shapes = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if "mm" in str(func):
                Products.shapes.append(tuple(out.shape))
            return out
    hidden, weight, ids = torch.randn(7, 4, requires_grad=True), torch.randn(30, 4), torch.zeros(7, 2, dtype=torch.int64)
    logprobs, _, _ = fused_logprobs(hidden, weight, ids[:, 0], ids, block=30)
    with Products():
        logprobs.sum().backward()
    assert hidden.grad.abs().max() > 0 and set(Products.shapes) == {(7, 30), (7, 4)}


def test_an_empty_micro_batch_is_finite_and_has_zero_gradient():
    hidden, weight = torch.randn(5, D, requires_grad=True), torch.randn(V, D, requires_grad=True)
    none = torch.empty(0, dtype=torch.int64)
    logprobs, topk, entropy = fused_logprobs(hidden[none], weight, none, torch.empty(0, 0, dtype=torch.int64))
    loss = policy_loss(Objective(), logprobs, topk, torch.empty(0), torch.empty(0, 0), torch.empty(0)).sum() / 1.0
    loss.backward()
    assert loss.item() == 0 and torch.equal(hidden.grad, torch.zeros_like(hidden)) and torch.equal(weight.grad, torch.zeros_like(weight))


def test_loss_statistics_are_sums_over_counts_with_extremes_per_completion():
    """Literal numbers: 4 tokens of 2 completions, ratios 2, 1, 0.6, 0.4."""
    ratios = torch.tensor([2.0, 1.0, 0.6, 0.4], dtype=torch.float64)
    sampler = torch.full((4,), -1.0, dtype=torch.float64)
    stats, objective = LossStats(torch.device("cpu")), Objective()
    stats.add(objective, sampler + ratios.log(), torch.tensor([1.0, 2, 3, 4]), sampler, torch.log(torch.tensor([[0.5, 0.2]] * 4)),
              torch.tensor([1.0, 1, -1, -1]), torch.tensor([0, 0, 1, 1]), 2)
    got, terms, _ = stats.reduce(objective)
    assert terms == 4
    wanted = {"sampling/importance_sampling_ratio/mean": 1.0, "sampling/importance_sampling_ratio/min": 0.4, "sampling/importance_sampling_ratio/max": 2.0,
              "sampling/masked_mean": 0.25, "sampling/sampler_mass": 0.7, "entropy": 2.5, "clip_ratio/low_mean": 0.5, "clip_ratio/high_mean": 0.25,
              "clip_ratio/region_mean": 0.75, "clip_ratio/low_min": 0.0, "clip_ratio/high_max": 0.5,
              "sampling/sampling_logp_difference/max": -np.log(0.4), "sampling/sampling_logp_difference/mean": (np.log(2) - np.log(0.6) - np.log(0.4)) / 4,
              "sampling/mismatch_kl": sum(r - 1 - np.log(r) for r in (2, 1, 0.6, 0.4)) / 4}
    for name, value in wanted.items():
        assert got[name] == pytest.approx(value, rel=1e-6), name
    assert "sampling/sampler_mass" not in stats.reduce(Objective(score_centering=False))[0]


def test_statistics_of_rows_merge_as_one_row():
    g = torch.Generator().manual_seed(0)
    args = [torch.randn(6, generator=g), torch.rand(6, generator=g), torch.randn(6, generator=g), torch.randn(6, 2, generator=g) - 3, torch.randn(6, generator=g)]
    sample = torch.tensor([0, 0, 1, 1, 1, 2])
    whole, parts = LossStats(torch.device("cpu")), LossStats(torch.device("cpu"))
    whole.add(Objective(), *args, sample, 3)
    parts.add(Objective(), *(a[:2] for a in args), sample[:2], 1)
    parts.add(Objective(), *(a[2:] for a in args), sample[2:] - 1, 2)
    for (name, a), b in zip(whole.reduce(Objective())[0].items(), parts.reduce(Objective())[0].values()):
        assert a == pytest.approx(b, rel=1e-6), name


def test_metrics_stay_finite_for_a_masked_ratio_that_overflows():
    stats = LossStats(torch.device("cpu"))
    stats.add(Objective(), torch.tensor([0.0]), torch.tensor([1.0]), torch.tensor([-500.0]), torch.tensor([[-1.0]]), torch.tensor([1.0]), torch.tensor([0]), 1)
    assert all(np.isfinite(v) for v in stats.reduce(Objective())[0].values())


def test_a_token_that_clip_min_0_masks_is_counted_as_masked():
    stats, objective = LossStats(torch.device("cpu")), Objective(clip_min=0.0)
    zeros = torch.zeros(4)
    stats.add(objective, torch.tensor([-1.0, -torch.inf, -1.0, -1.0]), zeros, zeros - 1, torch.zeros(4, 1), zeros, torch.zeros(4, dtype=torch.int64), 1)
    assert stats.reduce(objective)[0]["sampling/masked_mean"] == 0.25
