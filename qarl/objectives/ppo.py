"""GRPO's surrogate: token-level PPO clipping (Schulman et al. 2017; Shao et al. 2024).

With clip_ratio_high > clip_ratio_low it is DAPO's clip-higher (Yu et al. 2025).
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from qarl.objectives.ratios import clamped_exp, log_ratio
from qarl.objectives.segments import Segments
from qarl.objectives.surrogate import Surrogate, ratio_stats


class ClipOptions(Protocol):
    """What `grpo` and `gspo` read."""

    clip_ratio_low: float
    clip_ratio_high: float


def grpo(
    logp: Tensor,  # (T,) learner now, with gradient
    logp_old: Tensor,  # (T,) learner at the rollout's snapshot
    logp_sampler: Tensor,  # (T,) not read: a correction multiplies from outside
    advantages: Tensor,  # (R,)
    segments: Segments,
    options: ClipOptions,
) -> Surrogate:
    """min(r A, clip(r, 1 - low, 1 + high) A) per token, [T], to maximise, with r = exp(l_t - o_t)."""
    low, high = 1.0 - options.clip_ratio_low, 1.0 + options.clip_ratio_high
    exponent = log_ratio(logp, logp_old)
    ratio, clamped = clamped_exp(exponent)
    advantage = segments.expand(advantages)

    # min() takes the clipped branch exactly here; written out, an edge keeps its full gradient.
    clipped = ((advantage > 0) & (ratio > high)) | ((advantage < 0) & (ratio < low))
    value = advantage * torch.where(clipped, ratio.detach().clamp(low, high), ratio)
    return Surrogate(value, ratio_stats(ratio, clipped, clamped, None, exponent))
