"""avg@k and pass@k against enumeration in exact fractions; intervals against published numbers and by simulation."""

import itertools
from fractions import Fraction

import numpy as np
import pytest

from qarl.evaluation.estimators import Estimate, pass_at_k, task_avg, task_pass_at_k, unweighted_mean, wilson


@pytest.mark.parametrize("samples", [1, 2, 5])
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_sample(samples):
    for correct in range(samples + 1):
        outcomes = [True] * correct + [False] * (samples - correct)
        for k in range(1, samples + 1):
            subsets = list(itertools.combinations(outcomes, k))
            exact = Fraction(sum(any(subset) for subset in subsets), len(subsets))
            assert pass_at_k(samples, correct, k) == pytest.approx(float(exact), abs=1e-15)


def test_task_values_are_means_over_prompts():
    counts = [0, 1, 4, 4, 2]
    assert task_avg(counts, 4).mean == pytest.approx(11 / 20)
    by_hand = [0, 1 - 3 / 6, 1, 1, 1 - 1 / 6]  # C(4 - c, 2) / C(4, 2)
    assert task_pass_at_k(counts, 4, 2).mean == pytest.approx(sum(by_hand) / 5)


def test_samples_of_a_prompt_count_once_in_each_group_of_k():
    """Four samples make two disjoint pairs per prompt, so two prompts make four draws."""
    assert task_pass_at_k([2, 2], 4, 2) == wilson(1 - 1 / 6, 4)


def test_one_sample_a_prompt_gives_wilsons_interval():
    """81 of 263, from Newcombe (1998), Statistics in Medicine 17, table I: 0.2553 to 0.3662."""
    estimate = task_avg([1] * 81 + [0] * 182, 1)
    assert (round(estimate.low, 4), round(estimate.high, 4)) == (0.2553, 0.3662)


@pytest.mark.parametrize("correct, low, high", [(0, 0.0, 0.1135), (1, 0.8865, 1.0)])
def test_equal_outcomes_keep_an_interval_of_their_number_of_prompts(correct, low, high):
    """0 of 30: Wilson's upper bound is z^2 / (30 + z^2), whatever the number of samples of a prompt."""
    for samples in (1, 16):
        estimate = task_avg([correct * samples] * 30, samples)
        assert (round(estimate.low, 4), round(estimate.high, 4)) == (low, high)


def test_one_prompt_is_no_more_than_one_observation_of_prompts():
    estimate = task_avg([8], 8)
    assert estimate == wilson(1.0, 1) and estimate.low < 0.25


def test_an_interval_holds_its_mean_and_stays_in_range():
    for counts in itertools.product(range(4), repeat=3):
        for k in (1, 2, 3):
            e = task_pass_at_k(counts, 3, k)
            assert 0.0 <= e.low <= e.mean <= e.high <= 1.0 and e.low < e.high


@pytest.mark.parametrize("a, b, prompts, samples", [(0.4, 1.2, 30, 8), (3.0, 2.0, 100, 1), (20.0, 20.0, 200, 4)])
def test_the_interval_covers_the_true_value_about_95_percent_of_the_time(a, b, prompts, samples):
    """Prompts' own success rates are Beta(a, b), from nearly all-or-nothing to nearly alike; 1500 repetitions.

    Bounds: the standard error of the coverage is 0.6 %; intervals by effective sample size run 2 % low at 30 prompts.
    """
    rng = np.random.default_rng(0)
    truth = a / (a + b)
    rates = rng.beta(a, b, size=(1500, prompts))
    covered = 0
    for counts in rng.binomial(samples, rates):
        estimate = task_avg(counts.tolist(), samples)
        covered += estimate.low <= truth <= estimate.high
    assert 0.92 < covered / 1500 < 0.985


def test_the_overall_mean_weighs_tasks_equally_and_adds_distances_in_squares():
    overall = unweighted_mean([Estimate(0.5, 0.2, 0.6), Estimate(0.9, 0.5, 1.0)])
    assert overall.mean == pytest.approx(0.7)
    assert overall.low == pytest.approx(0.7 - (0.3**2 + 0.4**2) ** 0.5 / 2)
    assert overall.high == pytest.approx(0.7 + (0.1**2 + 0.1**2) ** 0.5 / 2)
