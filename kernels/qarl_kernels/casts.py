"""Conversions between float32 and the stored float types, bit-identical on a GPU and in Triton's interpreter.

GPUs have instructions for this, but before Hopper, Triton 3.6 converts to e4m3 through a truncated fp16. The
interpreter (Triton 3.9) rounds bf16 and e4m3 ties away from zero and loses bf16 subnormals and the NaN of e4m3, so
there integer arithmetic computes the results.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq

from qarl_kernels.launch import INTERPRETED

_INTERPRETED = tl.constexpr(INTERPRETED)
_BY_FP16 = tl.constexpr(tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9))  # seen in 3.6, not in 3.9


@triton.jit
def widen(x):
    """bf16, fp16, e4m3 or fp32 -> fp32, exact."""
    if x.dtype == tl.bfloat16:
        # Not `.to`: LLVM turns half(float(half) * float(bf16)) into a half product; small scales become 0 (seen, H100).
        return (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    if _INTERPRETED and x.dtype == tl.float8e4nv:
        code = x.to(tl.uint8, bitcast=True)
        return tl.where((code & 0x7F) == 0x7F, float("nan"), x.to(tl.float32))
    return x.to(tl.float32)


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """fp32 -> bf16, fp16 or fp32, to nearest even."""
    if _INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(x == x, rounded, 0x7FC0).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(dtype)


@triton.jit
def narrow_e4m3(x):
    """fp32 -> e4m3, to nearest even, saturated to +-448; NaN stays NaN."""
    x = tl.clamp(x, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    if _INTERPRETED:
        bits = x.to(tl.uint32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
        # 2^14 has an ulp of 2^-9, the step of e4m3 below 2^-6: the sum's low bits are the code.
        small = (magnitude.to(tl.float32, bitcast=True) + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
        code = tl.where(magnitude < 0x3C800000, small, normal)
        code = tl.where(x == x, code, 0x7F) | ((bits >> 24) & 0x80)
        return code.to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    if _BY_FP16 and not cuda_capability_geq(9, 0):
        x = odd_fp16(x)
    return x.to(tl.float8e4nv)


@triton.jit
def odd_fp16(x):
    """Make x round to e4m3 correctly through a truncated fp16: the truncated bits set the last bit that stays.

    For x in e4m3's range; everything below fp16's normal numbers rounds to 0.
    """
    bits = x.to(tl.uint32, bitcast=True)
    return (bits | (((bits & 0x1FFF) + 0x1FFF) & 0x2000)).to(tl.float32, bitcast=True)


@triton.jit
def round_e4m3(x, dtype: tl.constexpr):
    """bf16, fp16 or fp32 -> the nearest e4m3, as `dtype` (16-bit, or e4m3 itself), which holds it exactly."""
    code = narrow_e4m3(widen(x))
    if dtype == tl.float8e4nv:
        return code
    elif _INTERPRETED:
        return narrow(widen(code), dtype)
    else:
        return code.to(dtype)


@triton.jit
def round_pairs(low, high):
    """bf16, fp16 or fp32 -> int16 with the nearest e4m3 of both, `low` in the low byte; saturated to +-448.

    One instruction makes both. Codes that are made separately and then joined come out wrong: if a thread holds four,
    ptxas 12.8 and 12.9 turn every other one into 0 (seen, H200).
    """
    if _INTERPRETED:
        low_code = narrow_e4m3(widen(low)).to(tl.uint8, bitcast=True).to(tl.uint16)
        high_code = narrow_e4m3(widen(high)).to(tl.uint8, bitcast=True).to(tl.uint16)
        return (low_code | (high_code << 8)).to(tl.int16, bitcast=True)
    else:
        return tl.inline_asm_elementwise(
            "cvt.rn.satfinite.e4m3x2.f32 $0, $2, $1;",
            "=h,f,f",
            [widen(low), widen(high)],
            dtype=tl.int16,
            is_pure=True,
            pack=1,
        )


def _instructions(apart: str, kind: str, mask: str, factor: str) -> str:
    """PTX that widens the four e4m3 of register $2 to two 16-bit values each in $0 and $1.

    apart: Instructions that move the signs to `low_sign` and `high_sign`, and exponents and mantissas to `low` and
    `high`, into their bit positions in `kind`. mask: Clears the other bits of `low` and `high`. factor: 2 to the
    difference of the exponent biases, twice.
    """
    return f"""{{
        .reg .b32 low, high, low_sign, high_sign, factor, zero;
        {apart}
        and.b32 low, low, {mask};
        and.b32 high, high, {mask};
        or.b32 low, low, low_sign;
        or.b32 high, high, high_sign;
        mov.b32 factor, {factor};
        mov.b32 zero, 0x80008000;
        fma.rn.{kind} $0, low, factor, zero;
        fma.rn.{kind} $1, high, factor, zero;
        }}"""


def _of_pairs(down: int, kind: str, mask: str, factor: str) -> str:
    """PTX for `widen_pairs`. down: Bits between a code's place in the upper byte and its place in the result."""
    apart = f"""shl.b32 low_sign, $2, 8;
        shl.b32 low, $2, {8 - down};
        shr.b32 high, $2, {down};
        and.b32 low_sign, low_sign, 0x80008000;
        and.b32 high_sign, $2, 0x80008000;"""
    return _instructions(apart, kind, mask, factor)


