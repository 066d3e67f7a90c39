"""Sampled tokens outside the learner's truncated distribution: they get weight 0, alone or with their response.

Dynamic vocabulary pruning (DVP, theorem 5.3, equation 22) has an estimator over trajectories. It is defined if every
sampled token lies in the learner's set, and the ratio of any other response is 0. So with DVP and one ratio per
response, one token outside drops its whole response. This rule is DVP's alone. After an update the learner's top-p or
top-k set is another one than at the rollout, and a few tokens per thousand fall out of it; dropping their responses
would drop most long responses. There only the token itself gets weight 0.

Weight 0 is exact: no value and no gradient. Pruned tokens stay in the denominators of the aggregation, as rejected ones
do.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from qarl.objectives.base import PruningLevel
from qarl.objectives.segments import Segments
from qarl.objectives.surrogate import present
from qarl.objectives.tokens import Pruned, TokenLogProbs


@torch.no_grad()
def prune(logps: TokenLogProbs, segments: Segments, level: PruningLevel, by_shadow: bool) -> Pruned:
    """Find the tokens and responses that get weight 0.

    A token is outside if the learner's log-prob is -inf, now or at the rollout's snapshot. A token with a NaN is never
    pruned, nor is its response: the NaN has to reach the loss, so that the learner skips the step.

    Args:
        logps: Log-probs, (T,) each.
        segments: Response of each token.
        level: What a token outside drops: its `response`, or the `token` alone.
        by_shadow: The objective's ratio is the shadow's, so a token outside the shadow's distribution has ratio 0 too.

    Returns:
        The masks; see `Pruned`.
    """
    learner = [logps.logp, logps.logp_old]
    if by_shadow:
        assert logps.logp_shadow is not None, "ratio shadow needs logp_shadow"
        learner.append(logps.logp_shadow)
    broken = torch.stack([x.isnan() for x in (*learner, logps.logp_sampler)]).any(0)
    outside = torch.stack([x.isneginf() for x in learner]).any(0) & ~broken
    if level == "token":
        return Pruned(outside, torch.zeros_like(present(segments)), outside)
    hit = segments.sum(outside.to(torch.int64)) > 0
    responses = hit & ~(segments.sum(broken.to(torch.int64)) > 0)
    return Pruned(outside | segments.expand(responses), responses, outside)


def without(logps: TokenLogProbs, pruned: Pruned) -> TokenLogProbs:
    """Set pruned tokens to 0 in every column, so that they have ratio 1 and no gradient.

    They count as unmoved in the sums and means over their response. The caller masks their values afterwards.
    """
    columns = ("logp", "logp_old", "logp_sampler", "logp_shadow")
    found = {name: x for name in columns if (x := getattr(logps, name)) is not None}
    return replace(logps, **{name: x.masked_fill(pruned.tokens, 0.0) for name, x in found.items()})
