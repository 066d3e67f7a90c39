import math

import pytest
import torch

from qarl.objectives.common import clamped_exp, log_ratio, score
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
