"""The objective and the head it is taken through.

Whose number it is, is in the name: `sampler_logprobs` come from the server, `logprobs` from the trainer, with gradient; both
are log_softmax(logits / temperature) over the same support.
"""
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

BLOCK = 16384     # vocabulary columns of logits held at a time: one static size, so that compiled code fits every row


@dataclass(frozen=True)
class Candidates:
    """Candidate sets of the loss terms: term rows[c] may draw token ids[c]; `whole` (M,) bool marks terms without a set."""

    rows: Tensor                 # (C,) int64
    ids: Tensor                  # (C,) int64
    whole: Tensor                # (M,) bool

    def block(self, start: int, stop: int) -> Tensor:
        """(M, stop - start) bool: who may draw what among tokens start … stop."""
        allowed = self.whole[:, None].repeat(1, stop - start)
        inside = (self.ids >= start) & (self.ids < stop)
        allowed[self.rows[inside], self.ids[inside] - start] = True
        return allowed


def _final_logits(raw: Tensor, temperature: float, softcap: float | None) -> Tensor:
    """What softmax is taken of, in fp32 (fp64 for fp64)."""
    logits = raw.to(torch.promote_types(raw.dtype, torch.float32))
    return (logits if softcap is None else softcap * torch.tanh(logits / softcap)) / temperature


def _fold(raw: Tensor, allowed: Tensor | None, peak: Tensor, mass: Tensor, energy: Tensor, temperature: float,
          softcap: float | None) -> tuple[Tensor, Tensor, Tensor]:
    """Fold a block (M, B) into the running maximum, Σ e^(l − peak) and Σ l·e^(l − peak), each (M,)."""
    logits = _final_logits(raw, temperature, softcap)
    if allowed is not None:
        logits = logits.masked_fill(~allowed, -torch.inf)
    higher = torch.maximum(peak, logits.amax(-1))
    base = torch.where(higher == -torch.inf, 0, higher)                            # no candidate so far: nothing to add
    p = torch.exp(logits - base[:, None])
    shrink = torch.exp(peak - base)
    return higher, mass * shrink + p.sum(-1), energy * shrink + torch.where(p > 0, p * logits, 0).sum(-1)


def _softmax_gradient_(raw: Tensor, allowed: Tensor | None, normaliser: Tensor, scale: Tensor, temperature: float, softcap: float | None) -> Tensor:
    """Overwrite a block of raw logits (M, B) with scale·p·(d logit / d raw)·T; scale (M, 1)."""
    d = torch.exp(_final_logits(raw, temperature, softcap) - normaliser[:, None]) * scale
    if softcap is not None:
        d = d * (1 - torch.tanh(raw.to(d.dtype) / softcap).square())
    return raw.copy_(d if allowed is None else d.masked_fill(~allowed, 0))


@cache
def _compiled(function):
    return torch.compile(function, dynamic=False)


