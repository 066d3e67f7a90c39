"""Dequantizing kernels against the plain-torch function and its formula, bit for bit."""

import pytest
import torch
from kernel_harness import NEEDS_TRITON, QUIET, assert_same
from pairwise import pairwise
from qarl_formats.registry import make_scheme
from qarl_formats.weight import LowBitWeight
from qarl_kernels.dequantize import dequantize_bytes, dequantize_int4
from qarl_kernels.nvfp4_weights import quantize_nvfp4
from qarl_kernels.tile import tile_int4, untile_int4

pytestmark = [NEEDS_TRITON, QUIET, pytest.mark.usefixtures("poisoned")]

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def _scales(n: int, groups: int, dtype: torch.dtype) -> torch.Tensor:
    """Positive scales of many sizes, subnormal ones too; products overflow fp16 at times."""
    generator = torch.Generator().manual_seed(n + groups)
    scale = torch.rand(n, groups, generator=generator) * torch.logspace(-9, 4, n)[:, None]
    scale[:1] = torch.finfo(dtype).smallest_normal / 4
    return scale.to(dtype)


def _words(n: int, columns: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31, (n, columns), generator=generator).to(torch.int32)


INT4 = [(37, 96, 32), (5, 192, 64), (3, 2176, 128), (9, 100, -1), (5, 4104, -1), (2, 1, -1)]


@pytest.mark.parametrize(("shape", "scale_dtype", "symmetric", "dtype"), pairwise(INT4, DTYPES, [True, False], DTYPES))
def test_int4_equals_the_reference(shape, scale_dtype, symmetric, dtype, device):
    n, k, group = shape
    scheme = make_scheme("w4a16", group, symmetric, scale_dtype=str(scale_dtype)[6:])
    groups = scheme.num_groups(k)
    tensors = {"weight_packed": _words(n, -(-k // 8), 0), "weight_scale": _scales(n, groups, scale_dtype)}
    if not symmetric:
        tensors["weight_zero_point"] = _words(-(-n // 8), groups, 1)
    expected = LowBitWeight(scheme, tensors, (n, k)).dequantize(dtype)
    packed, scale, zero_point = (
        tensors[name].to(device) if name in tensors else None
        for name in ("weight_packed", "weight_scale", "weight_zero_point")
    )
    weight = dequantize_int4(packed, scale, zero_point, k, dtype)
    assert_same(weight, expected)


def _all_codes(n: int, k: int, dtype: torch.dtype) -> torch.Tensor:
    """Every int8 or every finite e4m3 code, from the first on, again and again."""
    codes = torch.arange(256, dtype=torch.uint8)
    if dtype == torch.float8_e4m3fn:
        codes = codes[(codes & 0x7F) != 0x7F]
    return codes.repeat(n * k // len(codes) + 1)[: n * k].view(n, k).view(dtype)


@pytest.mark.parametrize(
    ("shape", "codes_dtype", "scale_dtype", "dtype"),
    pairwise([(37, 100), (3, 2064), (0, 32)], [torch.int8, torch.float8_e4m3fn], DTYPES, DTYPES),
)
def test_channel_is_code_times_scale_rounded_once(shape, codes_dtype, scale_dtype, dtype, device):
    n, k = shape
    codes, scale = _all_codes(n, k, codes_dtype), _scales(n, 1, scale_dtype)
    weight = dequantize_bytes(codes.to(device), scale.to(device), dtype)
    assert_same(weight, (codes.float() * scale.float()).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), [(5, 100), (130, 300), (256, 128)])
def test_fp8_block_is_code_times_the_blocks_scale_rounded_once(n, k, dtype, device):
    codes, scale = _all_codes(n, k, torch.float8_e4m3fn), _scales(-(-n // 128), -(-k // 128), torch.float32)
    weight = dequantize_bytes(codes.to(device), scale.to(device), dtype, True)
    spread = scale.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
    assert_same(weight, (codes.float() * spread).to(dtype))


def test_no_rows_give_empty_weights(device):
    packed = torch.zeros(0, 4, dtype=torch.int32, device=device)
    scale = torch.zeros(0, 1, dtype=torch.bfloat16, device=device)
    assert dequantize_int4(packed, scale, None, 32, torch.bfloat16).shape == (0, 32)
    tiled = tile_int4(packed, 32)
    assert tiled.shape == (0, 1, 16, 16) and untile_int4(tiled, 0, 32).shape == (0, 4)
    packed, scale, bad = quantize_nvfp4(torch.zeros(0, 32, device=device), torch.ones(1, device=device))
    assert packed.shape == (0, 16) and scale.shape == (0, 2) and bad.item() == 0
