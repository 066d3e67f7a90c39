"""Dynamic sampling (DAPO, Yu et al. 2025): only groups whose rewards differ are trained on.

A group of responses with equal rewards has advantage 0, so it gives no gradient. Such groups are dropped, and more
prompts are sampled until the step has as many groups as configured, or the bound on sampling rounds is reached.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from qarl.config.rollout import DynamicSampling
from qarl.rewards import RewardResult
from qarl.types import Prompt, Rollout


class Sampled(NamedTuple):
    """Prompts with n rollouts each, in order, and the scores of the rollouts."""

    prompts: list[Prompt]
    rollouts: list[Rollout]
    scores: RewardResult


class _Group(NamedTuple):
    """Responses to one prompt: rollouts `rows` of `source`."""

    source: Sampled
    prompt: Prompt
    rows: slice

    @property
    def rewards(self) -> list[float]:
        return self.source.scores.total[self.rows]


def sample_until_full(
    settings: DynamicSampling, wanted: int, sample: Callable[[int, int], Sampled]
) -> tuple[Sampled, dict[str, float]]:
    """Sample rounds of prompts until `wanted` groups have rewards that differ.

    If they are still too few after the last round, groups with equal rewards fill the step, so its size never changes.
    Groups beyond `wanted` are dropped: in the next step they would be of an older policy.

    Args:
        settings: Bound on the rounds, and how many prompts a round asks for.
        wanted: Groups of the step.
        sample: sample(prompts, round) samples and scores that many prompts; rounds count from 0.

    Returns:
        The groups to train on, in the order in which they were sampled, and metrics over all groups sampled:

            sampling/rounds             rounds of this step
            sampling/groups             groups sampled
            sampling/equal_frac         share whose rewards are all equal; they are dropped unless the step is short
            sampling/surplus_frac       share beyond the size of the step
            sampling/short_frac         share of the step that equal groups fill
            sampling/reward_mean        mean reward of everything sampled; reward/mean is that of the step
            sampling/tokens             response tokens sampled
    """
    varied: list[_Group] = []
    equal: list[_Group] = []
    rounds: list[Sampled] = []
    while len(varied) < wanted and len(rounds) < settings.max_rounds:
        missing = wanted - len(varied)
        rounds.append(sample(math.ceil(missing * settings.oversample), len(rounds)))
        for group in _groups(rounds[-1]):
            (varied if len(set(group.rewards)) > 1 else equal).append(group)
    short = max(wanted - len(varied), 0)
    rewards = [reward for one in rounds for reward in one.scores.total]
    sampled = len(varied) + len(equal)
    metrics = {
        "sampling/rounds": float(len(rounds)),
        "sampling/groups": float(sampled),
        "sampling/equal_frac": len(equal) / sampled,
        "sampling/surplus_frac": max(len(varied) - wanted, 0) / sampled,
        "sampling/short_frac": short / wanted,
        "sampling/reward_mean": sum(rewards) / len(rewards),
        "sampling/tokens": float(sum(len(rollout.token_ids) for one in rounds for rollout in one.rollouts)),
    }
    return _joined(varied[:wanted] + equal[:short], rounds), metrics


def _groups(sampled: Sampled) -> list[_Group]:
    n = len(sampled.rollouts) // len(sampled.prompts)
    return [_Group(sampled, prompt, slice(i * n, (i + 1) * n)) for i, prompt in enumerate(sampled.prompts)]


def _joined(groups: list[_Group], rounds: list[Sampled]) -> Sampled:
    """The chosen groups as one; failures and messages are those of all rounds."""
    of_groups = RewardResult.joined([group.source.scores.part(group.rows, first=False) for group in groups])
    whole = RewardResult.joined([one.scores for one in rounds])
    scores = replace(of_groups, failed=whole.failed, messages=whole.messages)
    rollouts = [rollout for group in groups for rollout in group.source.rollouts[group.rows]]
    return Sampled([group.prompt for group in groups], rollouts, scores)
