"""Rules and veto: which responses stay."""

import math

import pytest
import torch
from ragged import nothing_pruned

from qarl.objectives.common import TokenLogProbs
from qarl.objectives.correction import correct
from qarl.objectives.correction import kept as kept_and_clamped
from qarl.objectives.correction_config import CorrectionConfig, RejectRule
from qarl.objectives.segments import Segments

LENGTHS = [3, 1, 0, 5, 2]
SEGMENTS = Segments.from_lengths(LENGTHS)


def rule(estimator: str, signal: str, aggregate: str, lower: float | None, upper: float | None) -> RejectRule:
    """A rule, also with bounds that a configuration may not have."""
    keys = {"estimator": estimator, "signal": signal, "aggregate": aggregate, "lower": lower, "upper": upper}
    return RejectRule.model_construct(**keys)


def kept(x: torch.Tensor, segments: Segments, rule: RejectRule) -> torch.Tensor:
    return kept_and_clamped(x, segments, rule)[0]


def random_log_ratio(spread: float = 0.4) -> torch.Tensor:
    return spread * torch.randn(sum(LENGTHS), generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def score(x: list[float], estimator: str, aggregate: str) -> float:
    if estimator == "ratio":
        return math.exp(math.fsum(x) if aggregate == "sum" else math.fsum(x) / len(x))
    each = [{"k1": -v, "k2": v * v / 2, "k3": math.exp(v) - 1 - v}[estimator] for v in x]
    return {"sum": math.fsum(each), "mean": math.fsum(each) / len(each), "max": max(each)}[aggregate]


CHAINS = [(e, a) for e in ("k1", "k2", "k3", "ratio") for a in ("sum", "mean", "max") if (e, a) != ("ratio", "max")]


@pytest.mark.parametrize(("estimator", "aggregate"), CHAINS)
def test_a_response_stays_while_its_score_is_within_the_bounds(estimator, aggregate):
    x = random_log_ratio()
    scores = [score(part, estimator, aggregate) for part in (row.tolist() for row in x.split(LENGTHS)) if part]
    lower, upper = sorted(scores)[1] - 1e-9, sorted(scores)[-1] - 1e-9  # drops the least and the largest of four
    got = kept(x, SEGMENTS, rule(estimator, "corr", aggregate, lower, upper))
    expected = [lower <= s <= upper for s in scores]
    expected.insert(2, True)  # the empty response
    assert got.tolist() == expected
    assert expected.count(False) == 2


def test_ratio_max_demands_that_every_token_is_within_the_bounds():
    x = torch.tensor([1.0, 1.4, 1.0, 0.6, 1.0, 1.0, 1.0, 1.0, 1.6, 0.9, 1.1], dtype=torch.float64).log()
    bounds = rule("ratio", "corr", "max", 0.7, 1.5)
    assert kept(x, SEGMENTS, bounds).tolist() == [True, False, True, False, True]
    one_sided = rule("ratio", "corr", "max", None, 1.5)
    assert kept(x, SEGMENTS, one_sided).tolist() == [True, True, True, False, True]


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


@pytest.mark.parametrize(("estimator", "aggregate"), [*CHAINS, ("ratio", "max")])
def test_a_token_one_side_cuts_is_beyond_every_sensible_bound(estimator, aggregate):
    x = torch.tensor([-1e12, 0.0], dtype=torch.float32)  # what log_ratio makes of -inf
    bounds = rule(estimator, "corr", aggregate, 0.5 if estimator == "ratio" else None, 2.0)
    assert not kept(x, Segments.from_lengths([2]), bounds).item()


def test_a_nan_is_not_rejected():
    x = torch.tensor([math.nan, 0.0])
    for estimator, aggregate in [*CHAINS, ("ratio", "max")]:
        assert kept(x, Segments.from_lengths([2]), rule(estimator, "corr", aggregate, None, 2.0)).item()


def test_the_veto_drops_a_response_with_one_token_below_the_floor():
    x = torch.tensor([1.0, 1e-5, 1.0, 1e-3, 2.0, 1.0, 1.0, 1.0, 1.0, 9e-5, 5.0]).log()
    logps = TokenLogProbs(x, x, torch.zeros(11))
    weights, _ = correct(CorrectionConfig(veto=1e-4), logps, SEGMENTS, nothing_pruned(SEGMENTS))
    assert weights.tolist() == [0.0] * 3 + [1.0] * 6 + [0.0] * 2


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "ratio"])
def test_a_rule_of_tokens_drops_each_token_by_itself(estimator):
    x = random_log_ratio(0.6)
    scores = [math.exp(v) if estimator == "ratio" else score([v], estimator, "sum") for v in x.tolist()]
    lower, upper = sorted(scores)[2] - 1e-9, sorted(scores)[-2] + 1e-9
    got = kept(x, SEGMENTS, rule(estimator, "corr", "token", lower, upper))
    assert got.tolist() == [lower <= s <= upper for s in scores] and 3 <= int((~got).sum()) <= 3


@pytest.mark.parametrize(("estimator", "aggregate"), [*CHAINS, ("ratio", "max"), ("ratio", "token"), ("k3", "token")])
def test_a_rule_says_of_which_responses_it_clamped_an_exponent(estimator, aggregate):
    x = torch.tensor([0.1, 0.2, 0.3, 21.0, *[15.0] * 5, -1e12, 0.0], dtype=torch.float64)
    got = kept_and_clamped(x, SEGMENTS, rule(estimator, "corr", aggregate, 0.5, 2.0))[1]
    summed = (estimator, aggregate) == ("ratio", "sum")  # five times 15 is beyond 20, each by itself is not
    assert got.tolist() == [False, True, False, summed, True]
