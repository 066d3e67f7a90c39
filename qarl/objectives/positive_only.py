"""GRPO on rewarded responses alone (an ablation of QaRL, figure 8): punished ones have no value and no gradient.

They stay in the denominators of the aggregation. For A > 0 a lower bound never binds in min(), so clip_ratio_low has no
effect.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from qarl.config.base import Field
from qarl.objectives.band import Band
from qarl.objectives.surrogate import Surrogate
from qarl.objectives.token_clip import TokenClip
from qarl.objectives.tokens import SurrogateInputs


class PositiveOnly(TokenClip):
    """GRPO without the responses of A < 0."""

    name: Literal["positive_only"] = Field(
        "positive_only", description="grpo without the responses of A < 0, which stay in the denominators."
    )
    clip_ratio_low: float | None = Field(0.2, ge=0, lt=1, description="It never binds (default 0.2).")

    @property
    def bounds(self) -> Band:
        return replace(super().bounds, low=0.0)  # a response of A < 0 has no value to lose

    def surrogate(self, inputs: SurrogateInputs) -> Surrogate:
        """The surrogate of GRPO at max(A, 0), and exactly 0 for A < 0 where a centre is subtracted."""
        result = super().surrogate(_rewarded(inputs))
        if self.loss not in ("detach", "detach_center"):
            return result
        return Surrogate(result.value.masked_fill(inputs.token_advantages < 0, 0.0), result.stats)

    def center(self, inputs: SurrogateInputs) -> float:
        return super().center(_rewarded(inputs))


def _rewarded(inputs: SurrogateInputs) -> SurrogateInputs:
    return replace(inputs, advantages=inputs.advantages.clamp(min=0))
