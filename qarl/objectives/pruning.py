"""Vocabulary pruning: what a sampled token outside the learner's truncated distribution takes with it.

The estimator of dynamic vocabulary pruning is over trajectories (DVP, theorem 5.3, equation 22): it is defined where
every sampled token lies in the learner's set, and the ratio of any other response is 0. So where the ratio is the
response's, one such token takes the whole response; with a ratio a token it takes itself. Weight 0 is exactly 0: no
value, no gradient. What is pruned keeps its place in the denominators of the aggregation, as what is rejected does.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from qarl.objectives.base import PruningLevel
from qarl.objectives.segments import Segments
from qarl.objectives.surrogate import present
from qarl.objectives.tokens import Pruned, TokenLogProbs


def outside_tokens(logps: TokenLogProbs) -> Tensor:
    """bool (T,): tokens that the learner's distribution does not hold, now or at the rollout's snapshot."""
    return torch.isneginf(logps.logp) | torch.isneginf(logps.logp_old)


@torch.no_grad()
def prune(logps: TokenLogProbs, segments: Segments, level: PruningLevel, by_shadow: bool) -> Pruned:
    """What has ratio 0. by_shadow: the objective's ratio is the shadow's, so a token outside its distribution has too.

    A response with a NaN is not pruned as a whole: the NaN has to reach the loss, where the learner skips the step.
    """
    outside = outside_tokens(logps)
    if by_shadow:
        assert logps.logp_shadow is not None, "ratio shadow needs logp_shadow"
        outside = outside | torch.isneginf(logps.logp_shadow)
    if level == "token":
        return Pruned(outside, torch.zeros_like(present(segments)))
    hit = segments.sum(outside.to(torch.int64)) > 0
    broken = segments.sum((torch.isnan(logps.logp) | torch.isnan(logps.logp_old)).to(torch.int64)) > 0
    responses = hit & ~broken
    return Pruned(outside | segments.expand(responses), responses)


def without(logps: TokenLogProbs, pruned: Pruned) -> TokenLogProbs:
    """The log-probs with those of pruned tokens equal in every column, so that they have ratio 1 and no gradient.

    They count as unmoved in the sums and means of their response, and what they are worth is masked afterwards.
    """
    columns = ("logp", "logp_old", "logp_sampler", "logp_shadow")
    found = {name: x for name in columns if (x := getattr(logps, name)) is not None}
    return replace(logps, **{name: x.masked_fill(pruned.tokens, 0.0) for name, x in found.items()})
