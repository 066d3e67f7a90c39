"""Kernels that quantize and dequantize NVFP4 against the plain-torch functions, bit for bit."""

import pytest
import torch
from hard_weights import NVFP4, normal
from kernel_harness import NEEDS_TRITON, QUIET, assert_same
from nvfp4_products import Nvfp4
from qarl_formats import nvfp4 as formats
from qarl_kernels import nvfp4
from qarl_kernels.nvfp4_weights import dequantize_nvfp4, quantize_nvfp4

pytestmark = [NEEDS_TRITON, QUIET, pytest.mark.usefixtures("poisoned")]

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("case", [*NVFP4, "one group", "ragged"])
def test_quantized_equals_the_reference(case, device):
    parts = {"one group": normal(0)[:1, :16], "ragged": normal(0)[:7, :208]}
    weight = (NVFP4 | parts)[case].contiguous()
    divisor = formats.global_scale_of([formats.absmax_of(weight)])
    packed, scale, bad = quantize_nvfp4(weight.to(device), divisor.to(device))
    expected = formats.quantize_nvfp4(weight, divisor)
    assert_same(packed, expected[0])
    assert_same(scale, expected[1])
    assert bad.item() == 0


def test_quantized_under_a_given_global_scale_equals_the_reference(device):
    """A smaller absmax's: scales are clamped to 448, codes to 6. Rows with NaN between them."""
    weight, divisor = torch.full((24, 300), torch.nan, device=device), formats.global_scale_of([torch.tensor(0.3)])
    weight[:, :256] = normal(0)
    packed, scale, bad = quantize_nvfp4(weight[:, :256], divisor.to(device))
    expected = formats.quantize_nvfp4(normal(0), divisor)
    assert bad.item() == 0
    assert_same(packed, expected[0])
    assert_same(scale, expected[1])


def test_values_that_are_not_finite_are_counted(device):
    weight = torch.randn(9, 64, generator=torch.Generator().manual_seed(3))
    for place, value in (((0, 0), "nan"), ((4, 33), "inf"), ((8, 63), "-inf"), ((8, 62), "nan")):
        weight[place] = float(value)
    assert quantize_nvfp4(weight.to(device), torch.ones(1, device=device))[2].item() == 4


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(37, 80), (1, 16), (3, 4128), (0, 32)])
def test_dequantized_equals_the_reference(shape, dtype, device):
    weight = Nvfp4.random(*shape, device=device)
    values = dequantize_nvfp4(*weight.stored(), dtype)
    scaled = dequantize_nvfp4(weight.packed, weight.scale, None, dtype)
    packed, scale, divisor = (tensor.cpu() for tensor in weight.stored())
    for made, expected in (
        (values, nvfp4.dequantized_nvfp4(packed, scale, divisor, dtype)),
        (scaled, nvfp4.scaled_codes(packed, scale).to(dtype)),
    ):
        assert made.dtype == dtype
        bits = torch.int32 if dtype == torch.float32 else torch.int16  # so that +0 and -0 differ
        assert torch.equal(made.cpu().view(bits), expected.view(bits))