def fused(function, *args):
    """function(*args), compiled into one pass over memory on a GPU; as it is on a CPU, where the products dominate."""
    if not args[0].is_cuda:
        return function(*args)
    for tensor in args:
        if isinstance(tensor, Tensor):
            torch._dynamo.maybe_mark_dynamic(tensor, 0)      # terms and tokens vary from row to row; a dynamic block would cost 10 %
    return _compiled(function)(*args)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b with total in fp32 for bf16 factors; on a GPU the product is not rounded before it is added."""
    if a.is_cuda and a.dtype != total.dtype:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a @ b


class FusedLogprobs(torch.autograd.Function):
    """Log-probs and entropy straight from hidden states, one vocabulary block at a time; blocks beyond `keep` bytes are recomputed in backward.

    Blocks run over the vocabulary, not over terms: with the normaliser known, each block's weight gradient is one finished
    matrix product, accumulated in fp32 inside it, and no full-size fp32 buffer of the weight exists. Peak extra memory is the
    weight's gradient, one block and an (M, D) fp32 accumulator. Products run in the dtype of their factors, reductions in fp32.
    """

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, ids: Tensor, temperature: float, softcap: float | None,
                candidates: Candidates | None, block: int, keep: int) -> tuple[Tensor, Tensor]:
        """hidden (M, D), weight (V, D), ids (M, J) with -1 for absent -> log-probs (M, J), entropy (M,)."""
        wide = torch.promote_types(hidden.dtype, torch.float32)
        peak = hidden.new_full((len(hidden),), -torch.inf, dtype=wide)            # (M,)
        mass, energy = torch.zeros_like(peak), torch.zeros_like(peak)
        chosen = hidden.new_full(ids.shape, -torch.inf, dtype=wide)               # (M, J) final logits of ids
        ctx.kept = {}                                                              # raw blocks by their start
        for start in range(0, len(weight), block):
            part, stop = weight[start:start + block], min(start + block, len(weight))
            raw = hidden @ part.T                                                  # (M, B)
            allowed = candidates.block(start, stop) if candidates else None
            peak, mass, energy = fused(_fold, raw, allowed, peak, mass, energy, temperature, softcap)
            inside, column = (ids >= start) & (ids < stop), (ids - start).clamp(0, len(part) - 1)
            if candidates:
                inside = inside & allowed.gather(1, column)
            chosen = torch.where(inside, _final_logits(raw.gather(1, column), temperature, softcap), chosen)
            if ctx.needs_input_grad[0] and raw.nbytes * (len(ctx.kept) + 1) <= keep:
                ctx.kept[start] = raw
        normaliser = peak + mass.log()                                             # (M,)
        ctx.save_for_backward(hidden, weight, ids, normaliser, chosen)
        ctx.settings = temperature, softcap, candidates, block
        entropy = normaliser - energy / mass
        ctx.mark_non_differentiable(entropy)
        return chosen - normaliser[:, None], entropy

    @staticmethod
    def backward(ctx, grad: Tensor, _):
        """d logit(v) = Σ_j grad_j·[v = id_j] − (Σ_j grad_j)·p(v); an id that is absent or outside the candidate set has no gradient."""
        (hidden, weight, ids, normaliser, chosen), (temperature, softcap, candidates, block) = ctx.saved_tensors, ctx.settings
        grad = torch.where(torch.isfinite(chosen), grad, 0) / temperature           # (M, J)
        scale = -grad.sum(-1, keepdim=True)                                         # (M, 1)
        direct = grad if softcap is None else grad * (1 - torch.where(torch.isfinite(chosen), chosen * temperature / softcap, 0).square())
        grad_hidden = torch.zeros(hidden.shape, dtype=normaliser.dtype, device=hidden.device)
        grad_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        for start in range(0, len(weight), block):
            part, stop = weight[start:start + block], min(start + block, len(weight))
            raw = ctx.kept.pop(start) if start in ctx.kept else hidden @ part.T    # popped: it is overwritten
            allowed, column = candidates.block(start, stop) if candidates else None, (ids - start).clamp(0, len(part) - 1)
            own = _softmax_gradient_(raw.gather(1, column).to(scale.dtype), allowed.gather(1, column) if candidates else None, normaliser, scale, temperature, softcap)
            for some, gradient in zip((ids - start).split(16, 1), direct.split(16, 1)):      # not (M, J, J) at once
                own += torch.where(column[:, :, None] == some[:, None], gradient[:, None], 0).sum(-1)
            d = fused(_softmax_gradient_, raw, allowed, normaliser, scale, temperature, softcap)   # (M, B)
            d.scatter_(1, column, own.to(d.dtype))    # 1 − p of a likely token rounded once, not a sum of rounded parts; equal columns have equal values
            _add_product(grad_hidden, d, part)
            if grad_weight is not None:
                torch.mm(d.T, hidden, out=grad_weight[start:stop])
        return grad_hidden.to(hidden.dtype), grad_weight, None, None, None, None, None, None


def fused_logprobs(hidden: Tensor, weight: Tensor, targets: Tensor, topk_ids: Tensor, *, temperature: float = 1.0,
                   softcap: float | None = None, candidates: Candidates | None = None, block: int = BLOCK,
                   keep: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs of the targets (M,) and of the sampler's top tokens (M, K), with gradient, and the entropy (M,), without.

    hidden (M, D), weight (V, D), targets (M,), topk_ids (M, K) with -1 where absent (log-prob -inf). Holds `block` columns of logits,
    and up to `keep` bytes of them until backward: a quarter of the head's products are then not repeated.
    """
    logprobs, entropy = FusedLogprobs.apply(hidden, weight, torch.cat([targets[:, None], topk_ids], dim=1), temperature, softcap, candidates, block, keep)
    return logprobs[:, 0].clone(), logprobs[:, 1:].clone(), entropy    # not views: FSDP hooks the outputs


@dataclass(frozen=True)
class Objective:
    """The numbers the objective depends on; see `policy_loss`."""

    clip_min: float = 0.5
    clip_max: float = 5.0
    epsilon: float = 0.2
    epsilon_high: float = 0.2
    score_centering: bool = True
    centering_tail: bool = False

    def inside(self, ratio: Tensor) -> Tensor:
        return (self.clip_min <= ratio) & (ratio <= self.clip_max)


