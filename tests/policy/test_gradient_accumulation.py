"""The weight gradient goes straight into the master's `.grad` where nobody can see the difference."""

from __future__ import annotations

import pytest
import torch
from policy_models import standalone, view_of
from qarl_formats.prepared import prepare
from qarl_formats.quantize import quantize_weight
from qarl_formats.scheme import make_scheme
from torch import Tensor, nn

from qarl.policy import linear as linear_module
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
def in_place(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Gets an entry for each weight gradient made: whether it was added in place."""
    seen: list[bool] = []
    original = linear_module.weight_grad

    def spy(dy: Tensor, x: Tensor, into: Tensor | None = None) -> Tensor | None:
        seen.append(into is not None)
        return original(dy, x, into)

    monkeypatch.setattr(linear_module, "weight_grad", spy)
    return seen


def _loss(linear: QuantLinear, seed: int) -> Tensor:
    return linear(torch.randn(9, K, generator=torch.Generator().manual_seed(seed)).bfloat16()).float().square().sum()


def test_later_micro_batches_add_in_place_with_the_bits_of_a_sum(linear, in_place) -> None:
    parts = []
    for seed in (1, 2, 3):
        linear.weight.grad = None
        _loss(linear, seed).backward()
        parts.append(linear.weight.grad)
    linear.weight.grad = None
    in_place.clear()
    for seed in (1, 2, 3):
        _loss(linear, seed).backward()
    assert in_place == [False, True, True]
    assert torch.equal(linear.weight.grad, parts[0] + parts[1] + parts[2])


def test_the_gradient_stays_the_tensor_it_was(linear, in_place) -> None:
    kept = linear.weight.grad = torch.ones(N, K)
    _loss(linear, 1).backward()
    assert in_place == [True] and linear.weight.grad is kept and not torch.equal(kept, torch.ones(N, K))


@pytest.mark.parametrize("hook", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_on_the_master_still_sees_its_gradient(linear, in_place, hook: str) -> None:
    linear.weight.grad = torch.zeros(N, K)
    seen: list[Tensor] = []
    getattr(linear.weight, hook)(lambda given: seen.append(given.detach().clone()))
    _loss(linear, 1).backward()
    assert in_place == [False] and len(seen) == 1 and linear.weight.grad.any()


def test_autograd_grad_gets_the_gradient_and_leaves_the_masters_alone(linear, in_place) -> None:
    _loss(linear, 1).backward()
    expected = linear.weight.grad.clone()
    (found,) = torch.autograd.grad(_loss(linear, 1), [linear.weight])
    assert in_place == [False, False]
    assert torch.equal(found, expected) and torch.equal(linear.weight.grad, expected)


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


def test_a_weight_that_is_computed_passes_its_gradient_on(linear, in_place) -> None:
    """A master behind another operation is no leaf: its gradient goes through the graph."""
    base = linear.weight.detach().clone().requires_grad_()
    base.grad = torch.zeros(N, K)
    del linear.weight
    linear.weight = base * 2
    _loss(linear, 1).backward()
    assert in_place == [False] and base.grad.any()


def test_checkpointed_layers_add_in_place_once(linear, in_place) -> None:
    from torch.utils.checkpoint import checkpoint

    x = torch.randn(9, K, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
    for _ in range(2):
        checkpoint(linear, x, use_reentrant=False).float().square().sum().backward()
    assert in_place == [False, True]
    twice, linear.weight.grad = linear.weight.grad, None
    linear(x).float().square().sum().backward()
    assert torch.equal(twice, linear.weight.grad * 2)
