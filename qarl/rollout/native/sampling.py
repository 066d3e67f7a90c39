"""Drawing tokens: one uniform number per token from a counter-based stream, then the inverse of the distribution."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def uniforms(seed: int, prompt_id: int, sample: int, count: int) -> np.ndarray:
    """The numbers in [0, 1), float64 (count,), that decide the tokens of response `sample` to prompt `prompt_id`.

    Number p decides token p, whatever `count` is. A Philox 4x64 stream keyed by the seed and counted by the rest: it
    needs no state, so a draw is the same whatever was drawn before it, beside it, or before an interruption.
    """
    stream = np.random.Philox(
        key=np.array([seed, 0], dtype=np.uint64), counter=np.array([0, 0, sample, prompt_id], dtype=np.uint64)
    )
    return np.random.Generator(stream).random(count)


# Tokens that truncation cut keep a probability of exp(-50) = 2e-22 of the likeliest one's. A draw starts above what
# half a million of them add up to; of the rest of the distribution that takes less than the step of a uniform number.
FIRST_POINT = 1e-16


def draw(log_probs: Tensor, points: list[float]) -> Tensor:
    """Token ids (R,) by inverting each row's cumulative distribution, in float64, in order of token id.

    log_probs: (R, V) float32, the distribution drawn from; points: R numbers in [0, 1]. A row that is not a
    distribution (NaN) gives its last token.
    """
    cumulative = log_probs.exp().cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    scaled = torch.tensor(points, dtype=torch.float64, device=log_probs.device)[:, None] * total
    # At most one step under the total, so that it ends on the last token that adds something to it.
    scaled = scaled.clamp_(min=FIRST_POINT).minimum(total.nextafter(torch.zeros_like(total)))
    return torch.searchsorted(cumulative, scaled, right=True)[:, 0].clamp_(max=log_probs.shape[-1] - 1)
