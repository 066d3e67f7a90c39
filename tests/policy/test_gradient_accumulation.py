"""Gradients of micro-batches: added in place by the accumulator, and by autograd alone without one."""

from __future__ import annotations

import pytest
import torch
from policy_models import standalone, view_of
from qarl_formats.prepared import prepare
from qarl_formats.quantize import quantize_weight
from qarl_formats.scheme import make_scheme
from torch import Tensor, nn

from qarl.policy import gradients as gradients_module
from qarl.policy import linear as linear_module
from qarl.policy.gradients import GradientAccumulator
from qarl.policy.linear import QuantLinear

N, K = 24, 64


@pytest.fixture
def linear() -> QuantLinear:
    torch.manual_seed(0)
    made = standalone(nn.Linear(K, N))
    operand = prepare(quantize_weight(made.weight.detach(), make_scheme("w8a8"), "w"), torch.bfloat16)
    made.role.settle(view_of(made, operand, torch.bfloat16))
    return made


@pytest.fixture
def sums(linear: QuantLinear) -> GradientAccumulator:
    return GradientAccumulator(linear.role, [linear.weight, linear.bias])


@pytest.fixture
def in_place(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Gets an entry for each weight gradient made: whether it was added in place."""
    seen: list[bool] = []
    original = linear_module.weight_grad

    def spy(dy: Tensor, x: Tensor, into: Tensor | None = None) -> Tensor | None:
        seen.append(into is not None)
        return original(dy, x, into)

    for module in (linear_module, gradients_module):
        monkeypatch.setattr(module, "weight_grad", spy)
    return seen


def _loss(linear: QuantLinear, seed: int) -> Tensor:
    return linear(torch.randn(9, K, generator=torch.Generator().manual_seed(seed)).bfloat16()).float().square().sum()


def _alone(linear: QuantLinear, seed: int) -> tuple[Tensor, Tensor]:
    """Gradients of weight and bias by autograd alone."""
    return torch.autograd.grad(_loss(linear, seed), [linear.weight, linear.bias])


def test_later_micro_batches_add_in_place_with_the_bits_of_a_sum(linear, sums, in_place) -> None:
    parts = [_alone(linear, seed) for seed in (1, 2, 3)]
    in_place.clear()
    for seed in (1, 2, 3):
        sums.backward(_loss(linear, seed))
    assert in_place == [False, True, True]
    for found, (a, b, c) in zip(sums.take(), zip(*parts, strict=True), strict=True):
        assert torch.equal(found, a + b + c)


def test_the_sum_stays_the_tensor_it_was_and_is_what_is_delivered(linear, sums, in_place) -> None:
    sums.backward(_loss(linear, 1))
    first = sums.peek()
    kept = [total.clone() for total in first]
    sums.backward(_loss(linear, 1))
    assert in_place == [False, True]
    assert all(a is b for a, b in zip(sums.peek(), first, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, kept, strict=True))
    sums.deliver()
    assert linear.weight.grad is first[0] and linear.bias.grad is first[1]


def test_a_backward_leaves_the_masters_own_gradients_alone(linear, sums) -> None:
    theirs = linear.weight.grad = torch.ones(N, K)
    sums.backward(_loss(linear, 1))
    assert linear.weight.grad is theirs and bool((theirs == 1).all()) and linear.bias.grad is None
    assert torch.equal(sums.peek()[0], _alone(linear, 1)[0])


def test_two_accumulators_of_one_policy_do_not_mix(linear, sums) -> None:
    other = GradientAccumulator(linear.role, [linear.weight, linear.bias])
    sums.backward(_loss(linear, 1))
    other.backward(_loss(linear, 2))
    sums.backward(_loss(linear, 3))
    (first, _), (second, _), (third, _) = (_alone(linear, seed) for seed in (1, 2, 3))
    assert torch.equal(sums.take()[0], first + third) and torch.equal(other.take()[0], second)


def test_delivered_gradients_replace_older_ones_and_leave_nothing_behind(linear, sums) -> None:
    linear.weight.grad, linear.bias.grad = torch.ones(N, K), torch.ones(N)
    sums.backward(linear.weight.sum() * 2.0)
    sums.deliver()
    assert torch.equal(linear.weight.grad, torch.full((N, K), 2.0)) and linear.bias.grad is None
    sums.deliver()
    assert linear.weight.grad is None


def test_the_loss_scale_is_divided_out_where_gradients_are_delivered(linear) -> None:
    expected = _alone(linear, 1)
    scaled = GradientAccumulator(linear.role, [linear.weight, linear.bias], loss_scale=64.0)
    scaled.backward(_loss(linear, 1) * 64.0)
    scaled.deliver()
    assert torch.equal(linear.weight.grad, expected[0]) and torch.equal(linear.bias.grad, expected[1])


def test_cleared_sums_are_forgotten(linear, sums) -> None:
    sums.backward(_loss(linear, 1))
    sums.clear()
    sums.backward(_loss(linear, 2))
    assert torch.equal(sums.take()[0], _alone(linear, 2)[0])


def test_a_backward_that_breaks_off_puts_everything_back(linear, sums) -> None:
    theirs = linear.weight.grad = torch.ones(N, K)
    out = linear(torch.randn(9, K).bfloat16().requires_grad_())

    def refuse(gradient: Tensor) -> None:
        raise RuntimeError("odd")

    out.register_hook(refuse)
    with pytest.raises(RuntimeError, match="odd"):
        sums.backward(out.float().sum())
    assert linear.weight.grad is theirs and linear.role.gradients is None


# --- without an accumulator autograd does everything, and what watches it sees everything


@pytest.mark.parametrize("hook", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_on_the_master_still_sees_its_gradient(linear, in_place, hook: str) -> None:
    linear.weight.grad = torch.zeros(N, K)
    seen: list[Tensor] = []
    getattr(linear.weight, hook)(lambda given: seen.append(given.detach().clone()))
    _loss(linear, 1).backward()
    assert in_place == [False] and len(seen) == 1 and linear.weight.grad.any()


def test_autograd_grad_gets_the_gradient_and_leaves_the_masters_and_the_sums_alone(linear, sums, in_place) -> None:
    sums.backward(_loss(linear, 1))
    expected = sums.peek()[0].clone()
    linear.weight.grad = theirs = torch.ones(N, K)
    (found,) = torch.autograd.grad(_loss(linear, 1), [linear.weight])
    assert in_place == [False, False]
    assert torch.equal(found, expected) and torch.equal(sums.peek()[0], expected)
    assert linear.weight.grad is theirs and bool((theirs == 1).all())


def test_a_gradient_that_nobody_asked_for_is_not_added(linear) -> None:
    linear.weight.grad = torch.zeros(N, K)
    _loss(linear, 1).backward(inputs=[linear.bias])
    assert linear.bias.grad.any() and not linear.weight.grad.any()


@pytest.mark.parametrize(
    "gradient", [torch.zeros(K, N).t(), torch.zeros(N, K).to_sparse()], ids=["transposed", "sparse"]
)
@pytest.mark.filterwarnings("ignore:grad and param do not obey")
def test_a_gradient_of_another_layout_is_added_by_autograd(linear, in_place, gradient: Tensor) -> None:
    linear.weight.grad = gradient
    _loss(linear, 1).backward()
    assert in_place == [False] and linear.weight.grad.to_dense().any()


@pytest.mark.parametrize("accumulated", [False, True])
def test_a_weight_that_is_computed_passes_its_gradient_on(linear, in_place, accumulated: bool) -> None:
    """A master behind another operation is none of the accumulator's: its gradient goes through the graph."""
    base = nn.Parameter(linear.weight.detach().clone())
    del linear.weight
    linear.weight = base * 2
    if accumulated:
        sums = GradientAccumulator(linear.role, [base, linear.bias])
        sums.backward(_loss(linear, 1))
        sums.deliver()
    else:
        _loss(linear, 1).backward()
    assert in_place == [False] and base.grad.any()


def test_checkpointed_layers_add_in_place_once(linear, sums, in_place) -> None:
    from torch.utils.checkpoint import checkpoint

    x = torch.randn(9, K, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
    for _ in range(2):
        sums.backward(checkpoint(linear, x, use_reentrant=False).float().square().sum())
    assert in_place == [False, True]
    twice = sums.take()[0]
    linear(x).float().square().sum().backward()
    assert torch.equal(twice, linear.weight.grad * 2)
