"""avg@k and pass@k with 95 % confidence intervals. Pure functions of counts.

A prompt with n samples, c of them correct, gives avg = c / n and the unbiased pass@k of Chen et al. 2021
(arXiv:2107.03374, equation 1). The value of a task is the mean over its prompts. Its interval treats prompts as the
sampled units, because samples of the same prompt are correlated: counting them as independent would make the interval
too narrow.

The interval is Wilson's (1927) with an effective sample size, as for proportions in a clustered survey (Korn and
Graubard 1998; Franco et al. 2019): n_eff = p (1 - p) / var(mean), clamped between the number of prompts and the number
of independent samples. With one sample per prompt it is Wilson's interval itself. Unlike mean +- z * standard error, it
lies in [0, 1] and keeps a width if all outcomes are equal (30 of 30 wrong does not prove 0). It uses no random numbers
and is the same on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

Z_95 = 1.959963984540054  # 97.5 % quantile of the normal distribution


class Estimate(NamedTuple):
    """A mean in [0, 1] and its 95 % confidence interval."""

    mean: float
    low: float
    high: float


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Unbiased estimate of the probability that at least one of k samples is correct.

    1 - C(samples - correct, k) / C(samples, k), Chen et al. 2021, equation 1.
    """
    assert 0 <= correct <= samples and 1 <= k <= samples, f"{correct} correct of {samples}, k = {k}"
    # The binomials are exact integers; only the division and the subtraction round.
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def task_avg(correct: Sequence[int], samples: int) -> Estimate:
    """avg@samples of a task: mean over prompts of the fraction of correct samples.

    Args:
        correct: Number of correct samples per prompt.
        samples: Number of samples per prompt.
    """
    return mean_over_prompts([c / samples for c in correct], samples)


def task_pass_at_k(correct: Sequence[int], samples: int, k: int) -> Estimate:
    """pass@k of a task: mean over prompts of `pass_at_k`."""
    # Only the samples // k disjoint groups of k count as independent draws; overlapping groups add little.
    return mean_over_prompts([pass_at_k(samples, c, k) for c in correct], samples // k)


def mean_over_prompts(values: Sequence[float], draws_per_prompt: int) -> Estimate:
    """Mean of one value in [0, 1] per prompt, with the interval described in the module docstring.

    Args:
        values: One value per prompt.
        draws_per_prompt: Maximum number of independent draws behind each value.
    """
    assert values, "no prompts"
    prompts = len(values)
    mean = math.fsum(values) / prompts
    variance_of_mean = math.fsum((v - mean) ** 2 for v in values) / prompts / prompts
    draws = prompts * draws_per_prompt
    spread = mean * (1.0 - mean)
    effective = spread / variance_of_mean if variance_of_mean > spread / draws else draws
    if spread <= 0.0:  # all equal: the correlation of samples within a prompt is unknown
        effective = prompts
    return wilson(mean, max(float(prompts), float(effective)))


def wilson(mean: float, size: float) -> Estimate:
    """Wilson's score interval (1927) of a proportion `mean` observed in `size` independent draws."""
    shrink = 1.0 + Z_95**2 / size
    centre = (mean + Z_95**2 / (2.0 * size)) / shrink
    half = Z_95 / shrink * math.sqrt(max(0.0, mean * (1.0 - mean)) / size + Z_95**2 / (4.0 * size**2))
    # Clip rounding errors; at 0 and 1 the exact bound is the mean itself.
    return Estimate(mean, max(0.0, min(mean, centre - half)), min(1.0, max(mean, centre + half)))


def unweighted_mean(tasks: Sequence[Estimate]) -> Estimate:
    """Unweighted mean over tasks, as papers report it.

    The interval combines the intervals of the tasks as independent (MOVER: Zou and Donner 2008, equation 5): squared
    distances from mean to bound add up on each side separately, so the interval stays in [0, 1].
    """
    assert tasks, "no tasks"
    mean = math.fsum(t.mean for t in tasks) / len(tasks)
    below = math.sqrt(math.fsum((t.mean - t.low) ** 2 for t in tasks)) / len(tasks)
    above = math.sqrt(math.fsum((t.high - t.mean) ** 2 for t in tasks)) / len(tasks)
    return Estimate(mean, max(0.0, mean - below), min(1.0, mean + above))
