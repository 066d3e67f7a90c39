"""GRPO, Group Relative Policy Optimization (Shao et al. 2024), and its variants: PPO's clip on one ratio per token.

    J_t = min(r_t A, clip(r_t, 1 - clip_ratio_low, 1 + clip_ratio_high) A)

dapo            a higher upper bound (clip-higher), averaged over all tokens (Yu et al. 2025). Dynamic sampling, DAPO's
                other half, is not part of an objective.
dual_clip_grpo  A < 0: J_t = max(J_t, clip_ratio_c A), so a ratio above clip_ratio_c has no gradient (Ye et al. 2020)
positive_only   grpo without the responses with A < 0 (an ablation of QaRL, figure 8)

`objective.loss` detach and detach_center (TRL precision study, section 10.1) keep min and clip out of the backward, so
that no token loses its gradient: J_t = stop(W_t - center) l_t with W_t the value above and center 0, or the mean of W
over the tokens of the minibatch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor

from qarl.inputs.limits import FACTOR
from qarl.inputs.section import Fault, Field
from qarl.objectives.base import AggregationKey, Band, RatioObjective
from qarl.objectives.common import Stats, Surrogate, SurrogateInputs, clamped_exp, ratio_stats, weight_balance

NO_CLIP_EPS = 10.0
"""Both bounds of loss no_clip (TRL precision study, section 10.1). The lower one is below 0, so it is 0."""
_BOUNDS = ("clip_ratio_low", "clip_ratio_high")


class TokenClip(RatioObjective):
    """Objectives that clip a ratio per token."""

    clip_ratio_low: float | None = Field(
        0.2, ge=0, lt=1, description="Ratios are clipped at 1 - this (default 0.2); ignored with loss no_clip."
    )
    clip_ratio_high: float | None = Field(
        0.2, ge=0, le=FACTOR, description="Ratios are clipped at 1 + this (default 0.2); ignored with loss no_clip."
    )
    loss: Literal["clip", "detach", "detach_center", "no_clip"] = Field(
        "clip",
        description="clip: PPO's clipped surrogate; detach: that surrogate as a constant weight of the log-prob; "
        "detach_center: that minus its mean over the minibatch; no_clip: bounds of 10 on both sides.",
    )

    @property
    def bounds(self) -> Band:
        """The clip bounds."""
        low, high = self.clip_ratio_low, self.clip_ratio_high
        if self.loss == "no_clip":
            low = high = NO_CLIP_EPS
        assert low is not None and high is not None, "null is for loss no_clip"
        return Band("token", high=1.0 + high, low=max(1.0 - low, 0.0))

    @property
    def band(self) -> Band | None:
        return None if self.loss in ("detach", "detach_center") else self.bounds

    def clipped(self, inputs: SurrogateInputs) -> tuple[Tensor, Stats]:
        """Return the clipped surrogate W of each token, (T,), and statistics over tokens that are not pruned."""
        ratio, clamped = clamped_exp(inputs.log_ratio)
        advantage, bounds = inputs.token_advantages, self.bounds

        # min() uses the clipped branch exactly here; written out, a ratio on its bound keeps its gradient.
        positive, negative = advantage > 0, advantage < 0
        clipped = (positive & (ratio > bounds.high)) | (negative & ((ratio < bounds.low) | (ratio > bounds.neg_high)))
        constant = ratio.detach()
        edge = constant.clamp(max=bounds.high).where(positive, constant.clamp(bounds.low, bounds.neg_high))
        value = advantage * edge.where(clipped, ratio)

        counted = inputs.counted_tokens
        return value, ratio_stats(ratio, clipped, clamped, counted) | weight_balance(value, counted)

    def surrogate(self, inputs: SurrogateInputs) -> Surrogate:
        """Compute J per token, (T,). With loss detach, a token with an infinite log-prob has value 0."""
        value, stats = self.clipped(inputs)
        if self.loss in ("clip", "no_clip"):
            return Surrogate(value, stats)
        weight = value.detach().masked_fill(inputs.pruned.tokens, 0.0) - inputs.center
        logp = inputs.logps.logp
        return Surrogate(weight * logp.masked_fill(logp.isinf(), 0.0), stats)

    @property
    def centers(self) -> bool:
        return self.loss == "detach_center"

    @property
    def idle_at_zero(self) -> bool:
        return not self.centers

    def center(self, inputs: SurrogateInputs) -> float:
        value, _ = self.clipped(inputs)
        return float(value.masked_fill(inputs.pruned.tokens, 0.0).double().mean())

    def faults(self) -> Iterator[Fault]:
        yield from super().faults()
        for key in _BOUNDS:
            value = getattr(self, key)
            if self.loss == "no_clip" and key in self.model_fields_set and value is not None:
                yield Fault((key,), value, "is not read with loss no_clip; leave null, or use loss clip")

    def resolved(self) -> dict[str, Any]:
        bounds: dict[str, Any] = {key: None for key in _BOUNDS} if self.loss == "no_clip" else {}
        return super().resolved() | bounds


class GRPO(TokenClip):
    """Group Relative Policy Optimization."""

    name: Literal["grpo"] = Field("grpo", description="PPO's clip with one ratio per token (Shao et al. 2024).")


class DAPO(TokenClip):
    """Decoupled clip: the upper bound is larger than the lower one."""

    name: Literal["dapo"] = Field(
        "dapo", description="grpo with a higher upper bound, averaged over all tokens (Yu et al. 2025)."
    )
    aggregation: AggregationKey = "token-mean"
    clip_ratio_high: float | None = Field(
        0.28, ge=0, le=FACTOR, description="Ratios are clipped at 1 + this (default 0.28); ignored with loss no_clip."
    )


class DualClipGRPO(TokenClip):
    """GRPO with a second upper bound for A < 0."""

    name: Literal["dual_clip_grpo"] = Field(
        "dual_clip_grpo", description="grpo with a second upper bound for A < 0 (Ye et al. 2020)."
    )
    clip_ratio_c: float = Field(3.0, gt=1, le=FACTOR, description="A < 0: no gradient above this ratio (default 3).")

    @property
    def bounds(self) -> Band:
        return replace(super().bounds, neg_high=self.clip_ratio_c)


class PositiveOnly(TokenClip):
    """GRPO on responses with A > 0. Those with A < 0 stay in the denominators of the aggregation."""

    name: Literal["positive_only"] = Field(
        "positive_only", description="grpo without the responses of A < 0, which stay in the denominators."
    )
    clip_ratio_low: float | None = Field(0.2, ge=0, lt=1, description="It never binds (default 0.2).")

    @property
    def bounds(self) -> Band:
        return replace(super().bounds, low=0.0)  # a response with A < 0 has value 0, so it loses no gradient

    def clipped(self, inputs: SurrogateInputs) -> tuple[Tensor, Stats]:
        return super().clipped(replace(inputs, advantages=inputs.advantages.clamp(min=0)))

    def surrogate(self, inputs: SurrogateInputs) -> Surrogate:
        """Compute J at max(A, 0) per token, (T,). It is exactly 0 for A < 0, even if a center is subtracted."""
        result = super().surrogate(inputs)
        if self.loss in ("clip", "no_clip"):
            return result
        return Surrogate(result.value.masked_fill(inputs.token_advantages < 0, 0.0), result.stats)
