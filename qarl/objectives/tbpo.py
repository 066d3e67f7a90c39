"""TBPO, Trust-Band Policy Optimization (QaRL, section 3.2 and appendix E).

The response is one action: its ratio is the geometric mean over its tokens, and a response that leaves its band gives
no gradient at all, because after one error token the rest of a response is off its trajectory (the paper's figure 6).
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from qarl.objectives.ratios import log_ratio, sequence_ratio, through_tokens
from qarl.objectives.segments import Segments
from qarl.objectives.surrogate import Surrogate, present, ratio_stats, stat, weight_stats


class TbpoOptions(Protocol):
    """The paper's names. Its `seq_clip_ratio_low` is not read: for A > 0 a lower bound never binds in min()."""

    seq_clip_ratio_high: float
    neg_seq_clip_ratio_high: float
    neg_seq_clip_ratio_low: float
    seq_tis_imp_ratio_cap: float


def tbpo(
    logp: Tensor,  # (T,) learner now, with gradient
    logp_old: Tensor,  # (T,) learner at the rollout's snapshot
    logp_sampler: Tensor,  # (T,) as the sampler reported
    advantages: Tensor,  # (R,)
    segments: Segments,
    options: TbpoOptions,
) -> Surrogate:
    """The TBPO surrogate per token, [T], to maximise; all tokens of a response share s, w' and A.

        s = exp(mean_t(l_t - o_t))    w' = clip(exp(mean_t(o_t - b_t)), 1/C, C), no gradient

        A > 0:  J = w' min(s A, min(s, 1 + high) A)
        A < 0:  J = w' A s   if 1 - neg_low <= s <= 1 + neg_high, else constant (s at the bound it left through)

    Gradient flows token-wise, stop(s) * exp(l_t - stop(l_t)). Statistics are over non-empty responses.
    """
    s, s_clamped = sequence_ratio(logp, logp_old, segments)
    w, w_clamped = sequence_ratio(logp_old, logp_sampler, segments)
    weight = w.clamp(1.0 / options.seq_tis_imp_ratio_cap, options.seq_tis_imp_ratio_cap)

    high = 1.0 + options.seq_clip_ratio_high
    neg_low, neg_high = 1.0 - options.neg_seq_clip_ratio_low, 1.0 + options.neg_seq_clip_ratio_high
    positive, negative = advantages > 0, advantages < 0
    clipped_high = positive & (s > high)
    dropped_neg_low = negative & (s < neg_low)
    dropped_neg_high = negative & (s > neg_high)
    dropped = clipped_high | dropped_neg_low | dropped_neg_high

    bound = torch.where(positive, s.clamp(max=high), s.clamp(neg_low, neg_high))
    ratio = torch.where(segments.expand(dropped), segments.expand(bound), through_tokens(segments.expand(s), logp))
    value = segments.expand(weight * advantages) * ratio

    mask = present(segments)
    stats = ratio_stats(s, dropped, s_clamped | w_clamped, mask, log_ratio(logp.detach(), logp_old))
    stats |= weight_stats(weight, mask)
    stats["policy/tbpo_clipped_high_frac"] = stat(clipped_high, mask)
    stats["policy/tbpo_dropped_neg_low_frac"] = stat(dropped_neg_low, mask)
    stats["policy/tbpo_dropped_neg_high_frac"] = stat(dropped_neg_high, mask)
    return Surrogate(value, stats)
