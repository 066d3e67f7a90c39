"""Token-level PPO clipping (Schulman et al. 2017) and its variants without dead zones in the backward.

GRPO's surrogate (Shao et al. 2024). With clip_ratio_high > clip_ratio_low it is DAPO's clip-higher (Yu et al. 2025),
with a bound c on ratios of A < 0 dual-clip PPO (Ye et al. 2020): all of them are a `Band` and one ratio a token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qarl.objectives.band import Band
from qarl.objectives.pruning import Pruned, counted
from qarl.objectives.ratios import clamped_exp
from qarl.objectives.segments import Segments
from qarl.objectives.surrogate import Surrogate, ratio_stats, stat


def clipped(
    log_ratio: Tensor,  # (T,) with gradient
    advantages: Tensor,  # (R,)
    segments: Segments,
    band: Band | None,  # None: r A
    pruned: Pruned | None = None,
) -> Surrogate:
    """min(r A, clip(r, low, high) A) per token, [T], to maximise; for A < 0 with a `neg_high` c also max(that, c A).

    Statistics are over tokens that are not pruned; `policy/mu_w` is the mean of the value itself, W, which is what a
    token's score weighs (TRL precision study, section 10.2).
    """
    ratio, clamped = clamped_exp(log_ratio)
    advantage = segments.expand(advantages)
    if band is None:
        left = torch.zeros_like(clamped)
        value = advantage * ratio
    else:
        # min() takes the clipped branch exactly here; written out, an edge keeps its full gradient.
        left = band.left(ratio, advantage)
        value = advantage * torch.where(left, band.bound(ratio, advantage), ratio)
    mask = counted(segments, pruned, per_token=True)
    return Surrogate(value, ratio_stats(ratio, left, clamped, mask) | {"policy/mu_w": stat(value, mask)})


@torch.no_grad()
def clipped_weights(
    log_ratio: Tensor,  # (T,)
    advantages: Tensor,  # (R,)
    segments: Segments,
    band: Band,
    pruned: Pruned | None = None,
) -> Surrogate:
    """W, the value of `clipped` without gradient: what `detached` gives each token's score. 0 where pruned."""
    weights = clipped(log_ratio, advantages, segments, band, pruned)
    if pruned is None:
        return weights
    return Surrogate(weights.value.masked_fill(pruned.tokens, 0.0), weights.stats)


def detached(
    log_ratio: Tensor,  # (T,)
    logp: Tensor,  # (T,) learner now, with gradient
    advantages: Tensor,  # (R,)
    segments: Segments,
    band: Band,
    center: float = 0.0,
    pruned: Pruned | None = None,
) -> Surrogate:
    """stop(W - center) * l_t per token, [T], to maximise, with W the value of the clipped surrogate.

    min and clamp stay out of the backward, so no token is without gradient (TRL precision study, section 10.1: detach
    with center 0, detach_center with the mean of W over the minibatch's tokens). A token of infinite log-prob has
    value 0.
    """
    weights = clipped_weights(log_ratio, advantages, segments, band, pruned)
    return Surrogate((weights.value - center) * logp.masked_fill(torch.isinf(logp), 0.0), weights.stats)
