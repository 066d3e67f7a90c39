"""The two products of a linear's backward against float64, and accumulation in place against a sum."""

import pytest
import torch
from qarl_kernels.backward import input_grad, weight_grad
from torch import Tensor

N, K = 24, 40
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROWS = [0, 1, 9, 130]


def _random(*shape: int, seed: int, device: torch.device) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


@pytest.mark.parametrize("m", ROWS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_input_grad_is_dy_times_the_weight_rounded_once(device, dtype: torch.dtype, m: int) -> None:
    dy, weight = _random(m, N, seed=1, device=device).to(dtype), _random(N, K, seed=2, device=device).to(dtype)
    dx = input_grad(dy, weight)
    assert dx.dtype == dtype and dx.shape == (m, K)
    # one rounding to dtype; N float32 roundings of terms under 20
    torch.testing.assert_close(dx.double(), dy.double() @ weight.double(), rtol=torch.finfo(dtype).eps, atol=1e-4)


def test_input_grad_takes_a_float32_weight_beside_a_16_bit_gradient(device) -> None:
    dy, weight = _random(9, N, seed=1, device=device).bfloat16(), _random(N, K, seed=2, device=device)
    dx = input_grad(dy, weight)
    assert dx.dtype == torch.bfloat16
    torch.testing.assert_close(dx.double(), dy.double() @ weight.double(), rtol=2**-8, atol=1e-4)


@pytest.mark.parametrize("m", ROWS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_weight_grad_is_a_float32_sum_or_adds_to_one_in_place(device, dtype: torch.dtype, m: int) -> None:
    dy, x = _random(m, N, seed=1, device=device).to(dtype), _random(m, K, seed=2, device=device).to(dtype)
    product, exact = weight_grad(dy, x), dy.double().t() @ x.double()
    assert product.dtype == torch.float32 and product.shape == (N, K)
    torch.testing.assert_close(product.double(), exact, rtol=1e-5, atol=1e-4)
    into = _random(N, K, seed=3, device=device)
    before, address = into.clone(), into.data_ptr()
    assert weight_grad(dy, x, into) is None and into.data_ptr() == address
    torch.testing.assert_close(into.double(), before.double() + exact, rtol=1e-5, atol=1e-4)
    if device.type == "cpu":
        assert torch.equal(into, before + product), "the bits of a product and a sum"


def test_a_gradient_spread_from_one_number_is_taken(device) -> None:
    """`y.sum().backward()` hands down a gradient whose strides are zero."""
    dy = torch.ones((), dtype=torch.bfloat16, device=device).expand(9, N)
    x, weight = _random(9, K, seed=2, device=device).bfloat16(), _random(N, K, seed=3, device=device).bfloat16()
    assert torch.equal(input_grad(dy, weight), input_grad(dy.contiguous(), weight))
    assert torch.equal(weight_grad(dy, x), weight_grad(dy.contiguous(), x))
