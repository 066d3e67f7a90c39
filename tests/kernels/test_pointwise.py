"""SiLU and RMSNorm: values, gradients, and bits that do not depend on the batch."""

import pytest
import torch
from kernel_harness import assert_rows_are_their_own
from qarl_kernels.pointwise import rms_norm, round_e4m3, silu
from torch import Tensor

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
EPS = 1e-5


def _random(*shape: int, seed: int = 0, scale: float = 3.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def _norm64(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + EPS)


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_and_its_gradient_are_those_of_float64(dtype: torch.dtype) -> None:
    x = torch.cat([_random(501), torch.tensor([0.0, -0.0, 30.0, -30.0, 200.0, -200.0])]).to(dtype)
    grad, ours, exact = _random(507, seed=1).to(dtype), x.clone().requires_grad_(), x.double().requires_grad_()
    found, expected = silu(ours), exact * torch.sigmoid(exact)
    found.backward(grad)
    expected.backward(grad.double())
    torch.testing.assert_close(found.double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-6)
    torch.testing.assert_close(ours.grad.double(), exact.grad, rtol=torch.finfo(dtype).eps, atol=1e-5)


def test_rounding_to_e4m3_is_to_the_nearest_and_its_gradient_goes_straight_through() -> None:
    grid = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    grid = grid[grid.isfinite()].unique()
    x = torch.cat([_random(4000) * 10, _random(1000, seed=1) * 0.01, torch.tensor([449.0, -1e9, 0.0, 2.0**-10])])
    given = x.clone().requires_grad_()
    rounded = round_e4m3(given)
    distance = (grid[None] - x.double()[:, None]).abs()
    assert torch.isin(rounded.double(), grid).all()
    assert torch.equal((rounded.double() - x.double()).abs(), distance.amin(-1))
    for dtype in (torch.bfloat16, torch.float16):
        narrow = rounded.detach().to(dtype)
        assert torch.equal(round_e4m3(narrow), narrow) and torch.equal(narrow.float(), rounded)
    grad = _random(len(x), seed=2)
    rounded.backward(grad)
    assert torch.equal(given.grad, grad)
    assert round_e4m3(torch.tensor([torch.nan])).isnan().all()


@pytest.mark.parametrize("shape", [(5, 33), (0, 64), (1, 7, 4, 32)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_and_its_gradients_are_those_of_float64(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, grad = _random(*shape).to(dtype), _random(*shape, seed=1).to(dtype)
    weight = _random(shape[-1], seed=2).to(dtype)
    master = weight.float().clone().requires_grad_()
    ours = x.clone().requires_grad_()
    exact_x, exact_weight = x.double().requires_grad_(), weight.double().requires_grad_()
    before = grad.clone()
    result, expected = rms_norm(ours, master, weight, EPS), _norm64(exact_x, exact_weight)
    result.backward(grad)
    assert torch.equal(grad, before), "the incoming gradient is left as it was"
    expected.backward(grad.double())
    # two roundings to dtype: after the norm and after the weight
    assert result.dtype == dtype
    torch.testing.assert_close(result.double(), expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
    torch.testing.assert_close(ours.grad.double(), exact_x.grad, rtol=torch.finfo(dtype).eps, atol=1e-5)
    # the weight's gradient is float32 whatever dtype the activations have
    torch.testing.assert_close(master.grad.double(), exact_weight.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [1, 32, 33, 97, 576])
def test_a_rows_bits_are_its_own(dtype: torch.dtype, columns: int) -> None:
    x, weight = _random(137, columns).to(dtype), _random(columns, seed=1).to(dtype)
    assert_rows_are_their_own(silu, x)
    assert_rows_are_their_own(lambda x: rms_norm(x, None, weight, EPS), x)
    assert torch.equal(rms_norm(x.view(1, 137, 1, columns), None, weight, EPS)[0, :, 0], rms_norm(x, None, weight, EPS))
