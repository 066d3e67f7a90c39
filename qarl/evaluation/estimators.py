"""avg@k and pass@k with 95 % confidence intervals. Pure functions of counts.

A prompt with n samples, c of them correct, gives avg = c / n and the unbiased pass@k of Chen et al. 2021
(arXiv:2107.03374, equation 1). A task's value is the mean over its prompts, and its interval treats the prompts as
the sampled units: samples of one prompt are correlated, so counting them as independent would be too sure.

The interval is Wilson's (1927) at an effective sample size, as for proportions of a clustered survey (Korn and
Graubard 1998; Franco et al. 2019): n_eff = p (1 - p) / var(mean), held between the number of prompts, which it cannot
fall below, and the number of independent draws, which it cannot exceed. One sample a prompt gives Wilson's interval
itself. Unlike mean +- z * standard error it lies in [0, 1] and keeps its width where all outcomes are equal (30 of 30
wrong is no proof of 0). It needs no random numbers and is the same on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from qarl.errors import UserError

Z_95 = 1.959963984540054  # the normal distribution's 97.5 % quantile


@dataclass(frozen=True)
class Estimate:
    """A mean in [0, 1] with the bounds of its 95 % confidence interval."""

    mean: float
    low: float
    high: float

    def as_dict(self) -> dict[str, float]:
        return {"mean": self.mean, "low": self.low, "high": self.high}


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Probability that at least one of k samples is correct, estimated from `correct` of `samples`, unbiased.

    1 - C(samples - correct, k) / C(samples, k), Chen et al. 2021, equation 1. Raises UserError if k > samples.
    """
    require_k(k, samples)
    assert 0 <= correct <= samples, f"{correct} correct of {samples}"
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)  # exact integers, one rounding each


def require_k(k: int, samples: int) -> None:
    """Raise UserError unless 1 <= k <= samples."""
    if not 1 <= k <= samples:
        raise UserError(f"pass@{k}: needs k from 1 to the number of samples, which is {samples}; lower k or draw more")


def task_avg(correct: Sequence[int], samples: int) -> Estimate:
    """avg@samples of a task: the mean over prompts of the share of correct samples.

    correct: for each prompt how many of its `samples` samples are correct.
    """
    return mean_over_prompts([c / samples for c in correct], samples)


def task_pass_at_k(correct: Sequence[int], samples: int, k: int) -> Estimate:
    """pass@k of a task: the mean over prompts of `pass_at_k`. Raises UserError if k > samples."""
    require_k(k, samples)
    # samples // k disjoint groups of k are independent; overlapping ones add little, and are not counted as draws.
    return mean_over_prompts([pass_at_k(samples, c, k) for c in correct], samples // k)


def mean_over_prompts(values: Sequence[float], draws_per_prompt: int) -> Estimate:
    """Mean of one value in [0, 1] a prompt, with the interval of the module's docstring.

    draws_per_prompt: how many independent draws stand behind one value at most.
    """
    assert values, "no prompts"
    prompts = len(values)
    mean = math.fsum(values) / prompts
    variance_of_mean = math.fsum((v - mean) ** 2 for v in values) / prompts / prompts
    draws = prompts * draws_per_prompt
    spread = mean * (1.0 - mean)
    effective = spread / variance_of_mean if variance_of_mean > spread / draws else draws
    if spread <= 0.0:  # all right or all wrong: the outcomes do not show how alike the samples of a prompt are
        effective = prompts
    return wilson(mean, max(float(prompts), float(effective)))


def wilson(mean: float, size: float) -> Estimate:
    """Wilson's score interval (1927) of a proportion `mean` seen in `size` independent draws."""
    shrink = 1.0 + Z_95**2 / size
    centre = (mean + Z_95**2 / (2.0 * size)) / shrink
    half = Z_95 / shrink * math.sqrt(max(0.0, mean * (1.0 - mean)) / size + Z_95**2 / (4.0 * size**2))
    # Clipped against rounding; at 0 and 1 the exact bound is the mean itself.
    return Estimate(mean, max(0.0, min(mean, centre - half)), min(1.0, max(mean, centre + half)))


def unweighted_mean(tasks: Sequence[Estimate]) -> Estimate:
    """The mean over tasks, each counting the same, as papers report it.

    Its interval combines the tasks' own as independent (MOVER: Zou and Donner 2008, equation 5): the distances from
    mean to bound add in squares, each side by itself, so it stays inside [0, 1].
    """
    assert tasks, "no tasks"
    mean = math.fsum(t.mean for t in tasks) / len(tasks)
    below = math.sqrt(math.fsum((t.mean - t.low) ** 2 for t in tasks)) / len(tasks)
    above = math.sqrt(math.fsum((t.high - t.mean) ** 2 for t in tasks)) / len(tasks)
    return Estimate(mean, max(0.0, mean - below), min(1.0, mean + above))
