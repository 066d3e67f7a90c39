"""Gradients of micro-batches: sums that an accumulator holds, and that leave the masters' own `.grad` alone."""

import pytest
import torch
from policy_models import OneLinear
from qarl_formats.registry import make_scheme
from qarl_formats.weight import quantize_weight
from torch import Tensor, nn

from qarl.policy.gradients import GradientAccumulator

N, K = 24, 64


@pytest.fixture
def linear() -> OneLinear:
    torch.manual_seed(0)
    made = nn.Linear(K, N)
    operand = quantize_weight(made.weight.detach(), make_scheme("w8a8"), "w").prepare(torch.bfloat16)
    return OneLinear(made, operand, torch.bfloat16)


@pytest.fixture
def sums(linear: OneLinear) -> GradientAccumulator:
    return GradientAccumulator([linear.weight, linear.bias])


def _loss(linear: OneLinear, seed: int) -> Tensor:
    return linear(torch.randn(9, K, generator=torch.Generator().manual_seed(seed)).bfloat16()).float().square().sum()


def _alone(linear: OneLinear, seed: int) -> tuple[Tensor, Tensor]:
    """Gradients of weight and bias by autograd alone."""
    return torch.autograd.grad(_loss(linear, seed), [linear.weight, linear.bias])


def test_sums_have_the_bits_of_additions_in_their_order_and_accumulators_do_not_mix(linear, sums) -> None:
    parts = [_alone(linear, seed) for seed in (1, 2, 3)]
    theirs = linear.weight.grad = torch.ones(N, K)
    other = GradientAccumulator([linear.weight, linear.bias])
    sums.backward(_loss(linear, 1))
    held = list(sums._sums.values())
    other.backward(_loss(linear, 2))
    sums.backward(_loss(linear, 2))
    sums.backward(_loss(linear, 3))
    assert linear.weight.grad is theirs and bool((theirs == 1).all()) and linear.bias.grad is None
    assert all(a is b for a, b in zip(list(sums._sums.values()), held, strict=True)), "the sum stays the tensor it was"
    for found, (a, b, c) in zip(held, zip(*parts, strict=True), strict=True):
        assert torch.equal(found, a + b + c)
    sums.deliver()
    assert linear.weight.grad is held[0] and linear.bias.grad is held[1]
    assert all(torch.equal(found, part) for found, part in zip(other.take(), parts[1], strict=True))


def test_the_loss_scale_is_divided_out_and_cleared_sums_are_forgotten(linear, sums) -> None:
    expected = _alone(linear, 1)
    sums.backward(_loss(linear, 2))
    sums.clear()
    sums.backward(_loss(linear, 1) * 64.0)
    sums.deliver(64.0)
    assert torch.equal(linear.weight.grad, expected[0]) and torch.equal(linear.bias.grad, expected[1])


def test_delivered_gradients_replace_older_ones_and_leave_nothing_behind(linear, sums) -> None:
    linear.weight.grad, linear.bias.grad = torch.ones(N, K), torch.ones(N)
    sums.backward(linear.weight.sum() * 2.0)
    sums.deliver()
    assert torch.equal(linear.weight.grad, torch.full((N, K), 2.0)) and linear.bias.grad is None
    sums.deliver()
    assert linear.weight.grad is None


def test_a_backward_that_breaks_off_puts_everything_back(linear, sums) -> None:
    theirs = linear.weight.grad = torch.ones(N, K)
    out = linear(torch.randn(9, K).bfloat16().requires_grad_())

    def refuse(gradient: Tensor) -> None:
        raise RuntimeError("odd")

    out.register_hook(refuse)
    with pytest.raises(RuntimeError, match="odd"):
        sums.backward(out.float().sum())
    assert linear.weight.grad is theirs and linear.bias.grad is None
