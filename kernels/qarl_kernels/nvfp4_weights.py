"""Triton kernels that quantize masters to NVFP4 and dequantize stored NVFP4 weights.

Bit-equal to `qarl_formats.nvfp4.quantize_nvfp4`, and to `dequantized_nvfp4` and `scaled_codes` of `qarl_kernels.nvfp4`.
A thread takes eight adjacent values, half of a group: one word of codes, 16 bytes of bf16 or fp16.

Scales are bytes here, converted by integer arithmetic and through fp16, because GPUs before sm_89 have no e4m3.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from qarl_kernels.casts import narrow
from qarl_kernels.dequantize import check_stored
from qarl_kernels.integers import cdiv
from qarl_kernels.launch import launch
from qarl_kernels.nvfp4 import GROUP
from qarl_kernels.quantize_kernels import largest_and_count, load_eight, repeat_each

_ZERO_SCALE = tl.constexpr(0x20)  # 0.125 in e4m3
WORDS = 256  # per program, one in each thread


@triton.jit
def _e4m3_value(byte):
    """Nonnegative e4m3 bits -> float32. An fp16 has the same layout, with an exponent bias that is 8 larger."""
    return (byte.to(tl.int32) << 7).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@triton.jit
def _e4m3_byte(x):
    """float32 in [0, 448] -> i32, the bits of the nearest e4m3, ties to even; see `casts.narrow_e4m3`."""
    bits = x.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    small = (x + 16384.0).to(tl.int32, bitcast=True) - 0x46800000  # an ulp of 2^14 is e4m3's step below 2^-6
    return tl.where(x < 0.015625, small, normal)


@triton.jit
def dequantize_kernel(
    packed,  # (rows, words) i32
    scale,  # (rows, words / 2) u8
    global_scale,  # (1,) f32; not read unless DIVIDED
    out,  # (rows, words * 8) bf16, fp16 or f32
    total,  # words in all
    DIVIDED: tl.constexpr,
    WORDS: tl.constexpr,
):
    word = tl.program_id(0).to(tl.int64) * WORDS + tl.arange(0, WORDS)
    inside = word < total
    value = tl.load(packed + word, mask=inside, other=0)[:, None]
    step = _e4m3_value(tl.load(scale + word // 2, mask=inside, other=0))
    if DIVIDED:
        step = tl.div_rn(step, tl.zeros_like(step) + tl.load(global_scale))
    eight = tl.arange(0, 8)[None, :]
    nibble = value >> (eight * 4)
    # An e2m1 nibble has the sign, exponent and mantissa of an fp16 whose bias is 14 larger; subnormals agree too.
    half = (((nibble & 8) << 12) | ((nibble & 7) << 9)).to(tl.int16).to(tl.float16, bitcast=True)
    code = half.to(tl.float32) * 16384.0
    tl.store(
        (out + word * 8)[:, None] + eight, narrow(code * step[:, None], out.dtype.element_ty), mask=inside[:, None]
    )


@triton.jit
def _codes(x, step):
    """The e2m1 code of each value, i32: the number of midpoints below it, ties to the even mantissa."""
    quotient = tl.div_rn(x, tl.zeros_like(x) + step)
    size = tl.abs(quotient)
    code = (size > 0.25).to(tl.int32) + (size >= 0.75).to(tl.int32) + (size > 1.25).to(tl.int32)
    code += (size >= 1.75).to(tl.int32) + (size > 2.5).to(tl.int32) + (size >= 3.5).to(tl.int32)
    code += (size > 5.0).to(tl.int32)
    return code | tl.where(quotient < 0.0, 8, 0)


@triton.jit
def quantize_kernel(
    weight,  # (rows, columns) f32
    global_scale,  # (1,) f32
    packed,  # (rows, words) i32
    scale,  # (rows, words / 2) u8
    bad,  # () i32, zero
    columns,
    words,
    total,  # words in all
    stride,
    WORDS: tl.constexpr,
):
    word = tl.program_id(0).to(tl.int64) * WORDS + tl.arange(0, WORDS)
    inside = word < total
    column = word % words * 8
    start = weight + word // words * stride + column
    left, right = load_eight(start, inside[:, None], column, columns, False)
    largest = tl.reshape(largest_and_count(left, right, bad), [WORDS // 2, 2])
    absmax = repeat_each(tl.max(largest, axis=1), 2).to(tl.float32, bitcast=True)
    divisor = tl.load(global_scale)
    exact = tl.div_rn(absmax, tl.full([WORDS], 6.0, tl.float32)) * divisor
    byte = _e4m3_byte(tl.minimum(exact, 448.0))
    byte = tl.where(byte == 0, _ZERO_SCALE, byte)
    tl.store(scale + word // 2, byte.to(tl.uint8), mask=inside & (word % 2 == 0))
    stored = _e4m3_value(byte)
    step = tl.div_rn(stored, tl.zeros_like(stored) + divisor)[:, None]
    four = tl.arange(0, 4)[None, :] * 4
    value = tl.sum((_codes(left, step) << four) + (_codes(right, step) << (four + 16)), axis=1)
    tl.store(packed + word, value, mask=inside)


@torch.no_grad()
def quantize_nvfp4(weight: Tensor, global_scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize a master weight.

    Args:
        weight: float32 [N, K], rows contiguous, K a multiple of 16.
        global_scale: float32 [1], a divisor, on the same device.

    Returns:
        weight_packed: uint8 [N, K / 2]. weight_scale: float8_e4m3fn [N, K / 16].
        bad: int32 [], on the device, the number of NaN and infinite values; unless 0, the rest is meaningless.

    Raises:
        ValueError: weight is not such a matrix.
    """
    if weight.dtype != torch.float32 or weight.ndim != 2 or weight.shape[1] % GROUP or weight.stride(1) != 1:
        raise ValueError(
            f"weight must be a float32 matrix with contiguous rows, a multiple of 16 long, not {weight.dtype} "
            f"{tuple(weight.shape)} of strides {weight.stride()}"
        )
    n, k = weight.shape
    packed = torch.empty(n, k // 2, dtype=torch.uint8, device=weight.device)
    scale = torch.empty(n, k // GROUP, dtype=torch.float8_e4m3fn, device=weight.device)
    bad = torch.zeros((), dtype=torch.int32, device=weight.device)
    launch(
        quantize_kernel,
        (cdiv(n * k // 8, WORDS),),
        num_warps=8,
        weight=weight,
        global_scale=global_scale,
        packed=packed.view(torch.int32),
        scale=scale.view(torch.uint8),
        bad=bad,
        columns=k,
        words=k // 8,
        total=n * k // 8,
        stride=weight.stride(0),
        WORDS=WORDS,
    )
    return packed, scale, bad


@torch.no_grad()
def dequantize_nvfp4(packed: Tensor, scale: Tensor, global_scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Dequantize NVFP4 tensors to `dtype` (bfloat16, float16 or float32) [N, K].

    packed: uint8 [N, K / 2]; scale: float8_e4m3fn [N, K / 16]; global_scale: float32 [1], a divisor; all contiguous.
    Without global_scale the result is code * scale, exact in every `dtype`. Raises ValueError if dtypes or shapes do
    not fit each other.
    """
    n, groups = scale.shape
    check_stored("weight_packed", packed, (torch.uint8,), (n, 8 * groups))
    check_stored("weight_scale", scale, (torch.float8_e4m3fn,), (n, groups))
    if global_scale is not None:
        check_stored("weight_global_scale", global_scale, (torch.float32,), (1,))
    out = torch.empty(n, groups * GROUP, dtype=dtype, device=packed.device)
    launch(
        dequantize_kernel,
        (cdiv(2 * n * groups, WORDS),),
        num_warps=8,
        packed=packed.view(torch.int32),
        scale=scale.view(torch.uint8),
        global_scale=global_scale,
        out=out,
        total=2 * n * groups,
        DIVIDED=global_scale is not None,
        WORDS=WORDS,
    )
    return out
