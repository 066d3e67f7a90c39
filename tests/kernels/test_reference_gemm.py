"""The low-bit products against float64 and integer transcriptions of their formulas."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from qarl_kernels import reference
from qarl_kernels.activation import quantize_activation_fp8, quantize_activation_int8
from torch import Tensor

BATCHES = [1, 2, 3, 5, 7, 8, 31, 33, 64, 100]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
K, N, GROUP = 96, 33, 32


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _codes(low: int, high: int, k: int = K) -> Tensor:
    return torch.randint(low, high + 1, (N, k), generator=torch.Generator().manual_seed(3)).float()


def _fp8_codes() -> Tensor:
    return (_random(N, K, seed=3) * 60).to(torch.float8_e4m3fn).float()


def _scale(groups: int = 1) -> Tensor:
    return _random(N, groups, seed=4).abs().add(0.1).mul(0.01).bfloat16()


def _operation(name: str) -> Callable[..., Tensor]:
    """name -> f(x, bias)."""
    weights = {
        "dense": (_random(N, K, seed=2).bfloat16().float(),),
        "w8a8": (_codes(-128, 127), _scale()),
        "fp8": (_fp8_codes(), _scale()),
        "w4a8": (_codes(-8, 7), _scale(K // GROUP)),
    }[name]
    return lambda x, bias=None: getattr(reference, name)(x, *weights, bias)


def _expected(name: str, x: Tensor, bias: Tensor | None) -> Tensor:
    """The formula in float64, without any rounding but that of the activation's codes."""
    if name == "dense":
        y = x.double() @ _random(N, K, seed=2).bfloat16().double().t()
    elif name == "w4a8":
        qx, sx = quantize_activation_int8(x)
        weight = _codes(-8, 7).double() * _scale(K // GROUP).double().repeat_interleave(GROUP, dim=1)
        y = qx.double() @ weight.t() * sx.double()
    else:
        qx, sx = (quantize_activation_int8 if name == "w8a8" else quantize_activation_fp8)(x)
        codes = _codes(-128, 127) if name == "w8a8" else _fp8_codes()
        y = qx.double() @ codes.double().t() * sx.double() * _scale().double().t()
    return y if bias is None else y + bias.double()


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("m", [0, 1, 5, 33])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["dense", "w8a8", "fp8", "w4a8"])
def test_product_is_its_formula(name: str, dtype: torch.dtype, m: int, with_bias: bool) -> None:
    x = _random(m, K, seed=m).to(dtype)
    bias = _random(N, seed=5).to(dtype) if with_bias else None
    result, expected = _operation(name)(x, bias), _expected(name, x, bias)
    assert result.dtype == dtype and result.shape == (m, N)
    # one rounding to dtype of a float32 result; K * 2^-24 of the terms (each under 100) where sums cancel
    torch.testing.assert_close(result.double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-4)


@pytest.mark.parametrize("k", [1, 63, 1024, 1025, 4100])
def test_w8a8_accumulates_exactly_as_int64_does(k: int) -> None:
    codes = torch.full((N, k), -128.0)
    codes[1:] = _codes(-128, 127, k)[1:]
    x = _random(5, k, seed=6)
    x[0] = 1.0  # codes of 127 against -128: the largest sum
    qx, sx = quantize_activation_int8(x)
    exact = qx.long() @ codes.long().t()
    expected = exact.float() * _scale().float().t() * sx
    assert torch.equal(reference.w8a8(x, codes, _scale()), expected)


@pytest.mark.parametrize("groups", [1, 3])
def test_w4a8_sums_exact_groups_in_order(groups: int) -> None:
    codes, scale = _codes(-8, 7), _scale(groups)
    x = _random(7, K, seed=8)
    qx, sx = quantize_activation_int8(x)
    acc = torch.zeros(7, N)
    for part, weights, s in zip(qx.chunk(groups, 1), codes.chunk(groups, 1), scale.float().t(), strict=True):
        acc = acc + (part.long() @ weights.long().t()).float() * s
    assert torch.equal(reference.w4a8(x, codes, scale), acc * sx)


def test_w4a8_group_longer_than_the_exact_length_is_its_formula() -> None:
    k = reference.INT4_EXACT_K + 100
    x, codes, scale = _random(2, k, seed=9), _codes(-8, 7, k), _scale()
    qx, sx = quantize_activation_int8(x)
    expected = (qx.long() @ codes.long().t()).double() * scale.double().t() * sx.double()
    torch.testing.assert_close(reference.w4a8(x, codes, scale).double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", ["dense", "w8a8", "fp8", "w4a8"])
def test_product_gives_a_row_the_same_bits_in_every_batch(name: str) -> None:
    operation = _operation(name)
    bias = _random(N, seed=5).bfloat16()
    x = _random(137, K, seed=7).bfloat16()
    whole = operation(x, bias)
    for batch in BATCHES:
        for start in (0, 37):
            assert torch.equal(operation(x[start : start + batch], bias), whole[start : start + batch])


@pytest.mark.parametrize("name", ["w8a8", "fp8", "w4a8"])
def test_a_row_that_is_not_finite_does_not_give_finite_numbers(name: str) -> None:
    x = _random(3, K, seed=7).bfloat16()
    x[1, 5] = torch.nan
    y = _operation(name)(x)
    assert not y[1].isfinite().any() and y[0].isfinite().all() and y[2].isfinite().all()
