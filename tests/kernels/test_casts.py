"""Rounding to e4m3 through fp16, as Triton 3.6 does on GPUs before Hopper; and pairs of e4m3."""

import pytest
import torch
import triton
import triton.language as tl
from kernel_harness import NEEDS_TRITON
from qarl_kernels.casts import odd_fp16, round_pairs, widen_pairs
from qarl_kernels.launch import launch
from torch import Tensor

pytestmark = NEEDS_TRITON


@triton.jit
def odd_kernel(x, out, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, odd_fp16(tl.load(x + at)))


@triton.jit
def pairs_kernel(x, low, high, again, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    first, second = widen_pairs(tl.load(x + at), low.dtype.element_ty)
    tl.store(low + at, first)
    tl.store(high + at, second)
    tl.store(again + at, round_pairs(first, second))


def by_fp16(x: Tensor) -> Tensor:
    """float32 -> e4m3 as `cvt.rz.f16.f32` and `cvt.rn.satfinite.e4m3x2.f16x2` do it, above fp16's subnormals."""
    cut = (x.view(torch.int32) & ~0x1FFF).view(torch.float32).half()
    return cut.clamp(-448, 448).to(torch.float8_e4m3fn)


def odd(x: Tensor, device: torch.device) -> Tensor:
    given = x.to(device)
    out = torch.empty_like(given)
    launch(odd_kernel, (len(x) // 1024,), x=given, out=out, BLOCK=1024)
    return out.cpu()


def test_nothing_that_is_cut_off_is_forgotten(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    codes = codes[codes.isfinite()].sort().values
    ties = (codes[1:] + codes[:-1]) / 2
    near = torch.cat([codes, ties, ties.nextafter(codes[1:]), ties.nextafter(codes[:-1])])
    x = torch.cat([near, torch.randn(8192 - len(near), generator=generator) * 100]).clamp(-448, 448)
    exact = x.to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(by_fp16(odd(x, device)).view(torch.uint8), exact)
    assert (by_fp16(x).view(torch.uint8) != exact).sum() > 100, "what is cut off matters"
    assert odd(torch.full((1024,), torch.nan), device).isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_pairs_of_e4m3_are_widened_and_rounded(device: torch.device, dtype: torch.dtype) -> None:
    codes = torch.arange(2**16).view(256, 256).transpose(0, 1).reshape(-1, 1)  # neighbours differ in both bytes
    bytes_ = torch.cat([codes % 256, codes // 256], 1).to(torch.uint8)
    words = bytes_.view(torch.int16)[:, 0].to(device)
    low, high = (torch.empty(2**16, dtype=dtype, device=device) for _ in "ab")
    again = torch.empty_like(words)
    launch(pairs_kernel, (64,), x=words, low=low, high=high, again=again, BLOCK=1024)
    both = torch.stack([low, high], 1).cpu()
    expected = bytes_.view(torch.float8_e4m3fn).to(dtype)
    nan = expected.isnan()
    assert torch.equal(both[~nan].view(torch.int16), expected[~nan].view(torch.int16))
    assert (both[nan].isnan() | (both[nan].abs() == 480)).all()
    whole = ~nan.any(1)
    assert torch.equal(again.cpu()[whole], words.cpu()[whole])
