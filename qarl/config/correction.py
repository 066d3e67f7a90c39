"""Importance correction of the gap between sampler and learner."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from qarl.config.base import Fault, Field, Section


class CorrectionConfig(Section):
    """Weights or masks from the ratio learner over sampler, without gradient. tbpo carries its own."""

    level: Literal["none", "token", "sequence", "geometric"] = Field(
        "none", description="Ratio per token, product over the response, or geometric mean over the response."
    )
    mode: Literal["truncate", "mask"] = Field(
        "truncate", description="Clip the ratio to [lower, upper] (TIS), or zero it outside (MIS, IcePop)."
    )
    lower: float | None = Field(None, gt=0, description="Lower bound of the ratio; null: none.")
    upper: float = Field(2.0, gt=0, description="Upper bound of the ratio.")

    def faults(self) -> Iterator[Fault]:
        if self.lower is not None and self.lower >= self.upper:
            yield Fault(("lower",), self.lower, f"must be below correction.upper ({self.upper:g})")
        if self.level == "none":
            for key in ("mode", "lower", "upper"):
                value = getattr(self, key)
                if value != type(self).model_fields[key].default:
                    yield Fault((key,), value, "has no effect with level none; set level token, sequence or geometric")
