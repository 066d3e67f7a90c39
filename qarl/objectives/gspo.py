"""GSPO, Group Sequence Policy Optimization (Zheng et al. 2025): PPO clipping of one ratio a response.

A geometric mean stays far closer to 1 than a token's ratio, so its bounds are about a thousand times narrower.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qarl.objectives.band import Band
from qarl.objectives.pruning import Pruned, counted
from qarl.objectives.ratios import sequence_ratio, through_tokens
from qarl.objectives.segments import Segments
from qarl.objectives.surrogate import Surrogate, ratio_stats


def sequence_clipped(
    log_ratio: Tensor,  # (T,) per token, not read for its gradient
    logp: Tensor,  # (T,) learner now, with gradient
    advantages: Tensor,  # (R,)
    segments: Segments,
    band: Band,
    pruned: Pruned | None = None,
) -> Surrogate:
    """min(s A, clip(s, low, high) A) at every token of the response, [T], to maximise, with s = exp(mean_t log r_t).

    Gradient token-wise through stop(s) * exp(l_t - stop(l_t)). Statistics are over non-empty responses
    that are not pruned.
    """
    return clipped_at(*sequence_ratio(log_ratio, segments), logp, advantages, segments, band, pruned)


def clipped_at(
    s: Tensor,  # (R,)
    clamped: Tensor,  # (R,) bool, exponents of s clamped to +-20
    logp: Tensor,  # (T,) learner now, with gradient
    advantages: Tensor,  # (R,)
    segments: Segments,
    band: Band,
    pruned: Pruned | None = None,
) -> Surrogate:
    """`sequence_clipped` at sequence ratios that are there already."""
    left = band.left(s, advantages)
    ratio = torch.where(
        segments.expand(left),
        segments.expand(band.bound(s, advantages)),
        through_tokens(segments.expand(s), logp),
    )
    stats = ratio_stats(s, left, clamped, counted(segments, pruned, per_token=False))
    return Surrogate(segments.expand(advantages) * ratio, stats)
