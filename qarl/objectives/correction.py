"""Correction of the mismatch between sampler and learner: importance weights, rejection rules and a veto.

A correction multiplies the surrogate by a weight per token, without gradient. Bounds apply to the ratio learner over
sampler, never to its inverse. Rejected tokens still count in the denominators of the aggregation (VeXact, equations 8
to 11). Pruned tokens have weight 0 and count as unmoved (ratio 1) in everything computed over a response. Only pruning
itself decides whether they drop their response.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from qarl.objectives.common import (
    MAX_EXPONENT,
    Pruned,
    Stats,
    TokenLogProbs,
    bound_stats,
    clamped_exp,
    k_estimate,
    log_ratio,
    stat,
    weight_stats,
)
from qarl.objectives.correction_config import CorrectionConfig, RejectRule
from qarl.objectives.segments import Segments

REJECTED = "correction/rejected_frac"


def per_token(config: CorrectionConfig) -> bool:
    """Whether tokens of a response may have different weights. If so, statistics are per token, else per response."""
    return config.level == "token" or any(rule.per_token for rule in config.reject or ())


@torch.no_grad()
def correct(
    config: CorrectionConfig, logps: TokenLogProbs, segments: Segments, pruned: Pruned, weight_mean: float = 1.0
) -> tuple[Tensor, Stats]:
    """Compute the weight of each token, (T,): importance weight, times 0 if a rule, the veto or the pruning drops it.

    The importance weights are divided by `weight_mean` (see `mean_weight`). Statistics, per token if `per_token`, else
    per non-empty response:

        correction/weight_mean, correction/ess  of the final weights
        correction/rejected_frac    fraction with weight 0; a response counts if all its tokens have weight 0
        correction/raw_ratio_mean   mean ratio before bounding
        correction/bias, correction/variance  see `bound_stats`
        correction/cap              upper bound of the weights, if `correction.cap` is auto
        correction/clamped_frac     fraction of weights with an exponent clamped to +-20

    Always per non-empty response: `correction/veto_frac`, `correction/rule_clamped_frac` (an exponent of a rule was
    clamped), and the fraction that each rule rejects (per token for rules with aggregate token).
    """
    present, stats = segments.present, Stats()
    keep, keep_tokens = torch.ones_like(present), torch.ones_like(segments.index, dtype=torch.bool)
    clamped = torch.zeros_like(present)
    for rule in config.reject or ():
        passed, beyond = kept(_log_ratio(rule.signal, logps, pruned), segments, rule)
        clamped |= beyond
        stats[rule.metric] = stat(~passed, None if rule.per_token else present)
        if rule.per_token:
            keep_tokens &= passed
        else:
            keep &= passed
    if config.reject:
        stats["correction/rule_clamped_frac"] = stat(clamped, present)
    if config.veto is not None:
        dropped = segments.any(_log_ratio("corr", logps, pruned).double() < math.log(config.veto))
        stats["correction/veto_frac"] = stat(dropped, present)
        keep &= ~dropped
    keep, keep_tokens = keep & ~pruned.responses, keep_tokens & ~pruned.tokens

    weights = logps.logp_old.new_ones(present.shape)
    if config.level != "none":
        bounded, ratio, beyond = importance_weights(config, logps, segments, pruned)
        weights = bounded / weight_mean
        unit = None if config.level == "token" else present
        stats |= bound_stats(bounded, ratio, unit)
        if config.cap == "auto" and config.upper is not None:
            stats["correction/cap"] = stat(weights.new_tensor([config.upper]))
        stats["correction/raw_ratio_mean"] = stat(ratio, unit)
        stats["correction/clamped_frac"] = stat(beyond, unit)
    if per_token(config):
        weights = weights if config.level == "token" else segments.expand(weights)
        weights = weights.masked_fill(~(segments.expand(keep) & keep_tokens), 0.0)
        return weights, stats | weight_stats(weights) | {REJECTED: stat(weights == 0.0)}
    weights = weights.masked_fill(~keep, 0.0)
    by_token = segments.expand(weights).masked_fill(~keep_tokens, 0.0)
    rejected = stat(~segments.any(by_token != 0.0), present)
    return by_token, stats | weight_stats(weights, present) | {REJECTED: rejected}


@torch.no_grad()
def importance_weights(
    config: CorrectionConfig, logps: TokenLogProbs, segments: Segments, pruned: Pruned
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the bounded ratio learner over sampler, 0 if pruned: (T,) at level token, else (R,), without gradient.

    level: `token` is exp(o_t - b_t), `sequence` exp(sum_t) and `geometric` exp(mean_t); the tokens of a response share
    the last two. mode: `truncate` clips the ratio to [lower, upper] (TIS); `mask` sets it to 0 outside of the bounds
    (MIS, IcePop); `raw` keeps it, which is unbiased per response, with a variance that grows with the length.

    Args:
        config: The correction, with a `level` other than none.
        logps: Log-probs of the T tokens.
        segments: The response of each token.
        pruned: Tokens and responses with weight 0.

    Returns:
        The weights, the ratio before bounding, and the bool mask of exponents clamped to +-20.
    """
    assert config.signal is not None, "config.signal is set by validation"
    x, gone = _log_ratio(config.signal, logps, pruned), pruned.responses
    if config.level == "token":
        exponent, gone = x, pruned.tokens
    elif config.level == "sequence":
        exponent = segments.sum(x)
    else:
        assert config.level == "geometric", f"unknown correction level {config.level!r}"
        exponent = segments.mean(x)
    ratio, clamped = clamped_exp(exponent)
    low = -math.inf if config.lower is None else config.lower
    high = math.inf if config.upper is None else config.upper
    if config.mode == "truncate":
        weights = ratio.clamp(low, high)
    elif config.mode == "mask":
        weights = ratio.masked_fill((ratio > high) | (ratio < low), 0.0)
    else:
        assert config.mode == "raw", f"unknown correction mode {config.mode!r}"
        weights = ratio
    return weights.masked_fill(gone, 0.0), ratio.masked_fill(gone, 0.0), clamped & ~gone


