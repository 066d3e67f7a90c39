"""GSPO, Group Sequence Policy Optimization (Zheng et al. 2025): PPO clipping of one ratio a response.

    s = exp(mean_t log r_t)    J = min(s A, clip(s, 1 - clip_ratio_low, 1 + clip_ratio_high) A)

A geometric mean stays far closer to 1 than a token's ratio, so its bounds are about a thousand times narrower.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from qarl.config.base import Field
from qarl.config.limits import FACTOR
from qarl.objectives.band import Band
from qarl.objectives.base import RatioObjective
from qarl.objectives.ratios import sequence_ratio, through_tokens
from qarl.objectives.surrogate import Surrogate, ratio_stats
from qarl.objectives.tokens import SurrogateInputs


class GSPO(RatioObjective):
    """Group Sequence Policy Optimization."""

    name: Literal["gspo"] = Field("gspo", description="PPO's clip on a ratio a response (Zheng et al. 2025).")
    clip_ratio_low: float = Field(
        3e-4, ge=0, lt=1, description="Ratios of a response are clipped at 1 - this (default 3e-4)."
    )
    clip_ratio_high: float = Field(
        4e-4, ge=0, le=FACTOR, description="Ratios of a response are clipped at 1 + this (default 4e-4)."
    )

    sequence_ratio: ClassVar[bool] = True

    @property
    def band(self) -> Band:
        return Band("sequence", high=1.0 + self.clip_ratio_high, low=1.0 - self.clip_ratio_low)

    def surrogate(self, inputs: SurrogateInputs) -> Surrogate:
        """`sequence_clipped` at the bounds of the section."""
        return sequence_clipped(inputs, self.band)


def sequence_clipped(inputs: SurrogateInputs, band: Band) -> Surrogate:
    """min(s A, clip(s, low, high) A) at every token of the response, (T,), to maximise, with s = exp(mean_t log r_t).

    Gradient token-wise through stop(s) * exp(l_t - stop(l_t)), the form that the paper calls GSPO-token; that of
    `log_ratio` is not read. Statistics are over non-empty responses that are not pruned.
    """
    segments, advantages = inputs.segments, inputs.advantages
    s, clamped = sequence_ratio(inputs.log_ratio, segments)
    left = band.left(s, advantages)
    ratio = segments.expand(band.bound(s, advantages)).where(
        segments.expand(left), through_tokens(segments.expand(s), inputs.logps.logp)
    )
    stats = ratio_stats(s, left, clamped, inputs.counted_responses)
    return Surrogate(segments.expand(advantages) * ratio, stats)
