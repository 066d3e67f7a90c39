"""Token-level PPO clipping (Schulman et al. 2017), and its variants without dead zones in the backward.

GRPO's surrogate (Shao et al. 2024). With clip_ratio_high > clip_ratio_low it is DAPO's clip-higher (Yu et al. 2025),
with a bound c on ratios of A < 0 dual-clip PPO (Ye et al. 2020): all of them are a `Band` and one ratio a token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

from qarl.config.base import Fault, Field
from qarl.config.limits import FACTOR
from qarl.objectives.band import Band
from qarl.objectives.base import RatioObjective
from qarl.objectives.ratios import clamped_exp
from qarl.objectives.surrogate import Surrogate, ratio_stats, stat
from qarl.objectives.tokens import SurrogateInputs

NO_CLIP_EPS = 10.0
"""loss no_clip (TRL precision study, section 10.1): both bounds at this, the lower one below 0, so at 0."""
_BOUNDS = ("clip_ratio_low", "clip_ratio_high")


class TokenClip(RatioObjective):
    """Objectives that clip a ratio a token."""

    clip_ratio_low: float | None = Field(
        0.2, ge=0, lt=1, description="Ratios are clipped at 1 - this (default 0.2); not read with loss no_clip."
    )
    clip_ratio_high: float | None = Field(
        0.2, ge=0, le=FACTOR, description="Ratios are clipped at 1 + this (default 0.2); not read with loss no_clip."
    )
    loss: Literal["clip", "detach", "detach_center", "no_clip"] = Field(
        "clip",
        description="clip (default); detach: the clipped surrogate as a constant weight of the log-prob; "
        "detach_center: that minus its mean over the minibatch; no_clip: bounds of 10 on both sides.",
    )

    def surrogate(self, inputs: SurrogateInputs) -> Surrogate:
        """`clipped` or `detached`, at the bounds of the section."""
        if self.loss in ("detach", "detach_center"):
            return detached(inputs, self.bounds)
        return clipped(inputs, self.bounds)

    @property
    def bounds(self) -> Band:
        """Where the surrogate stops to grow with the ratio."""
        low, high = self.clip_ratio_low, self.clip_ratio_high
        if self.loss == "no_clip":
            low = high = NO_CLIP_EPS
        assert low is not None and high is not None, "null is for loss no_clip"
        return Band("token", high=1.0 + high, low=max(1.0 - low, 0.0))

    @property
    def band(self) -> Band | None:
        return None if self.loss in ("detach", "detach_center") else self.bounds

    @property
    def centers(self) -> bool:
        return self.loss == "detach_center"

    def center(self, inputs: SurrogateInputs) -> float:
        return float(clipped_weights(inputs, self.bounds).value.double().mean()) if self.centers else 0.0

    def faults(self) -> Iterator[Fault]:
        yield from super().faults()
        for key in _BOUNDS:
            value = getattr(self, key)
            if self.loss == "no_clip" and key in self.model_fields_set and value is not None:
                yield Fault((key,), value, "is not read with loss no_clip; leave null, or use loss clip")

    def resolved(self) -> dict[str, Any]:
        bounds: dict[str, Any] = {key: None for key in _BOUNDS} if self.loss == "no_clip" else {}
        return super().resolved() | bounds


def clipped(inputs: SurrogateInputs, band: Band | None) -> Surrogate:
    """min(r A, clip(r, low, high) A) per token, (T,), to maximise; for A < 0 with a `neg_high` c also max(that, c A).

    band: None is r A. Statistics are over tokens that are not pruned; `policy/mu_w` is the mean of the value itself, W,
    which is what a token's score weighs (TRL precision study, section 10.2).
    """
    ratio, clamped = clamped_exp(inputs.log_ratio)
    advantage = inputs.token_advantages
    if band is None:
        left = clamped.new_zeros(clamped.shape)
        value = advantage * ratio
    else:
        # min() takes the clipped branch exactly here; written out, an edge keeps its full gradient.
        left = band.left(ratio, advantage)
        value = advantage * band.bound(ratio, advantage).where(left, ratio)
    counted = inputs.counted_tokens
    return Surrogate(value, ratio_stats(ratio, left, clamped, counted) | {"policy/mu_w": stat(value, counted)})


def clipped_weights(inputs: SurrogateInputs, band: Band) -> Surrogate:
    """W, the value of `clipped` without gradient: what `detached` gives each token's score. 0 where pruned."""
    weights = clipped(replace(inputs, log_ratio=inputs.log_ratio.detach()), band)
    if inputs.pruned is None:
        return weights
    return Surrogate(weights.value.masked_fill(inputs.pruned.tokens, 0.0), weights.stats)


def detached(inputs: SurrogateInputs, band: Band) -> Surrogate:
    """stop(W - center) * l_t per token, (T,), to maximise, with W the value of the clipped surrogate.

    min and clamp stay out of the backward, so no token is without gradient (TRL precision study, section 10.1: detach
    with center 0, detach_center with the mean of W over the minibatch's tokens). A token of infinite log-prob has
    value 0.
    """
    weights, logp = clipped_weights(inputs, band), inputs.logps.logp
    return Surrogate((weights.value - inputs.center) * logp.masked_fill(logp.isinf(), 0.0), weights.stats)
