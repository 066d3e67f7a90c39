"""Advantages: one number per response, from the rewards of its group or of the batch."""

from __future__ import annotations

import torch
from torch import Tensor

from qarl.objectives.base import AdvantageKind
from qarl.objectives.segments import Segments


def compute_advantages(rewards: Tensor, groups: Tensor, kind: AdvantageKind, eps: float = 1e-6) -> Tensor:
    """Compute the advantage of each response.

    grpo         (R - mean_group) / (std_group + eps)   Shao et al. 2024; std with n - 1, as `torch.std`
    grpo_no_std  R - mean_group                         Dr. GRPO, Liu et al. 2025
    rloo         R_i - mean of the others of the group  Ahmadian et al. 2024
    reinforce    (R - mean) / (std + eps) over the whole batch; `groups` is not read

    If all rewards of a group (reinforce: of the batch) are equal, its advantages are exactly 0, independent of the
    rounding of the mean. A group of one response has advantage 0. Computed in float64.

    Args:
        rewards: (R,) rewards.
        groups: (R,) int64 group of each response, any ids.
        kind: The formula.
        eps: Added to the standard deviation.

    Returns:
        (R,) advantages in the dtype of `rewards`.
    """
    if kind == "reinforce":
        groups = torch.zeros_like(groups)
    _, group, size = torch.unique(groups, return_inverse=True, return_counts=True)
    order = torch.argsort(group, stable=True)  # members of a group become adjacent
    segments = Segments(group[order], size)
    reward = rewards.double()[order]
    n = size.double()

    centered = reward - segments.expand(segments.mean(reward))
    if kind == "grpo_no_std":
        advantages = centered
    elif kind == "rloo":
        # R_i - (sum - R_i) / (n - 1) = (R_i - mean) * n / (n - 1)
        advantages = centered * segments.expand(n / (n - 1).clamp(min=1))
    else:
        std = (segments.sum(centered.square()) / (n - 1).clamp(min=1)).sqrt()
        advantages = centered / (segments.expand(std) + eps)

    first = reward[size.cumsum(0) - size]  # first reward of each group
    differs = segments.sum((reward != segments.expand(first)).to(torch.int64)) > 0
    advantages = torch.where(segments.expand(differs), advantages, 0.0)
    return torch.empty_like(advantages).index_put((order,), advantages).to(rewards.dtype)
