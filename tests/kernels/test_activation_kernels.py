"""Kernels that quantize activations against their plain-torch twins, bit for bit."""

import pytest
import torch
from kernel_harness import NEEDS_TRITON, QUIET, assert_rows_are_their_own, assert_same
from pairwise import pairwise
from qarl_kernels.activation import quantize_activation_fp8, quantize_activation_int8
from qarl_kernels.quantize import activation_codes

pytestmark = [NEEDS_TRITON, QUIET, pytest.mark.usefixtures("poisoned")]

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def _activations(k: int, dtype: torch.dtype) -> torch.Tensor:
    """(18, k): ordinary rows of many sizes, then zero, tie, subnormal, huge, NaN and infinite ones."""
    generator = torch.Generator().manual_seed(k)
    x = torch.randn(18, k, generator=generator) * torch.logspace(-6, 4, 18)[:, None]
    x[3], x[4] = 0.0, -0.0
    x[5] = 1e-3 * x[5].sign()
    x[6, 1:] = 0.0
    x[7] = (torch.arange(k) - k // 2) / 2  # ties once the scale is a power of two
    x[7, 0] = 63.5
    x[8] = torch.randn(k, generator=generator) * 1e-39
    x[9] = torch.randn(k, generator=generator) * 3e-7
    x[10] = torch.randn(k, generator=generator).clamp(-1, 1) * torch.finfo(dtype).max
    x[11, k // 2] = float("nan")
    x[12, 0] = float("inf")
    x[13, -1] = float("-inf")
    x[14] = float("nan")
    return x.to(dtype)


KINDS = ("int8", "fp8", "fp8_group")


def _check(x: torch.Tensor, kind: str, device: torch.device) -> None:
    """fp8_group is the rule of a row for each 128 of its features."""
    codes, scale = activation_codes(x.to(device), kind)
    rule = quantize_activation_int8 if kind == "int8" else quantize_activation_fp8
    parts = [rule(part) for part in (x.split(128, dim=1) if kind == "fp8_group" else [x])]
    assert_same(codes, torch.cat([part.view(torch.uint8) for part, _ in parts], 1).view(codes.dtype))
    assert_same(scale, torch.cat([part for _, part in parts], 1))


@pytest.mark.parametrize(("kind", "k", "dtype"), pairwise(KINDS, [1, 100, 128, 300, 2176], DTYPES))
def test_activations_equal_the_reference(kind, k, dtype, device):
    _check(_activations(k, dtype), kind, device)


def test_activation_int8_rounds_the_product_before_it_rounds_to_an_integer(device):
    # bf16 values in ratios of small integers to their absmax land next to ties, where a fused product would differ.
    _check(torch.randn(24, 2048, generator=torch.Generator().manual_seed(1)).bfloat16(), "int8", device)


@pytest.mark.parametrize("kind", KINDS)
def test_a_rows_codes_are_its_own_and_rows_may_be_one(kind, device):
    x = _activations(200, torch.bfloat16).to(device)
    assert_rows_are_their_own(lambda x: activation_codes(x, kind), x)
    for found, expected in zip(
        activation_codes(x[:1].expand(3, 200), kind), activation_codes(x[:1], kind), strict=True
    ):
        assert_same(found, torch.cat([expected] * 3))
