"""GRPO with dual clip (Ye et al. 2020): a punished token whose ratio has grown too far gives no gradient either.

A < 0:  J_t = max(min(r_t A, clip(r_t, 1 - low, 1 + high) A), c A)
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from qarl.config.base import Field
from qarl.config.limits import FACTOR
from qarl.objectives.band import Band
from qarl.objectives.token_clip import TokenClip


class DualClipGRPO(TokenClip):
    """GRPO with a second upper bound for A < 0."""

    name: Literal["dual_clip_grpo"] = Field(
        "dual_clip_grpo", description="grpo with a second upper bound for A < 0 (Ye et al. 2020)."
    )
    clip_ratio_c: float = Field(3.0, gt=1, le=FACTOR, description="A < 0: no gradient above this ratio (default 3).")

    @property
    def bounds(self) -> Band:
        return replace(super().bounds, neg_high=self.clip_ratio_c)
