"""GRPO, Group Relative Policy Optimization (Shao et al. 2024, DeepSeekMath): PPO's clip on a ratio a token.

J_t = min(r_t A, clip(r_t, 1 - clip_ratio_low, 1 + clip_ratio_high) A)
"""

from __future__ import annotations

from typing import Literal

from qarl.config.base import Field
from qarl.objectives.token_clip import TokenClip


class GRPO(TokenClip):
    """Group Relative Policy Optimization."""

    name: Literal["grpo"] = Field("grpo", description="PPO's clip on a ratio a token (Shao et al. 2024).")
