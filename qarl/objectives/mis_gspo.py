"""GSPO with masked importance sampling of responses (an ablation of QaRL, figure 8).

A response whose geometric mean of r_corr, the learner at the snapshot over the sampler, leaves
[mis_ratio_low, mis_ratio_high] is dropped: a rule of the correction, beside those that `correction.reject` has.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from qarl.config.base import Fault, Field
from qarl.config.limits import FACTOR
from qarl.objectives.correction.rejection import Rejection
from qarl.objectives.gspo import GSPO

if TYPE_CHECKING:
    from qarl.config.config import Config
    from qarl.objectives.correction.combined import Correction


class MisGSPO(GSPO):
    """GSPO without the responses that the learner would have drawn too differently."""

    name: Literal["mis_gspo"] = Field(
        "mis_gspo", description="gspo without responses whose mean mismatch ratio is outside of two bounds."
    )
    mis_ratio_low: float = Field(
        0.5, gt=0, le=FACTOR, description="Responses whose mean mismatch ratio is below this are dropped (default 0.5)."
    )
    mis_ratio_high: float = Field(
        2.0, gt=0, le=FACTOR, description="Responses whose mean mismatch ratio is above this are dropped (default 2)."
    )

    def corrected(self, correction: Correction) -> Correction:
        rule = Rejection("ratio", "corr", "mean", self.mis_ratio_low, self.mis_ratio_high)
        return replace(correction, rejections=(rule, *correction.rejections))

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
