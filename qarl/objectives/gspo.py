"""GSPO, Group Sequence Policy Optimization (Zheng et al. 2025): PPO clipping with one ratio per response.

    s = exp(mean_t log r_t)    J = min(s A, clip(s, 1 - clip_ratio_low, 1 + clip_ratio_high) A)

A geometric mean stays far closer to 1 than a token's ratio, so its bounds are about a thousand times narrower.

mis_gspo (an ablation of QaRL, figure 8) also drops responses whose geometric mean of r_corr, the learner at the
rollout's weights over the sampler, is outside [mis_ratio_low, mis_ratio_high]: a rejection rule of the correction.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, Literal

from qarl.config.base import Fault, Field
from qarl.config.limits import FACTOR
from qarl.objectives.base import Band, RatioObjective
from qarl.objectives.common import Surrogate, SurrogateInputs, clamped_exp, ratio_stats, score
from qarl.objectives.correction_config import RejectRule

if TYPE_CHECKING:
    from qarl.config.config import Config
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
        """J at every token, (T,). Statistics are over responses that are neither empty nor pruned."""
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
    """GSPO with masked importance sampling of responses."""

    name: Literal["mis_gspo"] = Field(
        "mis_gspo", description="gspo without responses whose mean mismatch ratio is outside two bounds."
    )
    mis_ratio_low: float = Field(
        0.5, gt=0, le=FACTOR, description="Responses whose mean mismatch ratio is below this are dropped (default 0.5)."
    )
    mis_ratio_high: float = Field(
        2.0, gt=0, le=FACTOR, description="Responses whose mean mismatch ratio is above this are dropped (default 2)."
    )

    def corrected(self, correction: CorrectionConfig) -> CorrectionConfig:
        low, high = self.mis_ratio_low, self.mis_ratio_high
        rule = RejectRule(estimator="ratio", signal="corr", aggregate="mean", lower=low, upper=high)
        return correction.model_copy(update={"reject": [rule, *(correction.reject or ())]})

    def faults(self) -> Iterator[Fault]:
        yield from super().faults()
        if self.mis_ratio_low >= self.mis_ratio_high:
            text = f"must be below objective.mis_ratio_high ({self.mis_ratio_high:g})"
            yield Fault(("mis_ratio_low",), self.mis_ratio_low, text)

    def faults_in(self, config: Config) -> Iterator[Fault]:
        correction = config.correction
        if any(rule.identity == ("corr", "ratio", "mean") for rule in correction.reject or ()):
            key = "reject" if "reject" in correction.model_fields_set else "preset"
            text = "mis_gspo rejects by the mean ratio itself; set objective.mis_ratio_low and mis_ratio_high"
            yield Fault(("correction", key), correction.preset if key == "preset" else "mean ratio of corr", text)
