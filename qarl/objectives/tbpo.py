"""TBPO, Trust-Band Policy Optimization (QaRL, section 3.2 and appendix E).

The response is one action: its ratio is the geometric mean over its tokens, and a response that leaves its band gives
no gradient at all, because after one error token the rest of a response is off its trajectory (the paper's figure 6).

    s = exp(mean_t(l_t - o_t))    w' = clip(exp(mean_t(o_t - b_t)), 1/C, C), no gradient

    A > 0:  J = w' min(s A, min(s, 1 + high) A)
    A < 0:  J = w' A s   if 1 - neg_low <= s <= 1 + neg_high, else constant (s at the bound it left through)

The paper's seq_clip_ratio_low is not read: for A > 0 a lower bound never binds in min(). w' is a correction weight of
level geometric, truncated on both sides, so it multiplies from outside as every correction does.
"""

from __future__ import annotations

from torch import Tensor

from qarl.objectives.band import Band
from qarl.objectives.gspo import clipped_at
from qarl.objectives.pruning import Pruned, counted
from qarl.objectives.ratios import sequence_ratio
from qarl.objectives.segments import Segments
from qarl.objectives.surrogate import Surrogate, stat


def tbpo(
    log_ratio: Tensor,  # (T,) l - o, not read for its gradient
    logp: Tensor,  # (T,) learner now, with gradient
    advantages: Tensor,  # (R,)
    segments: Segments,
    band: Band,
    pruned: Pruned | None = None,
) -> Surrogate:
    """J / w' per token, [T], to maximise; all tokens of a response share s and A.

    Gradient flows token-wise, stop(s) * exp(l_t - stop(l_t)). Statistics are over non-empty responses that are not
    pruned, and count those without gradient on each of the band's three sides.
    """
    s, clamped = sequence_ratio(log_ratio, segments)
    surrogate = clipped_at(s, clamped, logp, advantages, segments, band, pruned)
    positive, negative = advantages > 0, advantages < 0
    mask = counted(segments, pruned, per_token=False)
    return Surrogate(
        surrogate.value,
        surrogate.stats
        | {
            "policy/tbpo_clipped_high_frac": stat(positive & (s > band.high), mask),
            "policy/tbpo_dropped_neg_low_frac": stat(negative & (s < band.low), mask),
            "policy/tbpo_dropped_neg_high_frac": stat(negative & (s > band.neg_high), mask),
        },
    )
