"""How far the sampler's log-probs are from the learner's, on the sampled tokens: raw, before any correction."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qarl.objectives.ratios import MAX_EXPONENT
from qarl.objectives.segments import Segments

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p999": 0.999}


@torch.no_grad()
def mismatch_metrics(logp_old: Tensor, logp_sampler: Tensor, segments: Segments) -> dict[str, float]:
    """Mismatch of a batch: logp_old [T] (learner at the rollout's snapshot), logp_sampler [T] -> metrics.

    With delta_t = o_t - b_t and r_t = exp(delta_t), learner over sampler (VeXact, equation 1):

        mismatch/delta_abs_mean, mismatch/delta_abs_max   of |delta_t|, nats
        mismatch/delta_abs_p50, _p90, _p99, _p999         the smallest |delta_t| that as many of the tokens stay within
        mismatch/k1         mean(-log r)
        mismatch/k3         mean(r - 1 - log r)
        mismatch/ppl_learner, mismatch/ppl_sampler  exp(-mean o), exp(-mean b), over the tokens where it is finite
        mismatch/ppl_ratio  learner's perplexity over the sampler's, exp(-mean delta)
        mismatch/chi2_token mean_t(exp(2 delta_t)) - 1
        mismatch/chi2_seq   mean over non-empty responses of exp(2 sum_t delta_t), - 1
        mismatch/ess        (sum r)^2 / sum r^2: how many tokens the batch is worth after weighting by r
        mismatch/ess_frac   that over the tokens there are, in (0, 1]
        mismatch/rollout_probs_diff_mean, _max, _std      of |exp(o_t) - exp(b_t)|, the names and definition of verl
        mismatch/outside_frac  tokens of which one side's log-prob is infinite: outside its truncated distribution
        mismatch/clamped_frac  responses in which an exponent was clamped to +-20 or a delta_t was infinite

    An infinite delta_t (one side's log-prob is -inf) enters as +-20; two equal infinities are no mismatch. Equal
    log-probs give exactly 0.0, and ppl_ratio and ess_frac exactly 1.0. Computed in float64; one transfer from the
    device.
    """
    old, sampler = logp_old.double(), logp_sampler.double()
    delta, infinite = log_prob_gap(old, sampler)
    gap = delta.abs()
    sums = 2.0 * segments.sum(delta)  # (R,)
    count = delta.numel()
    tokens = max(count, 1)
    responses = (segments.lengths > 0).sum().clamp(min=1)

    clamped_tokens = segments.sum((infinite | (2.0 * gap > MAX_EXPONENT)).to(torch.int64))
    clamped = (clamped_tokens > 0) | (sums.abs() > MAX_EXPONENT)
    delta_mean = delta.sum() / tokens
    ratio = _clamp(delta).exp()
    square = ratio.square().sum()
    ess = torch.where(square > 0, ratio.sum().square() / square, square)
    apart = (old.exp() - sampler.exp()).abs()
    apart_mean = apart.sum() / tokens
    none = delta.new_zeros(())
    metrics = {
        "mismatch/delta_abs_mean": gap.sum() / tokens,
        "mismatch/delta_abs_max": gap.max() if count else none,
        **{f"mismatch/delta_abs_{name}": value for name, value in _quantiles(gap).items()},
        "mismatch/k1": 0.0 - delta_mean,  # not a negation: equal log-probs log 0.0, not -0.0
        "mismatch/k3": (_clamp(delta).expm1() - delta).sum() / tokens,
        "mismatch/ppl_learner": _perplexity(old),
        "mismatch/ppl_sampler": _perplexity(sampler),
        "mismatch/ppl_ratio": _clamp(-delta_mean).exp(),
        # expm1 before the mean, not mean - 1: small mismatches keep their digits. An empty response adds expm1(0) = 0.
        "mismatch/chi2_token": _clamp(2.0 * delta).expm1().sum() / tokens,
        "mismatch/chi2_seq": _clamp(sums).expm1().sum() / responses,
        "mismatch/ess": ess,
        "mismatch/ess_frac": ess / tokens,
        "mismatch/rollout_probs_diff_mean": apart_mean,
        "mismatch/rollout_probs_diff_max": apart.max() if count else none,
        "mismatch/rollout_probs_diff_std": apart.std() if count > 1 else none,
        "mismatch/outside_frac": (torch.isinf(old) | torch.isinf(sampler)).double().sum() / tokens,
        "mismatch/clamped_frac": clamped.double().sum() / responses,
    }
    values = torch.stack([value.double() for value in metrics.values()]).cpu().tolist()
    return dict(zip(metrics, values, strict=True))


@torch.no_grad()
def probability_deciles(logp_old: Tensor, logp_sampler: Tensor) -> list[dict[str, Any]]:
    """|delta| by the probability the sampler gave the token: [T], [T] -> ten rows, one a tenth of [0, 1].

    A row: low, high (bounds of the probability; the last holds 1), count, delta_abs_mean (nats; None without tokens).
    Rounding of size eps in the logits moves the log-prob of a token of probability p by 2 eps (1 - p) at most (DVP,
    proposition 4.2), so a gap that grows towards the tail is what low precision looks like.
    """
    gap = log_prob_gap(logp_old.double(), logp_sampler.double())[0].abs()
    row = (logp_sampler.double().exp() * 10).nan_to_num(0.0).long().clamp(0, 9)
    counts = torch.bincount(row, minlength=10).tolist()
    sums = torch.zeros(10, dtype=torch.float64, device=gap.device).index_add_(0, row, gap).tolist()
    return [
        {"low": i / 10, "high": (i + 1) / 10, "count": n, "delta_abs_mean": total / n if n else None}
        for i, (n, total) in enumerate(zip(counts, sums, strict=True))
    ]


def log_prob_gap(logp: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """logp - other with an infinite difference as +-20 and equal infinities as 0, and which were infinite: [T], [T]."""
    difference = (logp - other).masked_fill(logp == other, 0.0)
    infinite = torch.isinf(difference)
    return torch.where(infinite, difference.sign() * MAX_EXPONENT, difference), infinite


def _quantiles(values: Tensor) -> dict[str, Tensor]:
    """The order statistic of rank ceil(q n) for each of QUANTILES; 0 without values."""
    if not values.numel():
        return dict.fromkeys(QUANTILES, values.new_zeros(()))
    ordered = values.float().sort().values  # of float32 inputs differences are float32 to within half a step
    ranks = {name: max(-(-int(q * 1000) * len(ordered) // 1000), 1) - 1 for name, q in QUANTILES.items()}
    return {name: ordered[rank] for name, rank in ranks.items()}


def _perplexity(logp: Tensor) -> Tensor:
    finite = ~torch.isinf(logp)
    return _clamp(-logp.masked_fill(~finite, 0.0).sum() / finite.sum().clamp(min=1)).exp()


def _clamp(exponent: Tensor) -> Tensor:
    return exponent.clamp(-MAX_EXPONENT, MAX_EXPONENT)
