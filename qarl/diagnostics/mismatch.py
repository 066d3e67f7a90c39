"""How far the sampler's log-probs are from the learner's, on the sampled tokens: raw, before any correction."""

from __future__ import annotations

import torch
from torch import Tensor

from qarl.objectives.ratios import MAX_EXPONENT
from qarl.objectives.segments import Segments


@torch.no_grad()
def mismatch_metrics(logp_old: Tensor, logp_sampler: Tensor, segments: Segments) -> dict[str, float]:
    """Mismatch of a batch: logp_old [T] (learner at the rollout's snapshot), logp_sampler [T] -> metrics.

    With delta_t = o_t - b_t and r_t = exp(delta_t), learner over sampler:

        mismatch/delta_abs_mean, mismatch/delta_abs_max   of |delta_t|, nats
        mismatch/k1         mean(-log r)
        mismatch/k3         mean(r - 1 - log r)
        mismatch/ppl_ratio  learner's perplexity over the sampler's, exp(-mean delta)
        mismatch/chi2_token mean_t(exp(2 delta_t)) - 1
        mismatch/chi2_seq   mean over non-empty responses of exp(2 sum_t delta_t), - 1
        mismatch/clamped_frac  responses in which an exponent was clamped to +-20 or a delta_t was infinite

    An infinite delta_t (one side's log-prob is -inf) enters as +-20; two equal infinities are no mismatch. Equal
    log-probs give exactly 0.0, and ppl_ratio exactly 1.0. Computed in float64; one transfer from the device.
    """
    difference = logp_old.double() - logp_sampler.double()
    difference = difference.masked_fill(logp_old == logp_sampler, 0.0)
    infinite = torch.isinf(difference)
    delta = torch.where(infinite, difference.sign() * MAX_EXPONENT, difference)
    sums = 2.0 * segments.sum(delta)  # (R,)
    tokens = max(delta.numel(), 1)
    responses = (segments.lengths > 0).sum().clamp(min=1)

    clamped_tokens = segments.sum((infinite | (2.0 * delta.abs() > MAX_EXPONENT)).to(torch.int64))
    clamped = (clamped_tokens > 0) | (sums.abs() > MAX_EXPONENT)
    delta_mean = delta.sum() / tokens
    metrics = {
        "mismatch/delta_abs_mean": delta.abs().sum() / tokens,
        "mismatch/delta_abs_max": delta.abs().max() if delta.numel() else delta.sum(),
        "mismatch/k1": 0.0 - delta_mean,  # not a negation: equal log-probs log 0.0, not -0.0
        "mismatch/k3": (_clamp(delta).expm1() - delta).sum() / tokens,
        "mismatch/ppl_ratio": _clamp(-delta_mean).exp(),
        # expm1 before the mean, not mean - 1: small mismatches keep their digits. An empty response adds expm1(0) = 0.
        "mismatch/chi2_token": _clamp(2.0 * delta).expm1().sum() / tokens,
        "mismatch/chi2_seq": _clamp(sums).expm1().sum() / responses,
        "mismatch/clamped_frac": clamped.sum() / responses,
    }
    values = torch.stack([value.double() for value in metrics.values()]).cpu().tolist()
    return dict(zip(metrics, values, strict=True))


def _clamp(exponent: Tensor) -> Tensor:
    return exponent.clamp(-MAX_EXPONENT, MAX_EXPONENT)
