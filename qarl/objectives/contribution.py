"""Zero-centred contributions: how hard the ratio alone pushes, on rewarded and on punished tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from qarl.objectives.ratios import clamped_exp, log_ratio
from qarl.objectives.segments import Segments
from qarl.objectives.surrogate import Stats, stat
from qarl.objectives.tokens import Pruned, TokenLogProbs


@torch.no_grad()
def contribution_stats(
    logps: TokenLogProbs, advantages: Tensor, segments: Segments, pruned: Pruned | None = None
) -> Stats:
    """Means of C(r) = -(r - 1) A over tokens of A > 0 and of A < 0 (VeXact section 4.1, figure 5).

    `train` has r = exp(l - o), which drives a recomputed update, `rollout` r = exp(l - b), the same token against the
    policy that drew it. Equal without mismatch; a gap on one sign only is the paper's early sign of instability.
    Pruned tokens are in neither: what they contribute is the pruning's.
    """
    advantage = segments.expand(advantages)
    live = torch.ones_like(segments.index, dtype=torch.bool) if pruned is None else ~pruned.tokens
    stats = Stats()
    for name, reference in (("train", logps.logp_old), ("rollout", logps.logp_sampler)):
        ratio, _ = clamped_exp(log_ratio(logps.logp, reference))
        contribution = -(ratio - 1.0) * advantage
        stats[f"policy/contribution_{name}_pos"] = stat(contribution, live & (advantage > 0))
        stats[f"policy/contribution_{name}_neg"] = stat(contribution, live & (advantage < 0))
    return stats
