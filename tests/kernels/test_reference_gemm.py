"""Exact sums of the low-bit products. Their values and batch invariance: `test_scheme_products.py`."""

import pytest
import torch
from qarl_kernels import reference
from qarl_kernels.activation import quantize_activation_int8
from torch import Tensor

K, N = 96, 33


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _codes(low: int, high: int, k: int = K) -> Tensor:
    return torch.randint(low, high + 1, (N, k), generator=torch.Generator().manual_seed(3)).float()


def _scale(groups: int = 1) -> Tensor:
    return _random(N, groups, seed=4).abs().add(0.1).mul(0.01).bfloat16()


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
