"""From hidden states to the distribution that a token is drawn from, whose log-probs are the learner's own."""

from __future__ import annotations

from torch import Tensor

from qarl_kernels.logprob import fused, logits_of, truncate_
from qarl_kernels.truncation import Distribution, Truncation


def distribution(hidden: Tensor, weight: Tensor, truncation: Truncation, kernels: bool = True) -> Distribution:
    """Of the tokens that follow states (R, H) with an output layer (V, H); see `logits_of` for dtypes and `kernels`."""
    if kernels and fused(hidden, weight, truncation):
        from qarl_kernels.head import fused_distribution  # imports Triton, which the CPU does not need

        return fused_distribution(hidden, weight, truncation)
    logits = logits_of(hidden, weight, kernels)
    truncate_(logits, truncation)
    return Distribution(logits, truncation.active)
