"""The `correction` section: importance weights, rejection rules, a veto, and named presets of them.

Presets have the names and bounds of verl (trainer/config/algorithm.py, RolloutCorrectionConfig) and of VeXact (section
4.2 and appendix A.4, with tau_tok 2 and tau_seq 1e-3). verl rejects by k1 between two ratio bounds; here this is a rule
with estimator ratio and bounds on the ratio itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from qarl.inputs.limits import FACTOR, ITEMS, SCORE
from qarl.inputs.section import Fault, Field, Section


class Preset(NamedTuple):
    """Values that a named correction sets."""

    weights: dict[str, Any] | None = None  # level, mode, lower, upper and signal of the importance weight
    reject: tuple[dict[str, Any], ...] = ()  # rules
    ratio: Literal["train", "rollout"] | None = None  # objective.ratio; None: the preset leaves it open
    policy_gradient: bool = False  # the preset is for objectives without a ratio
    aggregation: str | None = None  # default of objective.aggregation; None: the objective's own


def _rule(estimator: str, aggregate: str, upper: float, lower: float | None = None, signal: str = "corr") -> dict:
    return {"estimator": estimator, "signal": signal, "aggregate": aggregate, "lower": lower, "upper": upper}


_WEIGHT_DEFAULTS: dict[str, Any] = dict(mode="truncate", lower=None, upper=2.0, signal="corr", normalize=False)
_TOKEN_TIS, _SEQ_TIS = {"level": "token"}, {"level": "sequence"}
_GEO_RS, _K3_RS = (_rule("ratio", "mean", 1.001, 0.999),), (_rule("k3", "mean", 0.01),)
_SUM = "seq-mean-token-sum"
_BYPASS_GEO_RS = (_rule("ratio", "mean", 1.001, 0.999, "rollout"),)

PRESETS: dict[str, Preset] = {
    "recompute": Preset(ratio="train"),
    "bypass": Preset(ratio="rollout"),
    "tis": Preset(_TOKEN_TIS),
    "seq_tis": Preset(_SEQ_TIS),
    "mis": Preset(_SEQ_TIS | {"mode": "mask"}),
    "seq_mis": Preset(_SEQ_TIS, (_rule("ratio", "sum", 2.0, 0.5),)),
    "token_mis": Preset(_TOKEN_TIS | {"mode": "mask"}),
    "icepop": Preset(_TOKEN_TIS | {"mode": "mask", "lower": 0.5, "upper": 5.0}),
    "geo_rs": Preset(reject=_GEO_RS),
    "geo_rs_token_tis": Preset(_TOKEN_TIS, _GEO_RS),
    "geo_rs_seq_tis": Preset(_SEQ_TIS, _GEO_RS),
    "k3_rs": Preset(reject=_K3_RS),
    "k3_rs_token_tis": Preset(_TOKEN_TIS, _K3_RS),
    "k3_rs_seq_tis": Preset(_SEQ_TIS, _K3_RS),
    # In verl's bypass mode, rejection uses the ratio of the loss, learner now over sampler.
    "bypass_geo_rs": Preset(reject=_BYPASS_GEO_RS, ratio="rollout"),
    "bypass_k3_rs": Preset(reject=(_rule("k3", "mean", 0.01, signal="rollout"),), ratio="rollout"),
    # verl's bypass mode with loss_type reinforce: the weight is learner now over sampler, and nothing is clipped.
    "bypass_pg_is": Preset(_SEQ_TIS | {"signal": "rollout"}, policy_gradient=True),
    "bypass_pg_geo_rs": Preset(reject=_BYPASS_GEO_RS, policy_gradient=True),
    "bypass_pg_geo_rs_token_tis": Preset(_TOKEN_TIS | {"signal": "rollout"}, _BYPASS_GEO_RS, policy_gradient=True),
    # VeXact's equations 8 to 11 sum the loss over a response's tokens.
    "srs-k3-corr": Preset(reject=(_rule("k3", "sum", 1e-3),), ratio="rollout", aggregation=_SUM),
    "srs-k3-ppo": Preset(reject=(_rule("k3", "sum", 1e-3, signal="rollout"),), ratio="rollout", aggregation=_SUM),
    "tis-srs-k1-corr": Preset(_TOKEN_TIS, (_rule("k1", "sum", 1e-3),), "train", aggregation=_SUM),
    "tis-srs-k3-corr": Preset(_TOKEN_TIS, (_rule("k3", "sum", 1e-3),), "train", aggregation=_SUM),
}

if TYPE_CHECKING:
    PresetName = str
else:
    PresetName = Literal[tuple(PRESETS)]


class RejectRule(Section):
    """Drops responses or tokens with a score outside the bounds. The ratio is learner over sampler, not its inverse."""

    estimator: Literal["k1", "k2", "k3", "ratio"] = Field(
        description="Score of a token, with r learner over sampler: k1 = -log r, k2 = (log r)^2 / 2, "
        "k3 = r - 1 - log r, or the ratio r itself."
    )
    signal: Literal["corr", "rollout"] = Field(
        "corr", description="r of the learner at the rollout's weights (corr) or of the learner now (rollout)."
    )
    aggregate: Literal["sum", "mean", "max", "token"] = Field(
        description="Over the response's tokens. For ratio: sum is the product of the ratios, mean their geometric "
        "mean, max requires every token's ratio to be inside. token: drops each token that is outside, not its "
        "response; can be combined with any weight."
    )
    lower: float | None = Field(
        None, ge=-SCORE, le=SCORE, description="Scores below this are dropped; for k1 and ratio. null: no lower bound."
    )
    upper: float | None = Field(
        None, ge=-SCORE, le=SCORE, description="Scores above this are dropped. null: no upper bound (ratio only)."
    )

    def faults(self) -> Iterator[Fault]:
        ratio = self.estimator == "ratio"
        if self.lower is not None and self.estimator in ("k2", "k3"):
            yield self.fault("lower", f"{self.estimator} is never negative; leave null, and set upper")
        if self.lower is not None and ratio and self.lower <= 0:
            yield self.fault("lower", "must be greater than 0 for estimator ratio")
        if self.upper is None:
            if not ratio:
                yield self.fault("upper", f"is required for estimator {self.estimator}")
            elif self.lower is None:
                yield self.fault("upper", "the rule has no bound; set upper or lower")
            return
        if self.upper <= 0 and self.estimator != "k1":
            yield self.fault("upper", f"must be greater than 0 for estimator {self.estimator}")
        elif self.lower is not None and self.lower >= self.upper:
            yield self.fault("lower", f"must be below upper ({self.upper:g})")

    @property
    def per_token(self) -> bool:
        """Whether the rule drops tokens, not responses."""
        return self.aggregate == "token"

    @property
    def metric(self) -> str:
        """Metric name of the fraction of responses or tokens that the rule rejects."""
        return f"correction/reject_{self.signal}_{self.estimator}_{self.aggregate}_frac"

    @property
    def identity(self) -> tuple[str, str, str]:
        """What the rule measures. Two rules of a configuration must differ in it."""
        return self.signal, self.estimator, self.aggregate

    def __str__(self) -> str:
        return f"{self.aggregate} {self.estimator} of {self.signal} outside {_interval(self.lower, self.upper)}"


class CorrectionConfig(Section):
    """Weights and rejections from the ratio learner over sampler, without gradient. tbpo has its own weight.

    A null key takes the value of the preset, if there is one.
    """

    preset: PresetName | None = Field(
        None, description="A named correction; other keys override its values. `qarl check` prints its meaning."
    )
    level: Literal["none", "token", "sequence", "geometric"] | None = Field(
        None,
        description="Weight: ratio per token, product over the response, or geometric mean over the response; none "
        "(default): no weight.",
    )
    mode: Literal["truncate", "mask", "raw"] | None = Field(
        None,
        description="Clip the ratio to [lower, upper] (TIS, default), zero it outside (MIS, IcePop), or use it "
        "unchanged (raw; exponents are clamped to +-20, with a warning when that happens).",
    )
    signal: Literal["corr", "rollout"] | None = Field(
        None,
        description="The weight's ratio: learner at the rollout's weights over sampler (corr, default), or learner "
        "now over sampler (rollout), for objectives without a ratio of their own.",
    )
    lower: float | None = Field(None, gt=0, le=FACTOR, description="Lower bound of the ratio; null: none.")
    upper: float | None = Field(None, gt=0, le=FACTOR, description="Upper bound of the ratio (default 2).")
    cap: Literal["auto"] | None = Field(
        None,
        description="auto: the upper bound is sqrt(2 (1 + chi2)) of each minibatch, which minimizes an upper bound on "
        "the weight's mean squared error; null: `upper`.",
    )
    normalize: bool = Field(False, description="Divide the weights by their mean over the minibatch.")
    reject: list[RejectRule] | None = Field(
        None,
        max_length=ITEMS,
        description="Rules that drop responses or tokens. Training uses those that pass all rules.",
    )
    veto: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="Drop responses with a token whose ratio is below this, such as 1e-4; null: none.",
    )

    @property
    def expansion(self) -> Preset:
        """Values of the preset; empty without one."""
        return PRESETS[self.preset] if self.preset else Preset()

    @property
    def active(self) -> bool:
        """Whether the correction weights, rejects or vetoes anything."""
        return self.level != "none" or bool(self.reject) or self.veto is not None

    @property
    def needs_minibatch(self) -> bool:
        """Whether the weights depend on the whole minibatch."""
        return self.normalize or self.cap == "auto"

    def capped(self, cap: float | None) -> CorrectionConfig:
        """Return the correction with `upper` replaced by `cap`, unless it is None."""
        return self if cap is None else self.model_copy(update={"upper": cap})

    @property
    def weight_key(self) -> str:
        """The user's key that chose the weight: `level`, or the `preset` that sets it."""
        return "level" if "level" in self.model_fields_set else "preset"

    def __str__(self) -> str:
        """The correction in words, such as `token truncate [none, 2]; reject sum k3 of corr outside [none, 0.001]`."""
        parts = []
        if self.level != "none":
            normalized = ", normalized" if self.normalize else ""
            upper = "auto" if self.cap == "auto" else self.upper
            bounds = "" if self.mode == "raw" else f" {_interval(self.lower, upper)}"
            of = " of rollout" if self.signal == "rollout" else ""
            parts.append(f"{self.level} {self.mode}{of}{bounds}{normalized}")
        parts += [f"reject {rule}" for rule in self.reject or ()]
        if self.veto is not None:
            parts.append(f"veto below {self.veto:g}")
        return "; ".join(parts) or "no correction"

    def faults(self) -> Iterator[Fault]:
        values = {**{key: getattr(self, key) for key in _WEIGHT_DEFAULTS}, **self.resolved()}
        unweighted = values.get("level", self.level) == "none"
        if unweighted:
            for key, default in _WEIGHT_DEFAULTS.items():
                value = getattr(self, key)
                if value is not None and value != default:
                    yield self.fault(key, "has no effect with level none; set level token, sequence or geometric")
        elif self.mode == "raw":
            for key in ("lower", "upper"):
                if getattr(self, key) is not None:
                    yield self.fault(key, "has no effect with mode raw; use truncate or mask")
        elif self.cap is None and values["lower"] is not None and values["lower"] >= values["upper"]:
            yield Fault(("lower",), values["lower"], f"must be below correction.upper ({values['upper']:g})")
        if self.cap == "auto":
            if unweighted:
                yield self.fault("cap", "has no effect with level none; set level token, sequence or geometric")
            elif self.mode == "raw":
                yield self.fault("cap", "has no effect with mode raw; use truncate or mask")
            for key in ("lower", "upper"):
                if getattr(self, key) is not None:
                    yield self.fault(key, "is chosen by correction.cap: auto; leave null")
        seen: set[tuple[str, str, str]] = set()
        for index, rule in enumerate(self.reject or ()):
            if rule.identity in seen:
                text = "measures the same as an earlier rule; write one rule with both bounds"
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
        if self.mode == "raw" or self.cap == "auto":
            values["lower"] = values["upper"] = None
        return {key: value for key, value in values.items() if getattr(self, key) is None and value is not None}


def _interval(lower: float | None, upper: float | str | None) -> str:
    bounds = ("none" if bound is None else bound if bound == "auto" else f"{bound:g}" for bound in (lower, upper))
    return f"[{', '.join(bounds)}]"
