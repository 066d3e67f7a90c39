"""DAPO (Yu et al. 2025): GRPO's surrogate with a higher upper bound (clip-higher), averaged over all tokens."""

from __future__ import annotations

from typing import Literal

from qarl.config.base import Field
from qarl.config.limits import FACTOR
from qarl.objectives.base import AggregationKey
from qarl.objectives.token_clip import TokenClip


class DAPO(TokenClip):
    """Decoupled clip; dynamic sampling, DAPO's other half, is not part of an objective."""

    name: Literal["dapo"] = Field(
        "dapo", description="grpo with a higher upper bound, averaged over all tokens (Yu et al. 2025)."
    )
    aggregation: AggregationKey = "token-mean"
    clip_ratio_high: float | None = Field(
        0.28, ge=0, le=FACTOR, description="Ratios are clipped at 1 + this (default 0.28); not read with loss no_clip."
    )
