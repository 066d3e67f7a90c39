import math

import pytest
import torch

from qarl.objectives.common import k_estimate
from qarl.objectives.objective import kl_to_reference

FORMULAS = {"k1": lambda x: -x, "k2": lambda x: x * x / 2, "k3": lambda x: math.exp(x) - 1 - x}


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_an_estimate_is_its_formula_of_the_log_ratio_clamped_to_20(estimator):
    x = [-25.0, -3.0, -0.1, 0.0, 0.4, 2.0, 21.0]
    expected = [FORMULAS[estimator](max(-20.0, min(20.0, v))) for v in x]
    got = k_estimate(torch.tensor(x, dtype=torch.float64), estimator)
    assert got.tolist() == pytest.approx(expected, rel=1e-13)


def test_k3_of_a_tiny_float32_ratio_is_not_lost_to_cancellation():
    # exp(x) - 1 - x in float32 would be 0 or 1e-7; the series is x^2 / 2
    assert k_estimate(torch.tensor([1e-2]), "k3").item() == pytest.approx(5.0167e-5, rel=1e-4)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize(("now", "reference"), [(-math.inf, -1.0), (-1.0, -math.inf), (-math.inf, -math.inf)])
def test_a_cut_token_has_no_kl_and_no_gradient_nor_has_one_beyond_the_clamp_of_k3(estimator, now, reference):
    logp = torch.tensor([now, -30.0, -1.0], requires_grad=True)
    kl = kl_to_reference(logp, torch.tensor([reference, -1.0, -30.0]), estimator)
    kl.sum().backward()
    assert kl[0].item() == 0.0
    assert logp.grad[0].item() == 0.0
    assert estimator != "k3" or logp.grad.tolist() == [0.0] * 3
