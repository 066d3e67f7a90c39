"""Rejection: responses, or tokens, dropped when they show too large a mismatch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from qarl.objectives.ratios import MAX_EXPONENT, clamped_exp
from qarl.objectives.regularizers import k_estimate

if TYPE_CHECKING:
    from torch import Tensor

    from qarl.objectives.segments import Segments


@dataclass(frozen=True)
class Rejection:
    """One rule; a response stays if lower <= S <= upper, bounds included. None is no bound on that side.

    With aggregate `token` it is the token that stays or not, beside any weight (verl's token-level rejection).

    estimator: what a token shows, of the log ratio x learner over sampler: k1 = -x, k2 = x^2 / 2, k3 = e^x - 1 - x,
    each with x clamped to +-20, or the ratio e^x itself.
    signal: `corr` x = o - b (learner at the rollout's snapshot), `rollout` x = l - b (learner now).
    aggregate: S over the response's tokens. k1, k2, k3: their `sum`, `mean` or `max`. ratio: `sum` is exp(sum x), the
    ratio of the whole response; `mean` is exp(mean x), its geometric mean (Geo-RS); `max` bounds every token's ratio.
    `token`: what each token shows, by itself.
    """

    estimator: Literal["k1", "k2", "k3", "ratio"]
    signal: Literal["corr", "rollout"]
    aggregate: Literal["sum", "mean", "max", "token"]
    lower: float | None
    upper: float | None

    @property
    def per_token(self) -> bool:
        return self.aggregate == "token"

    @property
    def metric(self) -> str:
        """The name of the share that it rejects, of the responses, or of the tokens with aggregate token."""
        return f"correction/reject_{self.signal}_{self.estimator}_{self.aggregate}_frac"


def kept(log_ratio: Tensor, segments: Segments, rule: Rejection) -> Tensor:
    """bool [R]: responses that the rule lets pass, from the per-token log ratio of its signal, [T]; a rule with
    aggregate token: bool [T], tokens.

    In float64: k3 of a small mismatch is a difference of nearly equal numbers, and thresholds are of order 1e-3. An
    empty response stays. So does one with a NaN: it has to reach the loss, where the learner skips the step.
    """
    x = log_ratio.detach().double()
    lower = -math.inf if rule.lower is None else rule.lower
    upper = math.inf if rule.upper is None else rule.upper
    if rule.estimator == "ratio" and rule.aggregate in ("sum", "mean"):
        score = clamped_exp(segments.sum(x) if rule.aggregate == "sum" else segments.mean(x))[0]
    else:
        values = clamped_exp(x)[0] if rule.estimator == "ratio" else k_estimate(x, rule.estimator)
        if rule.per_token:
            return ~((values < lower) | (values > upper))
        if rule.estimator == "ratio":
            return segments.sum(((values < lower) | (values > upper)).long()) == 0
        if rule.aggregate == "max":
            score = _largest(values, segments)
        else:
            score = segments.sum(values) if rule.aggregate == "sum" else segments.mean(values)
    return (segments.lengths == 0) | ~((score < lower) | (score > upper))


def rule_clamped(log_ratio: Tensor, segments: Segments, rule: Rejection) -> Tensor:
    """bool [R]: responses of which the rule saw an exponent clamped to +-20, an infinite one included."""
    x = log_ratio.detach().double()
    if rule.estimator == "ratio" and rule.aggregate in ("sum", "mean"):
        exponent = segments.sum(x) if rule.aggregate == "sum" else segments.mean(x)
        return exponent.abs() > MAX_EXPONENT
    return segments.sum((x.abs() > MAX_EXPONENT).long()) > 0


def vetoed(log_ratio: Tensor, segments: Segments, floor: float) -> Tensor:
    """bool [R]: responses with a token whose ratio is below `floor`, from log r_corr, [T]."""
    return segments.sum((log_ratio.detach().double() < math.log(floor)).long()) > 0


def _largest(x: Tensor, segments: Segments) -> Tensor:
    """[T] -> [R], -inf for an empty response. An exact maximum is the same in any order, so scatter is safe here."""
    return x.new_full(segments.lengths.shape, -math.inf).scatter_reduce(0, segments.index, x, "amax")
