"""SAPO, Soft Adaptive Policy Optimization (Gao et al. 2025): a smooth gate in place of the clip.

Ratios far from 1 fade out instead of losing their gradient at an edge, faster for A < 0 with the larger temperature.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qarl.objectives.pruning import Pruned, counted
from qarl.objectives.ratios import clamped_exp
from qarl.objectives.segments import Segments
from qarl.objectives.surrogate import Surrogate, ratio_stats


def sapo(
    log_ratio: Tensor,  # (T,) with gradient
    advantages: Tensor,  # (R,)
    segments: Segments,
    tau_pos: float,
    tau_neg: float,
    pruned: Pruned | None = None,
) -> Surrogate:
    """f(r) A per token, [T], to maximise, with f(r) = sigmoid(tau (r - 1)) * 4 / tau.

    tau is tau_pos for A > 0 and tau_neg else. f'(1) = 1, so on policy the gradient is that of r A. Statistics
    are over tokens that are not pruned.
    """
    ratio, clamped = clamped_exp(log_ratio)
    advantage = segments.expand(advantages)
    tau = torch.full_like(ratio, tau_neg).masked_fill(advantage > 0, tau_pos)
    value = advantage * (tau * (ratio - 1.0)).sigmoid() * (4.0 / tau)
    mask = counted(segments, pruned, per_token=True)
    return Surrogate(value, ratio_stats(ratio, torch.zeros_like(clamped), clamped, mask))
