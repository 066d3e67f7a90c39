"""Terms beside the surrogate: KL to a reference policy, and entropy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from qarl.objectives.ratios import MAX_EXPONENT, log_ratio

if TYPE_CHECKING:
    from torch import Tensor

Estimator = Literal["k1", "k2", "k3"]


def k_estimate(log_ratio: Tensor, estimator: Estimator) -> Tensor:
    """K(r) elementwise from log r, with exponents clamped to +-20 (Schulman 2020, VeXact section 4).

    k1 = -log r, k2 = (log r)^2 / 2, k3 = r - 1 - log r. With r = p / q on samples of q each estimates KL(q || p).
    """
    high, low = log_ratio > MAX_EXPONENT, log_ratio < -MAX_EXPONENT
    x = log_ratio.masked_fill(high, MAX_EXPONENT).masked_fill(low, -MAX_EXPONENT)
    if estimator == "k1":
        return -x
    if estimator == "k2":
        return x.square() / 2
    assert estimator == "k3", f"unknown estimator {estimator!r}"
    return x.expm1() - x


def kl_to_reference(logp: Tensor, logp_ref: Tensor, estimator: Estimator) -> Tensor:
    """K(exp(ref - l)) per token, [T], with gradient to `logp`: an estimate of KL(learner || reference).

    A token that the learner's or the reference's truncation cuts has no finite estimate: it counts 0, without gradient.
    """
    cut = logp.isinf() | logp_ref.isinf()
    return k_estimate(log_ratio(logp_ref, logp), estimator).masked_fill(cut, 0.0)
