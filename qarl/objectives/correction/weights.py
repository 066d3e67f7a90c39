"""Importance weights: the ratio learner over sampler, bounded, per token or per response."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from qarl.objectives.ratios import clamped_exp

if TYPE_CHECKING:
    from torch import Tensor

    from qarl.objectives.segments import Segments


@dataclass(frozen=True)
class Weighting:
    """How a correction ratio becomes a weight. A bound that is None is none.

    level: `token` exp(o_t - b_t); `sequence` exp(sum_t); `geometric` exp(mean_t), shared by the response's tokens.
    mode: `truncate` the ratio to [lower, upper] (TIS); `mask` it to 0 outside, both bounds kept (MIS, IcePop); `raw`,
    the ratio itself, unbiased where it is the response's, of a variance that grows with its length.
    signal: `corr` o - b as above; `rollout` l - b, learner now: the weight of a policy gradient without a ratio of its
    own (verl's bypass mode with REINFORCE).
    """

    level: Literal["token", "sequence", "geometric"]
    mode: Literal["truncate", "mask", "raw"]
    lower: float | None = None
    upper: float | None = None
    signal: Literal["corr", "rollout"] = "corr"

    @property
    def per_token(self) -> bool:
        return self.level == "token"


class ImportanceWeights(NamedTuple):
    """Per token [T] at level token, else per response [R]; without gradient.

    weights: the bounded ratio. ratio: before bounding. rejected: bool, masked to 0. clamped: bool, exponents clamped to
    +-20.
    """

    weights: Tensor
    ratio: Tensor
    rejected: Tensor
    clamped: Tensor


def importance_weights(
    log_ratio: Tensor,  # (T,) of the signal: learner over sampler
    segments: Segments,
    options: Weighting,
) -> ImportanceWeights:
    """The bounded ratio learner over sampler."""
    log_ratio = log_ratio.detach()
    if options.level == "token":
        exponent = log_ratio
    elif options.level == "sequence":
        exponent = segments.sum(log_ratio)
    else:
        assert options.level == "geometric", f"unknown correction level {options.level!r}"
        exponent = segments.mean(log_ratio)
    ratio, clamped = clamped_exp(exponent)

    rejected = clamped.new_zeros(clamped.shape)
    if options.mode == "raw":
        return ImportanceWeights(ratio, ratio, rejected, clamped)
    if options.mode == "truncate":
        return ImportanceWeights(ratio.clamp(options.lower, options.upper), ratio, rejected, clamped)
    assert options.mode == "mask", f"unknown correction mode {options.mode!r}"
    if options.upper is not None:
        rejected |= ratio > options.upper
    if options.lower is not None:
        rejected |= ratio < options.lower
    return ImportanceWeights(ratio.masked_fill(rejected, 0.0), ratio, rejected, clamped)
