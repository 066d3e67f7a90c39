"""M2PO, Second-Moment Trust Policy Optimization (Zheng et al. 2025, arXiv 2510.01161), for stale data.

    J = M r A    M_t = 1 unless token t is one of those with the largest |log r|

The mask M drops the fewest tokens of a minibatch, those with the largest |log r|, so that the mean of (log r)^2 over
the tokens that stay is at most `m2_threshold`. A clip at a fixed ratio drops far more tokens of stale data. The mask
ignores the sign of the advantage.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from qarl.inputs.limits import FACTOR, SMALLEST
from qarl.inputs.section import Field
from qarl.objectives.base import AggregationKey, RatioObjective
from qarl.objectives.common import Surrogate, SurrogateInputs, clamped_exp, ratio_stats


class M2PO(RatioObjective):
    """Second-Moment Trust Policy Optimization."""

    name: Literal["m2po"] = Field(
        "m2po", description="r A without the tokens of the largest |log r|, for stale data (Zheng et al. 2025)."
    )
    aggregation: AggregationKey = "token-mean"
    m2_threshold: float = Field(
        0.04,
        ge=SMALLEST,
        le=FACTOR,
        description="Upper bound of the mean of (log r)^2 over a minibatch's tokens that are kept (default 0.04).",
    )

    centers: ClassVar[bool] = True

    def center(self, inputs: SurrogateInputs) -> float:
        """Return the largest |log r| that is kept; -1.0 if no token is. Tokens with equal |log r| are kept together."""
        import torch

        moved = inputs.log_ratio.detach().double().abs()[inputs.counted_tokens].sort().values
        means = (moved**2).cumsum(0) / torch.arange(1, len(moved) + 1, device=moved.device)
        last = torch.searchsorted(moved, moved, right=True) - 1  # of the tokens with the same |log r|
        kept = int((means[last] <= self.m2_threshold).sum())  # the means ascend
        return float(moved[kept - 1]) if kept else -1.0

    def surrogate(self, inputs: SurrogateInputs) -> Surrogate:
        """Compute J at every token, (T,). Statistics are over tokens; masked ones count as clipped."""
        ratio, clamped = clamped_exp(inputs.log_ratio)
        masked = inputs.log_ratio.detach().double().abs() > inputs.center
        stats = ratio_stats(ratio, masked, clamped, inputs.counted_tokens)
        return Surrogate((ratio * inputs.token_advantages).masked_fill(masked, 0.0), stats)
