import math

import pytest
import torch
from objective_sections import objective_config

from qarl.config import CorrectionConfig
from qarl.objectives.common import TokenLogProbs, k_estimate
from qarl.objectives.objective import build_objective, kl_to_reference
from qarl.objectives.segments import Segments, Totals

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


def kl_gradient(learner: torch.Tensor, reference: torch.Tensor, reverse: bool = False) -> torch.Tensor:
    """The gradient of KL(learner || reference) by the learner's logits (V,); reverse: of KL(reference || learner)."""
    logits = learner.clone().requires_grad_()
    mine, other = logits.log_softmax(0), reference.log_softmax(0)
    kl = (other.exp() * (other - mine)).sum() if reverse else (mine.exp() * (mine - other)).sum()
    kl.backward()
    return logits.grad


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("estimator", "reverse"), [("k1", False), ("k2", False), ("k3", True)])
def test_the_expected_gradient_of_the_loss_is_that_of_a_kl(estimator, reverse, seed):
    """Exactly, by enumeration of five tokens: sum over tokens of probability * gradient of the token's estimate."""
    random = torch.Generator().manual_seed(seed)
    learner, reference = torch.randn(2, 5, generator=random, dtype=torch.float64)
    section = objective_config(name="reinforce", aggregation="token-mean", kl_coef=0.3, kl_estimator=estimator)
    objective = build_objective(section, CorrectionConfig())
    expected = torch.zeros(5, dtype=torch.float64)
    for token, probability in enumerate(learner.softmax(0).tolist()):
        logits = learner.clone().requires_grad_()
        logp, ref = logits.log_softmax(0)[token, None], reference.log_softmax(0)[token, None]
        logps = TokenLogProbs(logp, logp.detach(), logp.detach(), logp_ref=ref)
        loss, _ = objective(logps, torch.zeros(1).double(), Segments.from_lengths([1]), Totals(1, 1, 1))
        loss.backward()
        expected += probability * logits.grad
        assert loss.item() == pytest.approx(0.3 * FORMULAS[estimator]((ref - logp).item()), rel=1e-12)
    torch.testing.assert_close(expected, 0.3 * kl_gradient(learner, reference, reverse), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize(("now", "reference"), [(-math.inf, -1.0), (-1.0, -math.inf), (-math.inf, -math.inf)])
def test_a_cut_token_has_no_kl_and_no_gradient_nor_has_one_beyond_the_clamp_of_k3(estimator, now, reference):
    logp = torch.tensor([now, -30.0, -1.0], requires_grad=True)
    kl = kl_to_reference(logp, torch.tensor([reference, -1.0, -30.0]), estimator)
    kl.sum().backward()
    assert kl[0].item() == 0.0
    assert logp.grad[0].item() == 0.0
    assert estimator != "k3" or logp.grad.tolist() == [0.0] * 3
