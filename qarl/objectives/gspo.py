"""GSPO, Group Sequence Policy Optimization (Zheng et al. 2025): PPO clipping with one ratio per response.

    s = exp(mean_t log r_t)    J = min(s A, clip(s, 1 - clip_ratio_low, 1 + clip_ratio_high) A)

A geometric mean stays far closer to 1 than a token's ratio, so its bounds are about a thousand times narrower.

mis_gspo adds masked importance sampling of whole responses (QaRL, section 2.3 and figure 8). With o the learner at the
rollout's weights and b the sampler:

    w = exp(sum_t (o_t - b_t)) if mis_ratio_low <= w <= mis_ratio_high, else 0       J_mis = w J

w is the sequence-level weight of the correction, without gradient. The default bound 2 is verl's for sequence MIS.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, Literal

from qarl.inputs.limits import FACTOR
from qarl.inputs.section import Fault, Field
from qarl.objectives.base import Band, RatioObjective, RunConfig
from qarl.objectives.common import Surrogate, SurrogateInputs, clamped_exp, ratio_stats, score

if TYPE_CHECKING:
    from qarl.objectives.correction_config import CorrectionConfig


class GSPO(RatioObjective):
    """Group Sequence Policy Optimization."""

    name: Literal["gspo"] = Field("gspo", description="PPO's clip with one ratio per response (Zheng et al. 2025).")
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
        """Compute J at every token, (T,). Statistics are over responses that are neither empty nor pruned."""
        segments, advantages, band = inputs.segments, inputs.advantages, self.band
        s, clamped = clamped_exp(segments.mean(inputs.log_ratio.detach()))  # (R,) ratio of each response

        # min() uses the clipped branch exactly here; written out, a ratio on its bound keeps its gradient.
        positive = advantages > 0
        clipped = (positive & (s > band.high)) | ((advantages < 0) & (s < band.low))
        edge = s.clamp(max=band.high).where(positive, s.clamp(band.low))

        # GSPO-token: value s at every token of the response, with the gradient s d l_t.
        ratio = segments.expand(s) * score(inputs.logps.logp).exp()
        ratio = segments.expand(edge).where(segments.expand(clipped), ratio)
        stats = ratio_stats(s, clipped, clamped, inputs.counted_responses)
        return Surrogate(inputs.token_advantages * ratio, stats)


class MisGSPO(GSPO):
    """GSPO with masked importance sampling: each response has a weight, which is 0 outside two bounds."""

    name: Literal["mis_gspo"] = Field(  # type: ignore[assignment] # narrower than the class it extends
        "mis_gspo", description="gspo times the sequence-level mismatch ratio, without responses outside its bounds."
    )
    mis_ratio_low: float = Field(
        0.0,
        ge=0,
        le=FACTOR,
        description="Responses whose mismatch ratio, the product over their tokens, is below this get weight 0 "
        "(default 0: no lower bound).",
    )
    mis_ratio_high: float = Field(
        2.0,
        gt=0,
        le=FACTOR,
        description="Responses whose mismatch ratio, the product over their tokens, is above this get weight 0 "
        "(default 2).",
    )

    def corrected(self, correction: CorrectionConfig) -> CorrectionConfig:
        """Add the weight w."""
        low, high = self.mis_ratio_low or None, self.mis_ratio_high
        weight = {"level": "sequence", "mode": "mask", "signal": "corr", "lower": low, "upper": high}
        return correction.model_copy(update=weight)

    def faults(self) -> Iterator[Fault]:
        yield from super().faults()
        if self.mis_ratio_low >= self.mis_ratio_high:
            yield self.fault("mis_ratio_low", f"must be below objective.mis_ratio_high ({self.mis_ratio_high:g})")

    def faults_in(self, config: RunConfig) -> Iterator[Fault]:
        if config.correction.level != "none":
            text = "mis_gspo has its own weight (objective.mis_ratio_high); correction.level must be none"
            yield config.fault(f"correction.{config.correction.weight_key}", text)
        if self.ratio in ("rollout", "shadow"):
            text = "contains the mismatch already, and mis_gspo weights by it; use train or one"
            yield config.fault("objective.ratio", text)
        elif config.correction.expansion.ratio == "rollout":
            text = "trains with objective.ratio rollout, and mis_gspo weights by the mismatch itself; use train or one"
            yield config.fault("correction.preset", text)
