"""Mismatch between sampler and learner log-probs on the sampled tokens, before any correction."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qarl.objectives.common import MAX_EXPONENT
from qarl.objectives.segments import Segments

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p999": 0.999}


@torch.no_grad()
def mismatch_metrics(logp_old: Tensor, logp_sampler: Tensor, segments: Segments) -> dict[str, float]:
    """Compute the sampler-learner mismatch metrics of a batch.

    With o_t from `logp_old`, b_t from `logp_sampler`, delta_t = o_t - b_t and r_t = exp(delta_t) (VeXact, equation 1):

        mismatch/delta_abs_mean, mismatch/delta_abs_max   of |delta_t|, nats
        mismatch/delta_abs_p50, _p90, _p99, _p999         quantiles of |delta_t| over the tokens, nats
        mismatch/k1         mean(-log r)
        mismatch/k3         mean(r - 1 - log r)
        mismatch/k3_inside  k3 over the tokens with finite log-probs on both sides
        mismatch/ppl_learner, mismatch/ppl_sampler  exp(-mean o), exp(-mean b), over finite values
        mismatch/ppl_ratio  learner's perplexity over the sampler's, exp(-mean delta)
        mismatch/chi2_token mean_t(exp(2 delta_t)) - 1
        mismatch/chi2_seq   mean over non-empty responses of exp(2 sum_t delta_t), minus 1
        mismatch/tv         mean_t |1 - r_t| / 2, and mismatch/tv_seq, mean over non-empty responses of
                            |1 - exp(sum_t delta_t)| / 2. Both estimate the total variation distance,
                            sum |p_b - p_o| / 2 = E_b |1 - p_o / p_b| / 2, per token and per response, from the
                            sampled tokens
        mismatch/optimal_cap_token, mismatch/optimal_cap_seq  C* = sqrt(2 (1 + chi2)), from chi2_token and chi2_seq:
                            the cap that minimizes an upper bound on a truncated weight's mean squared error
        mismatch/ess        (sum r)^2 / sum r^2: effective number of tokens after weighting by r
        mismatch/ess_frac   ess over the number of tokens, in (0, 1]
        mismatch/rollout_probs_diff_mean, _max, _std      of |exp(o_t) - exp(b_t)|; names and definition as in verl
        mismatch/tail_delta_mean, mismatch/head_delta_mean  signed mean of delta_t over the tokens inside both
                            distributions whose sampler probability is below 0.1 (tail) or at least 0.9 (head). The
                            tail mean is negative if the sampler draws tokens that it overrates (DVP, proposition
                            4.3). Omitted if there are no such tokens
        mismatch/outside_frac  share of tokens outside either truncated distribution (infinite log-prob)
        mismatch/clamped_frac  share of responses in which an exponent was clamped to +-20 or a delta_t was infinite

    An infinite delta_t (one side's log-prob is -inf) counts as +-20; two equal infinities count as no mismatch.
    Equal log-probs give exactly 0.0, and exactly 1.0 for ppl_ratio and ess_frac. Total variation, chi2 and the cap
    follow the survey of determinism and off-policy correction (sections on bias and variance and on truncated
    importance sampling). Computes in float64, with one transfer from the device.

    Args:
        logp_old: (T,) learner log-probs at the rollout's weights, nats.
        logp_sampler: (T,) log-probs as the sampler reported them, nats.
        segments: The response of each token.

    Returns:
        The metrics above by name.
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
    # expm1 before the mean, not mean - 1: small mismatches keep their digits. An empty response adds expm1(0) = 0.
    chi2_token = _clamp(2.0 * delta).expm1().sum() / tokens
    chi2_seq = _clamp(sums).expm1().sum() / responses
    none = delta.new_zeros(())
    metrics = {
        "mismatch/delta_abs_mean": gap.sum() / tokens,
        "mismatch/delta_abs_max": gap.max() if count else none,
        **{f"mismatch/delta_abs_{name}": value for name, value in _quantiles(gap).items()},
        "mismatch/k1": 0.0 - delta_mean,  # not a negation: equal log-probs log 0.0, not -0.0
        "mismatch/k3": (_clamp(delta).expm1() - delta).sum() / tokens,
        "mismatch/k3_inside": (_clamp(delta).expm1() - delta)[~infinite].sum() / (~infinite).sum().clamp(min=1),
        "mismatch/ppl_learner": _perplexity(old),
        "mismatch/ppl_sampler": _perplexity(sampler),
        "mismatch/ppl_ratio": (-delta_mean).exp(),
        "mismatch/chi2_token": chi2_token,
        "mismatch/chi2_seq": chi2_seq,
        "mismatch/optimal_cap_token": (2.0 * (1.0 + chi2_token)).sqrt(),
        "mismatch/optimal_cap_seq": (2.0 * (1.0 + chi2_seq)).sqrt(),
        "mismatch/tv": _clamp(delta).expm1().abs().sum() / tokens / 2.0,
        "mismatch/tv_seq": _clamp(sums / 2.0).expm1().abs().sum() / responses / 2.0,
        "mismatch/ess": ess,
        "mismatch/ess_frac": ess / tokens,
        "mismatch/rollout_probs_diff_mean": apart_mean,
        "mismatch/rollout_probs_diff_max": apart.max() if count else none,
        "mismatch/rollout_probs_diff_std": apart.std() if count > 1 else none,
        "mismatch/outside_frac": (torch.isinf(old) | torch.isinf(sampler)).double().sum() / tokens,
        "mismatch/clamped_frac": clamped.double().sum() / responses,
    }
    probability = sampler.exp()
    parts = {"tail": ~infinite & (probability < 0.1), "head": ~infinite & (probability >= 0.9)}
    for name, part in parts.items():
        metrics[f"mismatch/{name}_delta_mean"] = delta.masked_fill(~part, 0.0).sum() / part.sum().clamp(min=1)
    stacked = torch.stack([value.double() for value in (*metrics.values(), *(x.sum() for x in parts.values()))])
    *values, tail, head = stacked.cpu().tolist()
    left_out = {f"mismatch/{name}_delta_mean" for name, n in (("tail", tail), ("head", head)) if not n}
    return {name: value for name, value in zip(metrics, values, strict=True) if name not in left_out}


@torch.no_grad()
def probability_deciles(logp_old: Tensor, logp_sampler: Tensor) -> list[dict[str, Any]]:
    """Tabulate the log-prob gap by the sampler's probability of the token, in ten equal ranges of [0, 1].

    Rounding of size eps in the logits changes the log-prob of a token with probability p by at most 2 eps (1 - p) (DVP,
    proposition 4.2). A gap that grows towards the tail therefore indicates low precision. In the tail, the mean of
    delta = o - b is negative, because the sampler draws tokens that it overrates (proposition 4.3).

    Args:
        logp_old: (T,) learner log-probs at the rollout's weights, nats.
        logp_sampler: (T,) log-probs as the sampler reported them, nats.

    Returns:
        One row per range: low, high (probability bounds; the last range includes 1), count, delta_abs_mean (nats; None
        if the range is empty) and delta_mean (nats, over the tokens inside both distributions; None if there are none).
    """
    delta, infinite = log_prob_gap(logp_old.double(), logp_sampler.double())
    row = (logp_sampler.double().exp() * 10).nan_to_num(0.0).long().clamp(0, 9)
    finite, ones = (~infinite).double(), torch.ones_like(delta)
    columns = (ones, delta.abs(), finite, delta * finite)
    sums = torch.stack([delta.new_zeros(10).index_add_(0, row, x) for x in columns], dim=1).tolist()
    return [
        {
            "low": i / 10,
            "high": (i + 1) / 10,
            "count": int(count),
            "delta_abs_mean": gap / count if count else None,
            "delta_mean": signed / inside if inside else None,
        }
        for i, (count, gap, inside, signed) in enumerate(sums)
    ]


def gap_tables(logp_old: Tensor, logp_sampler: Tensor, segments: Segments) -> dict[str, list[dict[str, Any]]]:
    """Tabulate |delta| by token position (VeXact, section 3) and by tail probability (DVP, section 4).

    Args:
        logp_old: (T,) learner at the rollout's weights.
        logp_sampler: (T,) as the sampler reported.
        segments: The response of each token.

    Returns:
        Tables of rows low, high, count, delta_abs_mean (nats), without empty rows; `high` is excluded, None if open:

            positions  of the token in its response, from 0, in powers of two
            lengths    of the token's response, in tokens, in powers of two
            tail       probability that the sampler gave the token, in powers of ten, the first row below 1e-6
    """
    delta, _ = log_prob_gap(logp_old.double(), logp_sampler.double())
    starts = segments.lengths.cumsum(0) - segments.lengths
    positions = torch.arange(len(delta), device=delta.device) - segments.expand(starts)
    longest = int(segments.lengths.max()) if len(segments.lengths) else 0
    powers = [0.0, *(2.0**k for k in range(longest.bit_length() + 1))]
    tens = [0.0, *(10.0**-k for k in range(6, -1, -1))]
    by = {
        "positions": (positions, powers),
        "lengths": (segments.expand(segments.lengths), powers),
        "tail": (logp_sampler.double().exp(), tens),
    }
    return {name: _table(where.double(), edges, delta.abs()) for name, (where, edges) in by.items()}


def _table(where: Tensor, edges: list[float], gap: Tensor) -> list[dict[str, Any]]:
    """Average `gap` per range of `where`: [low, high) between consecutive `edges`, the last range open."""
    row = torch.bucketize(where, torch.tensor(edges, dtype=torch.float64, device=where.device), right=True) - 1
    empty = gap.new_zeros(len(edges))
    counts = empty.index_add(0, row.clamp(min=0), torch.ones_like(gap)).tolist()
    sums = empty.index_add(0, row.clamp(min=0), gap).tolist()
    highs = [*edges[1:], None]
    return [
        {"low": low, "high": high, "count": int(count), "delta_abs_mean": total / count}
        for low, high, count, total in zip(edges, highs, counts, sums, strict=True)
        if count
    ]


def log_prob_gap(logp: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Return logp - other (T,), with infinite differences as +-20 and equal infinities as 0; and which were infinite.

    The second tensor is (T,) bool.
    """
    difference = (logp - other).masked_fill(logp == other, 0.0)
    infinite = torch.isinf(difference)
    return torch.where(infinite, difference.sign() * MAX_EXPONENT, difference), infinite


def _quantiles(values: Tensor) -> dict[str, Tensor]:
    """The order statistic of rank ceil(q n) for each of QUANTILES; 0 without values."""
    if not values.numel():
        return dict.fromkeys(QUANTILES, values.new_zeros(()))
    ordered = values.float().sort().values  # float32 is enough: inputs are float32
    ranks = {name: max(-(-int(q * 1000) * len(ordered) // 1000), 1) - 1 for name, q in QUANTILES.items()}
    return {name: ordered[rank] for name, rank in ranks.items()}


def _perplexity(logp: Tensor) -> Tensor:
    finite = ~torch.isinf(logp)
    return (-logp.masked_fill(~finite, 0.0).sum() / finite.sum().clamp(min=1)).exp()


def _clamp(exponent: Tensor) -> Tensor:
    return exponent.clamp(-MAX_EXPONENT, MAX_EXPONENT)
