"""GMPO, Geometric-Mean Policy Optimization (Zhao et al. 2025), and RSPO: one ratio per response, clipped per token.

    log s = mean_t c_t    J = s A
    c_t = min(log r_t, clip_ratio_high) if A > 0, else max(log r_t, -clip_ratio_low)

A token beyond its bound has no gradient and counts in s with the bound. The other tokens of its response keep their
gradient, whereas GSPO clips whole responses. Both bounds apply to the log ratio; the paper uses 0.4.

rspo is gmpo with ratios multiplied by the router-shift ratio before clipping (Zhang et al. 2025, arXiv 2510.23027).
Every objective with a ratio supports this through `objective.router_shift_floor`.
"""

from __future__ import annotations

import math
from typing import ClassVar, Literal

from qarl.inputs.limits import FACTOR
from qarl.inputs.section import Field
from qarl.objectives.base import Band, RatioObjective
from qarl.objectives.common import Surrogate, SurrogateInputs, clamped_exp, ratio_stats, score


class GMPO(RatioObjective):
    """Geometric-Mean Policy Optimization."""

    name: Literal["gmpo"] = Field(
        "gmpo", description="The geometric mean of a response's ratios, clipped per token (Zhao et al. 2025)."
    )
    clip_ratio_low: float = Field(
        0.4, gt=0, le=FACTOR, description="A < 0: log ratios are clipped at minus this (default 0.4)."
    )
    clip_ratio_high: float = Field(
        0.4, gt=0, le=FACTOR, description="A > 0: log ratios are clipped at this (default 0.4)."
    )

    sequence_ratio: ClassVar[bool] = True

    @property
    def band(self) -> Band:
        return Band("token", high=math.exp(self.clip_ratio_high), low=math.exp(-self.clip_ratio_low))

    def surrogate(self, inputs: SurrogateInputs) -> Surrogate:
        """Compute J at every token, (T,), with the gradient s A d log r_t of the tokens that are not clipped.

        The mean over a response's tokens is the paper's value and gradient. Statistics are over tokens.
        """
        segments, advantage, moved = inputs.segments, inputs.token_advantages, inputs.log_ratio.detach()
        clipped = ((advantage > 0) & (moved > self.clip_ratio_high)) | (
            (advantage < 0) & (moved < -self.clip_ratio_low)
        )
        edge = moved.clamp(max=self.clip_ratio_high).where(advantage > 0, moved.clamp(min=-self.clip_ratio_low))
        s, clamped = clamped_exp(segments.mean(edge.where(clipped, moved)))  # (R,)
        own = score(inputs.logps.logp).exp().masked_fill(clipped, 1.0)
        stats = ratio_stats(segments.expand(s), clipped, segments.expand(clamped), inputs.counted_tokens)
        return Surrogate(advantage * segments.expand(s) * own, stats)


class RSPO(GMPO):
    """GMPO with the router-shift ratio."""

    name: Literal["rspo"] = Field(  # type: ignore[assignment] # narrower than the class it extends
        "rspo", description="gmpo with the router-shift ratio, for mixtures of experts."
    )
    router_shift_floor: float | None = Field(
        0.8,
        gt=0,
        le=1,
        description="Lower bound of the router-shift ratio (default 0.8, a choice of this project).",
    )
