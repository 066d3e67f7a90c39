"""Means and deviations over magnitudes up to the largest float: never an exception, and the library's bits below."""

import json
import math
import random
import statistics
from fractions import Fraction

import pytest

from qarl.rewards import RewardResult
from qarl.training.metrics import reward_metrics
from qarl.utils.averages import deviation, mean


@pytest.mark.parametrize("power", [0, 155, 308])
def test_finite_values_of_any_size_have_a_mean_and_a_deviation(power):
    rng = random.Random(power)
    for count in (1, 2, 3, 16, 500):
        values = [rng.uniform(-1.7, 1.7) * 10.0**power for _ in range(count)]
        if rng.random() < 0.5:
            values = [abs(value) for value in values]
        exact = float(sum(map(Fraction, values)) / count)
        assert mean(values) == pytest.approx(exact, rel=1e-12, abs=1e-16 * 10.0**power)
        assert deviation(values) == statistics.pstdev(values)
        if power < 300:
            assert mean(values) == statistics.fmean(values)


@pytest.mark.parametrize(
    "values, expected",
    [
        ([math.inf, 1.0], math.inf),
        ([math.inf, -math.inf], math.nan),
        ([math.nan, 1.0], math.nan),
        ([1.7e308] * 99, 1.7e308),
    ],
)
def test_values_that_are_not_finite_or_whose_sum_is_not(values, expected):
    assert str(mean(values)) == str(expected)
    assert math.isfinite(mean(values)) == math.isfinite(deviation(values))


@pytest.mark.parametrize("values", [[1e308] * 16, [1e308, -1e308], [5e-324, 1e308], [math.inf, -math.inf], [0.0]])
def test_rewards_of_any_size_give_metrics(values):
    scores = RewardResult(total=values, by_function={"a": values, "b": values}, failed={"a": 0, "b": 1}, messages=[])
    metrics = reward_metrics(scores)
    assert metrics.keys() == {"reward/mean", "reward/std", "reward/a_mean", "reward/b_mean", "reward/failed"}
    json.dumps(metrics)
