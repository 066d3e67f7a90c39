"""REINFORCE (Williams 1992) and, with leave-one-out advantages, RLOO (Ahmadian et al. 2024): no ratio at all."""

from __future__ import annotations

import torch
from torch import Tensor

from qarl.objectives.segments import Segments
from qarl.objectives.surrogate import Surrogate


def reinforce(
    logp: Tensor,  # (T,) learner now, with gradient
    advantages: Tensor,  # (R,)
    segments: Segments,
) -> Surrogate:
    """A l_t per token, [T], to maximise. A token of infinite log-prob has value 0 and no gradient."""
    return Surrogate(segments.expand(advantages) * logp.masked_fill(torch.isinf(logp), 0.0), {})
