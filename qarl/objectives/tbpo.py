"""TBPO, Trust-Band Policy Optimization (QaRL, section 3.2 and appendix E).

The response is one action: its ratio is the geometric mean over its tokens. A response outside its band has no
gradient, because after an error token the rest of the response is off the trajectory (the paper's figure 6).

    s = exp(mean_t(l_t - o_t))    w' = clip(exp(mean_t(o_t - b_t)), 1/C, C), no gradient

    A > 0:  J = w' min(s A, min(s, 1 + high) A)
    A < 0:  J = w' A s   if 1 - neg_low <= s <= 1 + neg_high, else constant (s at the bound that it crossed)

l, o, b: log-probs of the current, the proximal and the sampling policy (docs/objectives.md). `Objective` averages -J
over the batch. The paper's seq_clip_ratio_low has no effect, because for A > 0 a lower bound never binds in min(). w'
is a correction weight with level geometric, truncated on both sides; `correction.py` applies it like every correction.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, Literal

from qarl.inputs.limits import FACTOR
from qarl.inputs.section import Fault, Field
from qarl.objectives.base import Band, ObjectiveConfig, RatioKind, RunConfig
from qarl.objectives.common import Surrogate, SurrogateInputs, clamped_exp, ratio_stats, score, stat

if TYPE_CHECKING:
    from qarl.objectives.correction_config import CorrectionConfig


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
        high, low = 1.0 + self.seq_clip_ratio_high, 1.0 - self.neg_seq_clip_ratio_low
        return Band("sequence", high, low, neg_high=1.0 + self.neg_seq_clip_ratio_high)

    def surrogate(self, inputs: SurrogateInputs) -> Surrogate:
        """Compute J / w' per token, (T,). Statistics are over responses that are neither empty nor pruned."""
        segments, advantages, band = inputs.segments, inputs.advantages, self.band
        s, clamped = clamped_exp(segments.mean(inputs.log_ratio.detach()))  # (R,) ratio of each response

        positive, negative = advantages > 0, advantages < 0
        above = positive & (s > band.high)
        neg_below, neg_above = negative & (s < band.low), negative & (s > band.neg_high)
        dropped = above | neg_below | neg_above
        edge = s.clamp(max=band.high).where(positive, s.clamp(band.low, band.neg_high))

        # GSPO-token: value s at every token of the response, with the gradient s d l_t.
        ratio = segments.expand(s) * score(inputs.logps.logp).exp()
        ratio = segments.expand(edge).where(segments.expand(dropped), ratio)

        counted = inputs.counted_responses
        stats = ratio_stats(s, dropped, clamped, counted) | {
            "policy/tbpo_clipped_high_frac": stat(above, counted),
            "policy/tbpo_dropped_neg_low_frac": stat(neg_below, counted),
            "policy/tbpo_dropped_neg_high_frac": stat(neg_above, counted),
        }
        return Surrogate(inputs.token_advantages * ratio, stats)

    def corrected(self, correction: CorrectionConfig) -> CorrectionConfig:
        """Add the weight w'."""
        cap = self.seq_tis_imp_ratio_cap
        weight = {"level": "geometric", "mode": "truncate", "signal": "corr", "lower": 1.0 / cap, "upper": cap}
        return correction.model_copy(update=weight)

    def faults_in(self, config: RunConfig) -> Iterator[Fault]:
        if config.correction.level != "none":
            text = "carries its own mismatch weight (objective.seq_tis_imp_ratio_cap); correction.level must be none"
            yield config.fault(f"correction.{config.correction.weight_key}", f"tbpo {text}")