def policy_loss(objective: Objective, logprobs: Tensor, topk_logprobs: Tensor, sampler_logprobs: Tensor,
                sampler_topk_logprobs: Tensor, advantages: Tensor) -> Tensor:
    """Loss of each term (M,), undivided. All (M,) but the two (M, K).

    A token is kept when clip_min <= r <= clip_max, with r = π/μ; any other, or one whose r is not a number, contributes exactly
    0, to the gradient too. Score centering (arXiv 2609.20807), with f(r) = r inside the bounds and 0 outside, f and μ constant:
        −A·( f(r_t)·log π(o_t) − Σ_{v in top K} μ(v)·f(r_v)·log π(v) )        since the score does not average to 0 under μ ≠ π
    `centering_tail` adds  α·Σ_{v in top K} π(v)·log π(v)  inside the brackets (its Eq. 14): the unreported tail of μ is taken
    as ρ·π, whose expected score is −Σ_K π ∇log π by normalisation; α = 1 if 1/ρ is inside the bounds, else 0. score_centering=False: GRPO's clipped surrogate.
    """
    log_ratio = logprobs - sampler_logprobs                                        # (M,)
    kept = objective.inside(log_ratio.detach().exp()) & torch.isfinite(log_ratio)   # clip_min=0 encloses a token outside the candidate set
    log_ratio = torch.where(kept, log_ratio, 0)                                    # no infinite slope behind the mask
    if not objective.score_centering:
        ratio = log_ratio.exp()
        clipped = ratio.clamp(1 - objective.epsilon, 1 + objective.epsilon_high)
        return torch.where(kept, -torch.minimum(ratio * advantages, clipped * advantages), 0)
    logprobs = torch.where(kept, logprobs, 0)
    score = log_ratio.detach().exp() * logprobs                                    # f(r_t)·log π(o_t)
    present = torch.isfinite(sampler_topk_logprobs) & torch.isfinite(topk_logprobs)
    topk_logprobs, sampler_topk_logprobs = (torch.where(present, x, 0) for x in (topk_logprobs, sampler_topk_logprobs))
    pi = torch.where(present, topk_logprobs.detach().exp(), 0)                     # (M, K), = μ(v)·r_v
    in_bounds = objective.inside((topk_logprobs - sampler_topk_logprobs).detach().exp())
    expected = (torch.where(in_bounds, pi, 0) * topk_logprobs).sum(-1)             # Σ μ(v)·f(r_v)·log π(v)
    if objective.centering_tail:
        tail_pi = 1 - pi.sum(-1)
        tail_mu = 1 - torch.where(present, sampler_topk_logprobs.exp(), 0).sum(-1)
        resolved = torch.minimum(tail_pi, tail_mu) > 1e-6                          # below, fp32 cannot tell a tail from none
        alpha = (resolved & objective.inside(tail_pi / tail_mu)).to(pi.dtype)      # 1/ρ inside the bounds
        expected = expected - alpha * (pi * topk_logprobs).sum(-1)
    return torch.where(kept, -advantages * (score - expected), 0)


def load_balancing_loss(router_logits: Tensor, top_k: int, num_tokens: int, group=None) -> Tensor:
    """This row's share of  E·Σ_e f_e·P_e  over the micro-batch (Switch Transformer, arXiv 2101.03961, Eq. 4); shares add up.

    router_logits (L, N, E); f_e the fraction of choices that went to expert e, P_e its mean probability, both over layers and
    over the `num_tokens` physical tokens of all rows. f carries no gradient, so it is summed over ranks (`group`) and the share
    is linear in this row's probabilities: the gradient does not depend on how tokens are spread over rows.
    """
    layers, _, experts = router_logits.shape
    p = router_logits.float().softmax(-1)                                          # (L, N, E)
    counts = torch.zeros(experts, device=p.device).index_add_(
        0, p.detach().topk(top_k, dim=-1).indices.flatten(), torch.ones(p.shape[0] * p.shape[1] * top_k, device=p.device))
    if group is not None:
        torch.distributed.all_reduce(counts, group=group)
    scale = layers * max(num_tokens, 1)
    return experts * (counts / scale * p.sum((0, 1)) / scale).sum()


SUMS = ("loss", "terms", "logp_difference", "ratio", "masked", "sampler_mass", "entropy", "clip_low", "clip_high", "k3", "aux", "aux_weight")
MAXIMA = ("logp_difference", "ratio", "minus_ratio", "clip_high", "minus_clip_low")


