import math

import pytest
import torch

from qarl.objectives.common import add_stats, clamped_exp, finish_stats, log_ratio, score, stat, weight_stats
from qarl.objectives.segments import Segments

INF = math.inf


def test_two_equal_infinities_have_log_ratio_zero():
    assert log_ratio(torch.tensor([-INF]), torch.tensor([-INF])).item() == 0.0


def test_an_infinite_log_ratio_is_finite_and_clamps_the_mean_of_its_response():
    logp, reference = torch.tensor([-INF] + [-1.0] * 4095), torch.full((4096,), -1.0)
    ratio, clamped = clamped_exp(Segments.from_lengths([4096]).mean(log_ratio(logp, reference)))
    assert ratio.item() == pytest.approx(math.exp(-20), rel=1e-6)
    assert clamped.item()


def test_opposite_infinities_in_one_response_cancel():
    exponent = log_ratio(torch.tensor([-INF, -1.0]), torch.tensor([-1.0, -INF]))
    ratio, _ = clamped_exp(Segments.from_lengths([2]).mean(exponent))
    assert ratio.item() == 1.0


@pytest.mark.parametrize(("exponent", "clamped"), [(20.0, False), (20.5, True), (-20.0, False), (-21.0, True)])
def test_exponents_are_clamped_beyond_20_only(exponent, clamped):
    ratio, was_clamped = clamped_exp(torch.tensor([exponent], dtype=torch.float64))
    assert was_clamped.item() is clamped
    assert ratio.item() == pytest.approx(math.exp(max(-20.0, min(20.0, exponent))), rel=1e-15)


def test_a_clamped_exponent_has_no_gradient():
    x = torch.tensor([30.0, 1.0], requires_grad=True)
    clamped_exp(x)[0].sum().backward()
    assert x.grad.tolist() == [0.0, pytest.approx(math.e)]


def test_nan_runs_through_to_value_and_gradient():
    logp = torch.tensor([math.nan, -1.0], requires_grad=True)
    ratio, _ = clamped_exp(log_ratio(logp, torch.tensor([-1.0, -1.0])))
    ratio.sum().backward()
    assert ratio.isnan().tolist() == [True, False]
    assert logp.grad.isnan().tolist() == [True, False]


def test_the_score_is_zero_with_gradient_one_where_the_log_prob_is_finite():
    logp = torch.tensor([-1.0, -INF, INF, -0.25], requires_grad=True)
    value = score(logp)
    value.sum().backward()
    assert value.tolist() == [0.0] * 4
    assert logp.grad.tolist() == [1.0, 0.0, 0.0, 1.0]


def test_stat_counts_only_what_is_under_the_mask_and_no_nan_outside():
    assert stat(torch.tensor([1.0, float("nan"), 3.0]), torch.tensor([True, False, True])).tolist() == [4.0, 2.0]


def test_adding_keeps_names_that_only_one_side_has():
    total = add_stats({"a": stat(torch.tensor([1.0]))}, {"b": stat(torch.tensor([3.0, 5.0]))})
    assert finish_stats(total) == {"a": 1.0, "b": 4.0}


def test_nothing_counted_is_zero():
    assert finish_stats({"a": stat(torch.zeros(0))}) == {"a": 0.0}


def test_ess_is_that_of_all_parts_together():
    parts = [torch.tensor([1.0, 2.0]), torch.tensor([0.5, 0.0, 4.0])]
    metrics = finish_stats(add_stats(weight_stats(parts[0]), weight_stats(parts[1])))
    weights = torch.cat(parts).tolist()
    assert metrics["correction/ess"] == pytest.approx(sum(weights) ** 2 / (5 * sum(w * w for w in weights)))
    assert set(metrics) == {"correction/weight_mean", "correction/ess"}


@pytest.mark.parametrize(("weight", "ess"), [(1.5, 1.0), (0.0, 0.0)])
def test_ess_of_equal_weights_is_one_and_of_zeros_is_zero(weight, ess):
    assert finish_stats(weight_stats(torch.full((7,), weight)))["correction/ess"] == ess
