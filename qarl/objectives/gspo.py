"""GSPO, Group Sequence Policy Optimization (Zheng et al. 2025): PPO clipping of one ratio a response.

A geometric mean stays far closer to 1 than a token's ratio, so its bounds are about a thousand times narrower.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qarl.objectives.ppo import ClipOptions
from qarl.objectives.ratios import log_ratio, sequence_ratio, through_tokens
from qarl.objectives.segments import Segments
from qarl.objectives.surrogate import Surrogate, present, ratio_stats


def gspo(
    logp: Tensor,  # (T,) learner now, with gradient
    logp_old: Tensor,  # (T,) learner at the rollout's snapshot
    logp_sampler: Tensor,  # (T,) not read: a correction multiplies from outside
    advantages: Tensor,  # (R,)
    segments: Segments,
    options: ClipOptions,
) -> Surrogate:
    """min(s A, clip(s, 1 - low, 1 + high) A) at every token of the response, [T], to maximise.

    s = exp(mean_t(l_t - o_t)); gradient token-wise through stop(s) * exp(l_t - stop(l_t)). Statistics are over
    non-empty responses.
    """
    low, high = 1.0 - options.clip_ratio_low, 1.0 + options.clip_ratio_high
    s, clamped = sequence_ratio(logp, logp_old, segments)

    clipped = ((advantages > 0) & (s > high)) | ((advantages < 0) & (s < low))
    ratio = torch.where(
        segments.expand(clipped), segments.expand(s.clamp(low, high)), through_tokens(segments.expand(s), logp)
    )
    value = segments.expand(advantages) * ratio
    stats = ratio_stats(s, clipped, clamped, present(segments), log_ratio(logp.detach(), logp_old))
    return Surrogate(value, stats)
