"""Correction of the mismatch between sampler and learner by importance weights.

A correction is a weight a token that multiplies the surrogate, without gradient. Corrections are independent factors:
several combine by multiplying their weights and joining their statistics.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from qarl.objectives.ratios import clamped_exp, log_ratio
from qarl.objectives.segments import Segments
from qarl.objectives.surrogate import Stats, present, stat, weight_stats


class CorrectionOptions(Protocol):
    """The `correction` section. Bounds are on the ratio learner over sampler; `lower` None is no lower bound."""

    level: Literal["none", "token", "sequence", "geometric"]
    mode: Literal["truncate", "mask"]
    lower: float | None
    upper: float


@dataclass(frozen=True)
class Correction:
    """weights: [T], without gradient. stats: (sum, count) tensors, per token or per non-empty response."""

    weights: Tensor
    stats: Stats


@torch.no_grad()
def importance_weights(
    logp_old: Tensor,  # (T,) learner at the rollout's snapshot
    logp_sampler: Tensor,  # (T,) as the sampler reported
    segments: Segments,
    options: CorrectionOptions,
) -> Correction:
    """The bounded ratio learner over sampler, at every token.

    level: `token` exp(o_t - b_t); `sequence` exp(sum_t); `geometric` exp(mean_t), shared by the response's tokens.
    mode: `truncate` the ratio to [lower, upper] (TIS); `mask` it to 0 outside, both bounds kept (MIS, IcePop).
    A masked token still counts in the aggregation's denominators. Level `none` is the caller's: it calls nothing.

    Statistics: `correction/weight_mean`, `correction/ess`, `correction/rejected_frac` (weights masked to 0) and
    `correction/clamped_frac` (exponents clamped to +-20).
    """
    delta = log_ratio(logp_old, logp_sampler)
    per_token = options.level == "token"
    if per_token:
        exponent = delta
    elif options.level == "sequence":
        exponent = segments.sum(delta)
    else:
        assert options.level == "geometric", f"unknown correction level {options.level!r}"
        exponent = segments.mean(delta)
    ratio, clamped = clamped_exp(exponent)

    if options.mode == "truncate":
        rejected = torch.zeros_like(ratio, dtype=torch.bool)
        weights = ratio.clamp(options.lower, options.upper)
    else:
        rejected = ratio > options.upper
        if options.lower is not None:
            rejected |= ratio < options.lower
        weights = ratio.masked_fill(rejected, 0.0)

    mask = None if per_token else present(segments)
    stats = weight_stats(weights, mask)
    stats["correction/rejected_frac"] = stat(rejected, mask)
    stats["correction/clamped_frac"] = stat(clamped, mask)
    return Correction(weights if per_token else segments.expand(weights), stats)
