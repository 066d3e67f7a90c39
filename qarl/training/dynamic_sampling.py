"""Dynamic sampling (DAPO, Yu et al. 2025): train only on groups whose rewards differ.

A group of responses with equal rewards has advantage 0 and gives no gradient. Such groups are dropped, and more prompts
are sampled until the step has the configured number of groups or the limit on sampling rounds is reached.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from qarl.config.rollout import DynamicSampling
from qarl.rewards import RewardResult
from qarl.types import Prompt, Rollout


class Sampled(NamedTuple):
    """Prompts with n rollouts each, in order, and the scores of the rollouts."""

    prompts: list[Prompt]
    rollouts: list[Rollout]
    scores: RewardResult


class _Group(NamedTuple):
    """Responses to one prompt: the rollouts in the slice `rows` of `source.rollouts`."""

    source: Sampled
    prompt: Prompt
    rows: slice

    @property
    def varied(self) -> bool:
        """Whether the rewards differ in float32, in which advantages are computed: 0.1 + 0.2 equals 0.3 there."""
        return len(np.unique(np.asarray(self.source.scores.total[self.rows], np.float32))) > 1


def sample_until_full(
    settings: DynamicSampling, wanted: int, sample: Callable[[int, int], Sampled]
) -> tuple[Sampled, dict[str, float]]:
    """Sample rounds of prompts until `wanted` groups have differing rewards.

    If there are too few such groups after the last round, groups with equal rewards fill the step, so that the number
    of groups per step never changes.
    Surplus groups are dropped rather than kept for the next step, where they would come from an older policy.

    Args:
        settings: Limit on rounds, and number of prompts per round.
        wanted: Number of groups per step.
        sample: `sample(prompts, round)` samples and scores that many prompts; rounds count from 0.

    Returns:
        The groups to train on, in sampling order, and metrics over all sampled groups:

            sampling/rounds          rounds in this step
            sampling/groups          groups sampled
            sampling/equal_frac      fraction of groups with equal rewards, dropped unless the step would be short
            sampling/surplus_frac    fraction of groups dropped although their rewards differ, as the step was full
            sampling/short_frac      fraction of the step filled with equal groups
            sampling/reward_mean     mean reward of everything sampled (reward/mean covers only the step)
            sampling/tokens          response tokens sampled
    """
    varied: list[_Group] = []
    equal: list[_Group] = []
    rounds: list[Sampled] = []
    while len(varied) < wanted and len(rounds) < settings.max_rounds:
        missing = wanted - len(varied)
        rounds.append(sample(math.ceil(missing * settings.oversample), len(rounds)))
        for group in _groups(rounds[-1]):
            (varied if group.varied else equal).append(group)
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
    """Merge the chosen groups into one step, with the failure counts and messages of all rounds."""
    of_groups = RewardResult.joined([group.source.scores.part(group.rows, first=False) for group in groups])
    whole = RewardResult.joined([one.scores for one in rounds])
    scores = replace(of_groups, failed=whole.failed, messages=whole.messages)
    rollouts = [rollout for group in groups for rollout in group.source.rollouts[group.rows]]
    return Sampled([group.prompt for group in groups], rollouts, scores)
