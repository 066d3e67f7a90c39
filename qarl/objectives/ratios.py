"""Probability ratios of the sampled tokens, from log-probs that may be infinite.

A NaN is never hidden: it runs through to the loss and the gradient, where the learner skips the step. An infinite
log-prob (a token outside a truncated distribution) gives finite values and no gradient.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from qarl.objectives.segments import Segments

MAX_EXPONENT = 20.0
"""Exponents are clamped to +-20 before exp, and the clamped ones are counted (`*_clamped_frac`)."""

INFINITE = 1e12
"""Stands for an infinite log-ratio: any mean over under 10^10 tokens still exceeds MAX_EXPONENT, no fp32 sum overflows,
and two of opposite sign in one response cancel instead of making NaN."""


def log_ratio(logp: Tensor, logp_reference: Tensor) -> Tensor:
    """log(p / p_reference) per token: [T], [T] -> [T], finite unless an input is NaN.

    Two equal infinities have ratio 1. A token with an infinite log-prob gets no gradient.
    """
    both_infinite = logp.isinf() & (logp == logp_reference)
    difference = (logp - logp_reference).masked_fill(both_infinite, 0.0)
    difference = difference.masked_fill(difference == math.inf, INFINITE)
    return difference.masked_fill(difference == -math.inf, -INFINITE)


def clamped_exp(exponent: Tensor) -> tuple[Tensor, Tensor]:
    """exp of the exponent clamped to +-MAX_EXPONENT, and the bool mask of those that were clamped.

    A clamped element has no gradient. `Tensor.clamp` is not used because it has none at NaN either.
    """
    high, low = exponent > MAX_EXPONENT, exponent < -MAX_EXPONENT
    return exponent.masked_fill(high, MAX_EXPONENT).masked_fill(low, -MAX_EXPONENT).exp(), high | low


def score(logp: Tensor) -> Tensor:
    """logp - stop(logp): [T] -> [T], zeros with d/d logp = 1. Infinite log-probs get no gradient."""
    finite = logp.masked_fill(logp.isinf(), 0.0)
    return finite - finite.detach()


def sequence_ratio(token_log_ratio: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
    """exp(mean_t log-ratio), the geometric mean over each response, and which were clamped: [T] -> [R], bool [R].

    Without gradient. An empty response has ratio 1.
    """
    return clamped_exp(segments.mean(token_log_ratio.detach()))


def through_tokens(ratio: Tensor, logp: Tensor) -> Tensor:
    """stop(ratio) * exp(logp - stop(logp)): [T], [T] -> [T], the value of `ratio` with d/d logp_t = ratio_t.

    How a sequence-level ratio reaches the tokens (GSPO, GSPO-token form). Infinite log-probs get no gradient.
    """
    return ratio.detach() * score(logp).exp()