class LossStats:
    """Sums and extremes over the trained tokens of a step, kept on the device and reduced over ranks by one collective."""

    def __init__(self, device: torch.device):
        self.sums = torch.zeros(len(SUMS), dtype=torch.float64, device=device)
        self.maxima = torch.full((len(MAXIMA),), -torch.inf, dtype=torch.float64, device=device)

    @torch.no_grad()
    def add(self, objective: Objective, logprobs: Tensor, entropy: Tensor, sampler_logprobs: Tensor,
            sampler_topk_logprobs: Tensor, advantages: Tensor, term_sample: Tensor, num_samples: int) -> None:
        """One row's terms; shapes as in `policy_loss`, term_sample (M,) numbering the row's samples."""
        if len(logprobs) == 0:
            return
        log_ratio = (logprobs - sampler_logprobs).clamp(-80, 80)                   # finite in the log even when masked
        ratio = log_ratio.exp()
        low, high = ratio < 1 - objective.epsilon, ratio > 1 + objective.epsilon_high
        if not objective.score_centering:                                          # there the loss clips, on one side of zero each
            low, high = low & (advantages < 0), high & (advantages > 0)
        per_sample = torch.zeros(3, num_samples, device=ratio.device, dtype=ratio.dtype)
        per_sample.index_add_(1, term_sample, torch.stack([torch.ones_like(ratio), low.to(ratio.dtype), high.to(ratio.dtype)]))
        fractions = per_sample[1:] / per_sample[0]                                 # (2, num_samples); NaN without a trained token
        lows, highs = (fractions.nan_to_num(nan=fill) for fill in (torch.inf, -torch.inf))
        self.sums += torch.stack([x.double().sum() for x in (
            ratio[:0], torch.ones_like(ratio), log_ratio.abs(), ratio, ~(objective.inside(ratio) & torch.isfinite(logprobs)), sampler_topk_logprobs.exp(), entropy,
            low, high, ratio.clamp(max=1e9) - 1 - log_ratio, ratio[:0], ratio[:0])])
        self.maxima = torch.maximum(self.maxima, torch.stack([x.double().max() for x in (log_ratio.abs(), ratio, -ratio, highs[1], -lows[0])]))

    @torch.no_grad()
    def add_loss(self, share: Tensor, aux: Tensor | None, aux_weight: float) -> None:
        """This rank's shares of a micro-batch's loss and of its auxiliary loss before the coefficient; all ranks' shares add up."""
        self.sums[SUMS.index("loss")] += share.double()
        if aux is not None:
            self.sums[SUMS.index("aux")] += aux.double() * aux_weight
            self.sums[SUMS.index("aux_weight")] += aux_weight

    def reduce(self, objective: Objective, group=None) -> tuple[dict[str, float], float, float]:
        """Over all ranks: the loss-side metrics ({} without a trained token), the trained tokens they are means of, and the loss."""
        both = torch.cat([self.sums, self.maxima])
        if group is not None:
            parts = [torch.empty_like(both) for _ in range(group.size())]
            torch.distributed.all_gather(parts, both, group=group)
            both = torch.stack(parts)
        both = both.reshape(-1, len(SUMS) + len(MAXIMA)).cpu()
        total = dict(zip(SUMS, both[:, :len(SUMS)].sum(0).tolist()))
        peak = dict(zip(MAXIMA, both[:, len(SUMS):].amax(0).tolist()))
        loss, n = total.pop("loss"), total.pop("terms")
        if not n:
            return {}, 0, loss
        aux = {"aux_loss": total["aux"]} if total["aux_weight"] else {}
        mean = {name: value / n for name, value in total.items()}
        mass = {"sampling/sampler_mass": mean["sampler_mass"]} if objective.score_centering else {}
        return aux | mass | {
            "sampling/sampling_logp_difference/mean": mean["logp_difference"], "sampling/sampling_logp_difference/max": peak["logp_difference"],
            "sampling/importance_sampling_ratio/min": -peak["minus_ratio"], "sampling/importance_sampling_ratio/max": peak["ratio"],
            "sampling/importance_sampling_ratio/mean": mean["ratio"], "sampling/masked_mean": mean["masked"],
            "sampling/mismatch_kl": mean["k3"], "entropy": mean["entropy"],
            "clip_ratio/region_mean": mean["clip_low"] + mean["clip_high"],
            "clip_ratio/low_mean": mean["clip_low"], "clip_ratio/low_min": -peak["minus_clip_low"],
            "clip_ratio/high_mean": mean["clip_high"], "clip_ratio/high_max": peak["clip_high"],
        }, n, loss
