"""Importance correction of the gap between sampler and learner."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from qarl.config.base import Fault, Field, Section
from qarl.config.limits import FACTOR, ITEMS, SCORE
from qarl.objectives.correction.presets import PRESETS, Preset, PresetName

_WEIGHT_DEFAULTS: dict[str, Any] = {
    "mode": "truncate",
    "lower": None,
    "upper": 2.0,
    "signal": "corr",
    "normalize": False,
}


class RejectRule(Section):
    """Responses, or tokens, are dropped when their score leaves its bounds. Bounds are of learner over sampler."""

    estimator: Literal["k1", "k2", "k3", "ratio"] = Field(
        description="What a token shows, with r learner over sampler: k1 = -log r, k2 = (log r)^2 / 2, "
        "k3 = r - 1 - log r, or the ratio r itself."
    )
    signal: Literal["corr", "rollout"] = Field(
        "corr", description="r of the learner at the rollout's snapshot (corr) or of the learner now (rollout)."
    )
    aggregate: Literal["sum", "mean", "max", "token"] = Field(
        description="Over the response's tokens. For ratio: sum is the product of the ratios, mean their geometric "
        "mean, max demands that every token's ratio is inside. token: no response is dropped, but each token outside, "
        "beside whatever the weight is."
    )
    lower: float | None = Field(
        None, ge=-SCORE, le=SCORE, description="Dropped below this; for k1 and ratio. null: no lower bound."
    )
    upper: float | None = Field(
        None, ge=-SCORE, le=SCORE, description="Dropped above this. null: no upper bound (ratio only)."
    )

    def faults(self) -> Iterator[Fault]:
        ratio = self.estimator == "ratio"
        if self.lower is not None and self.estimator in ("k2", "k3"):
            yield Fault(("lower",), self.lower, f"{self.estimator} is never negative; leave null, and set upper")
        if self.lower is not None and ratio and self.lower <= 0:
            yield Fault(("lower",), self.lower, "must be greater than 0 for estimator ratio")
        if self.upper is None:
            if not ratio:
                yield Fault(("upper",), None, f"is required for estimator {self.estimator}")
            elif self.lower is None:
                yield Fault(("upper",), None, "the rule has no bound; set upper or lower")
            return
        if self.upper <= 0 and self.estimator != "k1":
            yield Fault(("upper",), self.upper, f"must be greater than 0 for estimator {self.estimator}")
        elif self.lower is not None and self.lower >= self.upper:
            yield Fault(("lower",), self.lower, f"must be below upper ({self.upper:g})")

    @property
    def identity(self) -> tuple[str, str, str]:
        """What the rule measures; two rules of one configuration must not share it."""
        return self.signal, self.estimator, self.aggregate

    def __str__(self) -> str:
        return f"{self.aggregate} {self.estimator} of {self.signal} outside {_interval(self.lower, self.upper)}"


class CorrectionConfig(Section):
    """Weights, masks and rejections from the ratio learner over sampler, without gradient. tbpo carries its own weight.

    A key that is left null takes the value of the preset, where there is one.
    """

    preset: PresetName | None = Field(
        None, description="A named correction; keys given beside it replace its own. `qarl check` prints what it means."
    )
    level: Literal["none", "token", "sequence", "geometric"] | None = Field(
        None,
        description="Weight: ratio per token, product over the response, or geometric mean over the response; none "
        "(default): no weight.",
    )
    mode: Literal["truncate", "mask", "raw"] | None = Field(
        None,
        description="Clip the ratio to [lower, upper] (TIS, default), zero it outside (MIS, IcePop), or take it as it "
        "is (raw; exponents stay within +-20, and a warning says where that bound was met).",
    )
    signal: Literal["corr", "rollout"] | None = Field(
        None,
        description="The weight's ratio: learner at the rollout's snapshot over sampler (corr, default), or learner "
        "now over sampler (rollout), for objectives without a ratio of their own.",
    )
    lower: float | None = Field(None, gt=0, le=FACTOR, description="Lower bound of the ratio; null: none.")
    upper: float | None = Field(None, gt=0, le=FACTOR, description="Upper bound of the ratio (default 2).")
    normalize: bool = Field(False, description="Divide the weights by their mean over the minibatch.")
    reject: list[RejectRule] | None = Field(
        None,
        max_length=ITEMS,
        description="Rules that drop responses, or tokens; what is trained on has passed all of them.",
    )
    veto: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="Drop responses with a token whose ratio is below this, such as 1e-4; null: none.",
    )

    @property
    def expansion(self) -> Preset:
        """What the preset sets; nothing without one."""
        return PRESETS[self.preset] if self.preset else Preset()

    @property
    def active(self) -> bool:
        """Anything is weighted, rejected or vetoed."""
        return self.level != "none" or bool(self.reject) or self.veto is not None

    @property
    def weight_key(self) -> tuple[str, str | None]:
        """The key that a user wrote for the weight, and its value: a level that came with a preset is the preset's."""
        return ("level", self.level) if "level" in self.model_fields_set else ("preset", self.preset)

    def __str__(self) -> str:
        """The correction in words, such as `token truncate [none, 2]; reject sum k3 of corr outside [none, 0.001]`."""
        parts = []
        if self.level != "none":
            normalized = ", normalized" if self.normalize else ""
            bounds = "" if self.mode == "raw" else f" {_interval(self.lower, self.upper)}"
            of = " of rollout" if self.signal == "rollout" else ""
            parts.append(f"{self.level} {self.mode}{of}{bounds}{normalized}")
        parts += [f"reject {rule}" for rule in self.reject or ()]
        if self.veto is not None:
            parts.append(f"veto below {self.veto:g}")
        return "; ".join(parts) or "no correction"

    def faults(self) -> Iterator[Fault]:
        values = {**{key: getattr(self, key) for key in _WEIGHT_DEFAULTS}, **self.resolved()}
        if values.get("level", self.level) == "none":
            for key, default in _WEIGHT_DEFAULTS.items():
                value = getattr(self, key)
                if value is not None and value != default:
                    yield Fault((key,), value, "has no effect with level none; set level token, sequence or geometric")
        elif self.mode == "raw":
            for key in ("lower", "upper"):
                if getattr(self, key) is not None:
                    yield Fault((key,), getattr(self, key), "has no effect with mode raw; use truncate or mask")
        elif values["lower"] is not None and values["lower"] >= values["upper"]:
            yield Fault(("lower",), values["lower"], f"must be below correction.upper ({values['upper']:g})")
        seen: set[tuple[str, str, str]] = set()
        for index, rule in enumerate(self.reject or ()):
            if rule.identity in seen:
                text = "measures the same as a rule before it; write one rule with both bounds"
                yield Fault(("reject", index), str(rule), text)
            seen.add(rule.identity)

    def resolved(self) -> dict[str, Any]:
        preset = self.expansion
        weights = preset.weights or {}
        level = self.level or weights.get("level", "none")
        values = {
            **_WEIGHT_DEFAULTS,
            **(weights if level != "none" else {}),
            "level": level,
            "reject": [RejectRule(**rule) for rule in preset.reject],
        }
        if self.mode == "raw":
            values["lower"] = values["upper"] = None
        return {key: value for key, value in values.items() if getattr(self, key) is None and value is not None}


def _interval(lower: float | None, upper: float | None) -> str:
    return f"[{_bound(lower)}, {_bound(upper)}]"


def _bound(bound: float | None) -> str:
    return "none" if bound is None else f"{bound:g}"
