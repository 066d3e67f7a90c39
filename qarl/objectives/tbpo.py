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

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Literal

from qarl.config.base import Fault, Field
from qarl.config.limits import FACTOR
from qarl.objectives.band import Band
from qarl.objectives.base import ObjectiveConfig
from qarl.objectives.correction.weights import Weighting
from qarl.objectives.gspo import sequence_clipped
from qarl.objectives.proximal import RatioKind
from qarl.objectives.ratios import sequence_ratio
from qarl.objectives.surrogate import Surrogate, stat
from qarl.objectives.tokens import SurrogateInputs

if TYPE_CHECKING:
    from qarl.config.config import Config
    from qarl.objectives.correction.combined import Correction


class TBPO(ObjectiveConfig):
    """Trust-Band Policy Optimization. Defaults are the paper's."""

    name: Literal["tbpo"] = Field("tbpo", description="Bands for the ratio of a response, and its own weight (QaRL).")
    seq_clip_ratio_high: float = Field(
        4e-4, ge=0, le=FACTOR, description="A > 0: no gain from a sequence ratio above 1 + this (default 4e-4)."
    )
    seq_clip_ratio_low: float = Field(
        3e-4, ge=0, lt=1, description="A > 0: the paper's lower bound; it never binds (default 3e-4)."
    )
    neg_seq_clip_ratio_high: float = Field(
        7e-4, ge=0, le=FACTOR, description="A < 0: responses above 1 + this give no gradient (default 7e-4)."
    )
    neg_seq_clip_ratio_low: float = Field(
        3e-4, ge=0, lt=1, description="A < 0: responses below 1 - this give no gradient (default 3e-4)."
    )
    seq_tis_imp_ratio_cap: float = Field(
        2.0, ge=1, le=FACTOR, description="The mismatch weight is clipped to [1 / this, this] (default 2)."
    )

    own_ratio: ClassVar[RatioKind] = "train"
    sequence_ratio: ClassVar[bool] = True

    @property
    def band(self) -> Band:
        return Band(
            "sequence",
            high=1.0 + self.seq_clip_ratio_high,
            low=1.0 - self.neg_seq_clip_ratio_low,
            neg_high=1.0 + self.neg_seq_clip_ratio_high,
        )

    def surrogate(self, inputs: SurrogateInputs) -> Surrogate:
        """J / w' per token, (T,), to maximise; all tokens of a response share s and A.

        Gradient flows token-wise, stop(s) * exp(l_t - stop(l_t)). Statistics are over non-empty responses that are not
        pruned, and count those without gradient on each of the band's three sides.
        """
        band, clipped = self.band, sequence_clipped(inputs, self.band)
        s, _ = sequence_ratio(inputs.log_ratio, inputs.segments)
        positive, negative, counted = inputs.advantages > 0, inputs.advantages < 0, inputs.counted_responses
        return Surrogate(
            clipped.value,
            clipped.stats
            | {
                "policy/tbpo_clipped_high_frac": stat(positive & (s > band.high), counted),
                "policy/tbpo_dropped_neg_low_frac": stat(negative & (s < band.low), counted),
                "policy/tbpo_dropped_neg_high_frac": stat(negative & (s > band.neg_high), counted),
            },
        )

    def corrected(self, correction: Correction) -> Correction:
        assert correction.weighting is None, "tbpo carries its own mismatch weight"
        cap = self.seq_tis_imp_ratio_cap
        return replace(correction, weighting=Weighting("geometric", "truncate", 1.0 / cap, cap))

    def faults_in(self, config: Config) -> Iterator[Fault]:
        correction = config.correction
        if correction.level != "none":
            key, value = correction.weight_key
            text = "carries its own mismatch weight (objective.seq_tis_imp_ratio_cap); correction.level must be none"
            yield Fault(("correction", key), value, f"tbpo {text}")