@torch.no_grad()
def optimal_cap(config: CorrectionConfig, logps: TokenLogProbs, segments: Segments, pruned: Pruned) -> float | None:
    """Compute C* = sqrt(2 (1 + chi2)): it minimizes an upper bound on the mean squared error of a truncated weight.

    1 + chi2 is the mean square of the ratio learner over sampler, per token or per response according to
    `config.level`, without pruned tokens (survey, section on sequence-level truncation).

    Returns:
        The cap; None unless `correction.cap` is auto, or if nothing is left to average.
    """
    if config.cap != "auto":
        return None
    ratio = importance_weights(config, logps, segments, pruned)[1].double()
    counted = ~pruned.tokens if config.level == "token" else segments.present & ~pruned.responses
    square = ratio[counted].square()
    return math.sqrt(2.0 * float(square.mean())) if square.numel() else None


@torch.no_grad()
def mean_weight(config: CorrectionConfig, logps: TokenLogProbs, segments: Segments, pruned: Pruned) -> float:
    """Compute the mean importance weight before rules and veto, per token at level token, else per non-empty response.

    Pruned tokens and responses count with weight 0. Returns 1.0 if there are no weights, or if all are 0.
    """
    if config.level == "none":
        return 1.0
    weights = importance_weights(config, logps, segments, pruned)[0].double()
    if config.level != "token":
        weights = weights[segments.present]
    mean = float(weights.mean()) if weights.numel() else 1.0
    return mean if mean != 0.0 else 1.0


def kept(log_ratio: Tensor, segments: Segments, rule: RejectRule) -> tuple[Tensor, Tensor]:
    """Find the responses or tokens that a rule keeps: lower <= score <= upper.

    Computed in float64: k3 of a small mismatch is a difference of nearly equal numbers, and thresholds are of order
    1e-3. Empty responses are kept. Responses with a NaN are kept too, because the NaN has to reach the loss.

    Args:
        log_ratio: (T,) log ratio of the rule's signal.
        segments: The response of each token.
        rule: The rule.

    Returns:
        (R,) bool, responses kept, or with aggregate token (T,) bool, tokens kept; and (R,) bool, responses with an
        exponent clamped to +-20, infinite ones included.
    """
    x = log_ratio.detach().double()
    lower = -math.inf if rule.lower is None else rule.lower
    upper = math.inf if rule.upper is None else rule.upper
    if rule.estimator == "ratio" and rule.aggregate in ("sum", "mean"):
        x = segments.sum(x) if rule.aggregate == "sum" else segments.mean(x)
        score, clamped = clamped_exp(x)
    else:
        clamped = segments.any(x.abs() > MAX_EXPONENT)
        score = clamped_exp(x)[0] if rule.estimator == "ratio" else k_estimate(x, rule.estimator)
        if rule.per_token:
            return ~((score < lower) | (score > upper)), clamped
        if rule.estimator == "ratio":
            return ~segments.any((score < lower) | (score > upper)), clamped
        if rule.aggregate == "max":
            # An exact maximum is the same in any order, so scatter is safe here.
            lowest = score.new_full(segments.lengths.shape, -math.inf)
            score = lowest.scatter_reduce(0, segments.index, score, "amax")
        else:
            score = segments.sum(score) if rule.aggregate == "sum" else segments.mean(score)
    return ~segments.present | ~((score < lower) | (score > upper)), clamped


def _log_ratio(signal: str, logps: TokenLogProbs, pruned: Pruned) -> Tensor:
    """Return the log ratio (T,), learner at the rollout's weights (`corr`) or now (`rollout`) over sampler."""
    learner = logps.logp_old if signal == "corr" else logps.logp
    return log_ratio(learner, logps.logp_sampler).masked_fill(pruned.tokens, 0.0)
