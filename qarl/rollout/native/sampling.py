"""Drawing tokens: one uniform number per token from a counter-based stream, then the inverse of the distribution."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def uniform(seed: int, prompt_id: int, sample: int, position: int) -> float:
    """The number in [0, 1) that decides token `position` of response `sample` to prompt `prompt_id`.

    A Philox 4x64 block keyed by the seed and counted by the rest: it needs no state, so a draw is the same whatever
    was drawn before it, beside it, or before an interruption.
    """
    stream = np.random.Philox(key=np.array([seed, 0], dtype=np.uint64),
                              counter=np.array([0, position, sample, prompt_id], dtype=np.uint64))  # fmt: skip
    return np.random.Generator(stream).random()


def draw(log_probs: Tensor, uniforms: list[float]) -> Tensor:
    """Token ids (R,) by inverting each row's cumulative distribution, in float64, in order of token id.

    log_probs: (R, V) float32, the distribution drawn from.
    """
    cumulative = log_probs.exp().cumsum(-1, dtype=torch.float64)
    points = torch.tensor(uniforms, dtype=torch.float64, device=log_probs.device)[:, None] * cumulative[:, -1:]
    index = torch.searchsorted(cumulative, points, right=True)[:, 0]
    return index.clamp(max=log_probs.shape[-1] - 1)