_IN_ORDER = """prmt.b32 low, $2, 0, 0x1404;
        prmt.b32 high, $2, 0, 0x3424;
        and.b32 low_sign, low, 0x80008000;
        and.b32 high_sign, high, 0x80008000;
        shr.b32 low, low, 4;
        shr.b32 high, high, 4;"""
# Avoids the conversion instructions to bf16, which go through fp32.
_E4M3_AS_BF16 = tl.constexpr(_instructions(_IN_ORDER, "bf16x2", "0x07F007F0", "0x7B807B80"))  # times 2^120
_E4M3_AS_FP16 = tl.constexpr("""{
        .reg .b16 low, high;
        mov.b32 {low, high}, $2;
        cvt.rn.f16x2.e4m3x2 $0, low;
        cvt.rn.f16x2.e4m3x2 $1, high;
        }""")
_PAIRS_AS_BF16 = tl.constexpr(_of_pairs(4, "bf16x2", "0x07F007F0", "0x7B807B80"))
_PAIRS_AS_FP16 = tl.constexpr(_of_pairs(1, "f16x2", "0x3F803F80", "0x5C005C00"))  # times 2^8


@triton.jit
def widen_e4m3(x, dtype: tl.constexpr):
    """e4m3 -> bf16 or fp16, exact, but NaN may become 480 of the same sign. Other dtypes are returned unchanged.

    A product of the result must be summed like one of loaded 16-bit values, so the assembly is not pure: through pure
    code Triton sees that 8 bits were loaded, and lets a warp's tensor core add other features together than for 16-bit
    keys and values, which sometimes changes bits (seen, H200).
    """
    if x.dtype != tl.float8e4nv:
        return x
    elif _INTERPRETED:
        return narrow(widen(x), dtype)
    else:
        wide = tl.inline_asm_elementwise(
            _E4M3_AS_BF16 if dtype == tl.bfloat16 else _E4M3_AS_FP16,
            "=r,=r,r",
            [x.to(tl.uint8, bitcast=True)],
            dtype=tl.int16,
            is_pure=False,
            pack=4,
        )
        return wide.to(dtype, bitcast=True)


@triton.jit
def widen_pairs(x, dtype: tl.constexpr):
    """int16 that hold two e4m3 each -> the low and the high ones as bf16 or fp16, exact, but NaN may become +-480.

    Pure: Triton sees that 16 bits were loaded, so the order of sums is right, and may move this behind a product
    operand's loads from shared memory.
    """
    if _INTERPRETED:
        low = (x & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
        high = ((x >> 8) & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
        return narrow(widen(low), dtype), narrow(widen(high), dtype)
    else:
        low, high = tl.inline_asm_elementwise(
            _PAIRS_AS_BF16 if dtype == tl.bfloat16 else _PAIRS_AS_FP16,
            "=r,=r,r",
            [x],
            dtype=(tl.int16, tl.int16),
            is_pure=True,
            pack=2,
        )
        return low.to(dtype, bitcast=True), high.to(dtype, bitcast=True)
