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
    """Per-token estimate K(r) of KL(learner || reference), r = exp(ref - l), with a gradient to `logp`.

    The expected gradient of each estimator over tokens that the learner samples:

    - k1: its own gradient, -1 per token, is 0 in expectation and pulls nowhere. It gets the gradient of k2 instead
      (straight through), so that the loss has the value of k1 and the gradient of KL(learner || reference).
    - k2: the gradient of KL(learner || reference) exactly, although its value is biased.
    - k3: the gradient of the reverse, KL(reference || learner), although its value is unbiased. The two agree to first
      order in the distance of the distributions.

    Args:
        logp: (T,) log-probs of the sampled tokens by the learner, differentiable.
        logp_ref: (T,) the same by the reference.
        estimator: k1, k2 or k3.

    Returns:
        (T,), 0 without gradient for a token outside the truncated distribution of the learner or of the reference,
        which has no finite estimate. A log ratio beyond +-20 is clamped and has no gradient.
    """
    cut, x = logp.isinf() | logp_ref.isinf(), log_ratio(logp_ref, logp)
    value = k_estimate(x, estimator)
    if estimator == "k1":
        k2 = k_estimate(x, "k2")
        value = value.detach() + (k2 - k2.detach())
    return value.masked_fill(cut, 0.0)
