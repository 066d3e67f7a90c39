"""Routing: the kernel and plain torch against float64, ties, replay, inputs that are not finite, and gradients."""

import pytest
import torch
from kernel_harness import NEEDS_TRITON, QUIET, assert_rows_are_their_own
from products import random
from qarl_kernels.groups import Routed
from qarl_kernels.moe import routing
from qarl_kernels.moe.balance import balance_grad, choices
from qarl_kernels.moe.routing import route, route_backward
from torch import Tensor

pytestmark = [NEEDS_TRITON, QUIET, pytest.mark.usefixtures("poisoned")]

BF16 = torch.bfloat16
# (T, H, E, k)
SHAPES = [(37, 100, 10, 3), (5, 64, 128, 8), (1, 72, 8, 2), (3, 40, 300, 16), (0, 40, 12, 4)]


@pytest.fixture(params=[False, True], ids=["torch", "triton"])
def kernels(request: pytest.FixtureRequest) -> bool:
    return request.param


def float64(x: Tensor, weight: Tensor, k: int, normalize: bool, chosen: Tensor | None = None) -> Routed:
    logits = x.double() @ weight.double().t()
    p = logits.softmax(1)
    experts = (p.topk(k).indices if chosen is None else chosen.long()).sort(1).values
    weights = p.gather(1, experts)
    return Routed(logits, experts.int(), weights / weights.sum(1, keepdim=True) if normalize else weights)


def close(result: Routed, expected: Routed) -> None:
    # chains of up to 100 products of size 1, and exponentials of sums up to 40
    torch.testing.assert_close(result.logits.double(), expected.logits, rtol=1e-5, atol=1e-5)
    assert torch.equal(result.experts, expected.experts)
    torch.testing.assert_close(result.weights.double(), expected.weights, rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize(("tokens", "columns", "experts", "k"), SHAPES)
def test_the_most_probable_experts_and_their_probabilities(device, tokens, columns, experts, k, kernels) -> None:
    dtype = torch.float16 if tokens == 1 else BF16
    x = random(tokens, columns + 8, seed=1, device=device, dtype=dtype)[:, :columns]
    weight = random(experts, columns, seed=2, device=device, dtype=dtype)
    given = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(3)).argsort(1)[:, :k].contiguous()
    for normalize, chosen in ((True, None), (False, None), (True, given.to(device)), (False, given.int().to(device))):
        close(route(x, weight, k, normalize, chosen, kernels=kernels), float64(x, weight, k, normalize, chosen))


def test_a_tokens_bits_are_its_own(device, kernels, monkeypatch) -> None:
    monkeypatch.setattr(routing, "FEW_TOKENS", 40)  # the larger tile for the whole
    x, weight = (random(n, 200, seed=n, device=device, dtype=BF16) for n in (100, 24))
    assert_rows_are_their_own(lambda x: list(vars(route(x, weight, 4, True, kernels=kernels)).values()), x)


def test_of_equal_logits_the_lower_expert_is_chosen(device, kernels) -> None:
    x = torch.ones(2, 16, device=device, dtype=BF16)
    weight = torch.zeros(9, 16, device=device, dtype=BF16)
    assert route(x, weight, 3, True, kernels=kernels).experts.tolist() == [[0, 1, 2]] * 2
    weight[[4, 6, 8]] = 1.0
    x[1] = 0.0
    weight[3] = -0.0
    routed = route(x, weight, 2, True, kernels=kernels)
    assert routed.experts.tolist() == [[4, 6], [0, 1]]
    assert torch.equal(routed.weights, torch.full((2, 2), 0.5, device=device))


def test_experts_are_in_range_and_differ_whatever_x_holds(device, kernels) -> None:
    x = random(6, 32, seed=1, device=device, dtype=BF16)
    x[0, 3], x[1, 4], x[2], x[3] = torch.nan, torch.inf, -torch.inf, torch.nan
    weight = random(5, 32, seed=2, device=device, dtype=BF16)
    weight[2] = 0.0  # infinity times zero: a NaN among the logits
    routed = route(x, weight, 3, True, kernels=kernels)
    assert routed.experts.min() >= 0 and routed.experts.max() < 5
    assert (routed.experts.diff(dim=1) > 0).all()
    assert routed.weights[:4].isnan().all() and routed.weights[4:].isfinite().all()


@pytest.mark.parametrize(("normalize", "tokens"), [(False, 19), (True, 19), (True, 0)])
def test_the_gradient_is_that_of_the_weights(device, normalize, tokens, kernels) -> None:
    x, weight = (random(n, 40, seed=n, device=device, dtype=BF16) for n in (tokens, 20))
    routed = route(x, weight, 4, normalize)
    arriving = random(tokens, 4, seed=3, device=device)
    logits = routed.logits.double().requires_grad_()
    p = logits.softmax(1).gather(1, routed.experts.long())
    ((p / p.sum(1, keepdim=True) if normalize else p) * arriving.double()).sum().backward()
    result = route_backward(arriving, routed, normalize, kernels=kernels)
    torch.testing.assert_close(result.double(), logits.grad, rtol=1e-4, atol=1e-6)


def test_balance_and_z_loss_are_those_of_the_tokens_that_are_counted(device) -> None:
    x, weight = (random(n, 40, seed=n, device=device, dtype=BF16) for n in (19, 6))
    routed = route(x, weight, 2, True)
    result = balance_grad(routed, slice(3, 18), aux=0.3, z=0.02)
    logits = routed.logits[3:18].double().requires_grad_()
    slots = torch.tensor([(routed.experts[3:18] == e).sum() / 15 for e in range(6)], device=device).double()
    balance = 6 * (slots * logits.softmax(1).mean(0)).sum()
    z_loss = logits.logsumexp(1).square().mean()
    (0.3 * balance + 0.02 * z_loss).backward()
    torch.testing.assert_close(result[3:18].double(), logits.grad, rtol=1e-4, atol=1e-7)
    assert not result[:3].any() and not result[18:].any()


def test_choices_are_counted_layer_by_layer(device) -> None:
    experts = torch.tensor([[[0, 1], [2, 3]], [[0, 3], [2, 1]], [[0, 2], [1, 2]]], dtype=torch.int16, device=device)
    assert choices(experts, 4).tolist() == [[3, 1, 1, 1], [0, 2, 3, 1]]
