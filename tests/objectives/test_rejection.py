"""Rules and veto: which responses stay."""

import math

import pytest
import torch

from qarl.objectives.correction import kept as kept_and_clamped
from qarl.objectives.correction_config import RejectRule
from qarl.objectives.segments import Segments

LENGTHS = [3, 1, 0, 5, 2]
SEGMENTS = Segments.from_lengths(LENGTHS)


def rule(estimator: str, signal: str, aggregate: str, lower: float | None, upper: float | None) -> RejectRule:
    """A rule, also with bounds that a configuration may not have."""
    keys = {"estimator": estimator, "signal": signal, "aggregate": aggregate, "lower": lower, "upper": upper}
    return RejectRule.model_construct(**keys)


def kept(x: torch.Tensor, segments: Segments, rule: RejectRule) -> torch.Tensor:
    return kept_and_clamped(x, segments, rule)[0]


CHAINS = [(e, a) for e in ("k1", "k2", "k3", "ratio") for a in ("sum", "mean", "max") if (e, a) != ("ratio", "max")]


def test_a_score_on_its_bound_stays():
    x = torch.tensor([0.5], dtype=torch.float64)
    segments = Segments.from_lengths([1])
    assert kept(x, segments, rule("k2", "corr", "sum", None, 0.125)).item()
    assert not kept(x, segments, rule("k2", "corr", "sum", None, 0.1249999)).item()


def test_a_threshold_of_1e_3_is_decided_in_float64():
    # 2000 tokens with k3 of 5e-7 each: the sum is 1e-3 within 1e-6, which float32 terms would miss by far more
    x = torch.full((2000,), 1e-3)
    segments = Segments.from_lengths([2000])
    exact = 2000 * (math.exp(float(x[0])) - 1 - float(x[0]))
    assert kept(x, segments, rule("k3", "corr", "sum", None, exact * (1 + 1e-7))).item()
    assert not kept(x, segments, rule("k3", "corr", "sum", None, exact * (1 - 1e-7))).item()


def test_a_nan_is_not_rejected():
    x = torch.tensor([math.nan, 0.0])
    for estimator, aggregate in [*CHAINS, ("ratio", "max")]:
        assert kept(x, Segments.from_lengths([2]), rule(estimator, "corr", aggregate, None, 2.0)).item()


@pytest.mark.parametrize(("estimator", "aggregate"), [*CHAINS, ("ratio", "max"), ("ratio", "token"), ("k3", "token")])
def test_a_rule_says_of_which_responses_it_clamped_an_exponent(estimator, aggregate):
    x = torch.tensor([0.1, 0.2, 0.3, 21.0, *[15.0] * 5, -1e12, 0.0], dtype=torch.float64)
    got = kept_and_clamped(x, SEGMENTS, rule(estimator, "corr", aggregate, 0.5, 2.0))[1]
    summed = (estimator, aggregate) == ("ratio", "sum")  # five times 15 is beyond 20, each by itself is not
    assert got.tolist() == [False, True, False, summed, True]
