"""The Triton kernels of `qarl_kernels.quantize`, which documents what they compute."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from qarl_kernels.activation import FP8_MAX, FP8_MIN_SCALE
from qarl_kernels.casts import narrow, narrow_e4m3, widen

_INFINITY = tl.constexpr(0x7F800000)  # as bits; a NaN's magnitude bits are larger
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
# Adding it rounds |x| < 2^22 half to even and leaves the integer, in two's complement, in the low bits of the sum.
_ROUND = tl.constexpr(12_582_912.0)
_FLOAT_MAX = tl.constexpr(torch.finfo(torch.float32).max)
_INT8_MAX = tl.constexpr(127.0)
_FP8_MAX = tl.constexpr(FP8_MAX)
_FP8_MIN_SCALE = tl.constexpr(FP8_MIN_SCALE)


@triton.jit
def _stored_scale(exact, dtype: tl.constexpr, LARGEST: tl.constexpr, EPS: tl.constexpr):
    """The scale in its stored dtype, finite and nonzero."""
    stored = narrow(tl.minimum(exact, LARGEST), dtype)
    return tl.where(widen(stored) == 0.0, narrow(tl.full(exact.shape, EPS, tl.float32), dtype), stored)


@triton.jit
def magnitude_bits(x):
    """Return the bits of |x| as integers: they order like the floats, with NaN above infinity."""
    return x.to(tl.int32, bitcast=True) & _MAGNITUDE


@triton.jit
def load_eight(start, inside, column, columns, RAGGED: tl.constexpr):
    """Eight values from each pointer of `start` (T,) as two halves (T, 4); 0 outside `inside` (T, 1) and the row."""
    four = tl.arange(0, 4)[None, :]
    keep_left, keep_right = inside, inside
    if RAGGED:
        keep_left = inside & (column[:, None] + four < columns)
        keep_right = inside & (column[:, None] + 4 + four < columns)
    left = tl.load(start[:, None] + four, mask=keep_left, other=0.0)
    right = tl.load(start[:, None] + 4 + four, mask=keep_right, other=0.0)
    return left, right


@triton.jit
def largest_and_count(left, right, bad):
    """Bits of the largest of eight magnitudes, (T,); counts NaN and infinite values in `bad`."""
    left_bits, right_bits = magnitude_bits(left), magnitude_bits(right)
    largest = tl.max(tl.maximum(left_bits, right_bits), axis=1)
    count = tl.sum((left_bits >= _INFINITY).to(tl.int32) + (right_bits >= _INFINITY).to(tl.int32), axis=1)
    tl.atomic_add(bad + tl.zeros_like(count), count, mask=largest >= _INFINITY, sem="relaxed")
    return largest


@triton.jit
def _byte(x, scale, dtype: tl.constexpr):
    """The int8 or e4m3 code of each value."""
    scaled = tl.div_rn(x, scale)
    if dtype == tl.int8:
        scaled = tl.minimum(tl.maximum(scaled, -128.0), 127.0)
        return (scaled + _ROUND).to(tl.int32, bitcast=True).to(tl.int8)
    else:
        return narrow_e4m3(scaled + 0.0)  # compressed-tensors adds a zero point of +0, which turns -0 into +0


@triton.jit
def repeat_each(x, TIMES: tl.constexpr):
    """Repeat each element of x (G,) TIMES times: (G * TIMES,)."""
    return tl.reshape(tl.broadcast_to(x[:, None], [x.shape[0], TIMES]), [x.shape[0] * TIMES])


@triton.jit
def _nibbles(x, scale, zero_point, LOWEST: tl.constexpr, HIGHEST: tl.constexpr, SYMMETRIC: tl.constexpr):
    """code + 8 of each value, int32."""
    scaled = tl.div_rn(x, scale)
    if not SYMMETRIC:
        scaled += zero_point
    scaled = tl.minimum(tl.maximum(scaled, LOWEST), HIGHEST)
    return ((scaled + _ROUND).to(tl.int32, bitcast=True) + 8) & 15


@triton.jit
def int4_kernel(
    weight,  # (rows, columns) f32
    packed,  # (rows, words) i32
    scale,  # (rows, groups)
    zero_point,  # (ceil(rows / 8), groups) i32, zeros; not touched if SYMMETRIC
    bad,  # () i32, zero
    rows,
    columns,
    words,
    groups,
    stride,
    DIVISOR: tl.constexpr,
    LOWEST: tl.constexpr,
    HIGHEST: tl.constexpr,
    SCALE_MAX: tl.constexpr,
    SCALE_EPS: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    RAGGED: tl.constexpr,  # columns is not a multiple of 8: a row's last word is partly used
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    WORDS: tl.constexpr,  # words per group; of a single group rounded up to a power of two
):
    # One axis for rows, groups and words keeps adjacent threads on adjacent words and needs no layout conversion before
    # stores: the thread of a group's first word stores its scale and zero point.
    t = tl.arange(0, ROWS * GROUPS * WORDS)
    across = tl.cdiv(groups, GROUPS)
    row = (tl.program_id(0) // across * ROWS + t // (GROUPS * WORDS)).to(tl.int64)
    group = tl.program_id(0) % across * GROUPS + t // WORDS % GROUPS
    word = group * WORDS + t % WORDS
    inside = (row < rows) & (word < words)
    first = inside & (t % WORDS == 0)
    left, right = load_eight(weight + row * stride + word * 8, inside[:, None], word * 8, columns, RAGGED)
    largest = largest_and_count(left, right, bad)
    if SYMMETRIC:
        absmax = repeat_each(tl.max(tl.reshape(largest, [ROWS * GROUPS, WORDS]), axis=1), WORDS)
        exact = tl.div_rn(absmax.to(tl.float32, bitcast=True), tl.full(t.shape, DIVISOR, tl.float32))
        zero = tl.zeros_like(exact)
    else:
        low = tl.min(tl.minimum(left, right), axis=1)
        high = tl.max(tl.maximum(left, right), axis=1)
        low = tl.minimum(repeat_each(tl.min(tl.reshape(low, [ROWS * GROUPS, WORDS]), axis=1), WORDS), 0.0)
        high = tl.maximum(repeat_each(tl.max(tl.reshape(high, [ROWS * GROUPS, WORDS]), axis=1), WORDS), 0.0)
        exact = tl.div_rn(high - low, tl.full(t.shape, HIGHEST - LOWEST, tl.float32))
        zero = LOWEST - tl.div_rn(low, exact)
        # A group of zeros has a zero point of 0 / 0. Minimum and maximum would drop the NaN, so it is replaced first.
        zero = tl.minimum(tl.maximum(tl.where(zero == zero, zero, 0.0), LOWEST), HIGHEST)
        zero = (zero + _ROUND) - _ROUND
        nibble = (zero.to(tl.int32) + 8) << ((row % 8).to(tl.int32) * 4)
        tl.atomic_or(zero_point + (row // 8) * groups + group, nibble, mask=first, sem="relaxed")
    stored = _stored_scale(exact, scale.dtype.element_ty, SCALE_MAX, SCALE_EPS)
    tl.store(scale + row * groups + group, stored, mask=first)

    step = widen(stored)[:, None]
    left_nibbles = _nibbles(left, step, zero[:, None], LOWEST, HIGHEST, SYMMETRIC)
    right_nibbles = _nibbles(right, step, zero[:, None], LOWEST, HIGHEST, SYMMETRIC)
    four = tl.arange(0, 4)[None, :]
    if RAGGED:
        left_nibbles = tl.where(word[:, None] * 8 + four < columns, left_nibbles, 0)
        right_nibbles = tl.where(word[:, None] * 8 + 4 + four < columns, right_nibbles, 0)
    value = tl.sum((left_nibbles << (four * 4)) + (right_nibbles << (four * 4 + 16)), axis=1)
    tl.store(packed + row * words + word, value, mask=inside)


@triton.jit
def byte_kernel(
    weight,  # (rows, columns) f32
    codes,  # (rows, columns) i8 or e4m3
    scale,  # (programs down, programs across)
    bad,  # () i32, zero
    rows,
    columns,
    stride,
    SCALE_MAX: tl.constexpr,
    SCALE_EPS: tl.constexpr,
    RAGGED: tl.constexpr,  # columns is not a multiple of 8
    ROWS: tl.constexpr,
    EIGHTS: tl.constexpr,
):
    t = tl.arange(0, ROWS * EIGHTS)
    across = tl.cdiv(columns, EIGHTS * 8)
    row = (tl.program_id(0) // across * ROWS + t // EIGHTS).to(tl.int64)
    first = (tl.program_id(0) % across * EIGHTS + t % EIGHTS) * 8
    inside = ((row < rows) & (first < columns))[:, None]
    left, right = load_eight(weight + row * stride + first, inside, first, columns, RAGGED)
    largest = largest_and_count(left, right, bad)
    absmax = (tl.zeros([1, 1], tl.int32) + tl.max(largest, axis=0)).to(tl.float32, bitcast=True)
    divisor: tl.constexpr = 127.5 if codes.dtype.element_ty == tl.int8 else _FP8_MAX
    exact = tl.div_rn(absmax, tl.full([1, 1], divisor, tl.float32))
    stored = _stored_scale(exact, scale.dtype.element_ty, SCALE_MAX, SCALE_EPS)
    tl.store(scale + tl.program_id(0) + tl.zeros([1, 1], tl.int32), stored)
    step = widen(stored)
    code = tl.join(_byte(left, step, codes.dtype.element_ty), _byte(right, step, codes.dtype.element_ty))
    code = tl.reshape(tl.permute(code, [0, 2, 1]), [ROWS * EIGHTS, 8])
    eight = tl.arange(0, 8)[None, :]
    if RAGGED:
        inside = inside & (first[:, None] + eight < columns)
    tl.store((codes + row * columns + first)[:, None] + eight, code, mask=inside)


@triton.jit
def activation_step(absmax, dtype: tl.constexpr):
    """Return (scale, factor) of each absmax; `activation_code` multiplies int8 by the factor, and divides FP8 by it."""
    if dtype == tl.int8:
        limit = tl.full(absmax.shape, _INT8_MAX, tl.float32)
        step = tl.div_rn(absmax, limit)
        factor = tl.minimum(tl.div_rn(limit, absmax), _FLOAT_MAX)
    else:
        step = tl.div_rn(absmax, tl.full(absmax.shape, _FP8_MAX, tl.float32))
        step = tl.maximum(step, _FP8_MIN_SCALE, propagate_nan=tl.PropagateNan.ALL)
        factor = step
    return step, factor


@triton.jit
def activation_code(value, absmax, factor, dtype: tl.constexpr):
    """The int8 or e4m3 code of each value (T, VECTOR); absmax and factor (T,)."""
    if dtype == tl.int8:
        # The minimum changes no value (see qarl_kernels.activation); it keeps product and sum from being fused.
        product = tl.minimum(value * factor[:, None], _INT8_MAX)
        code = (product + _ROUND).to(tl.int32, bitcast=True).to(tl.int8)
        # In a row with NaN or inf the products are NaN, which converts to 0.
        code = tl.where((absmax <= _FLOAT_MAX)[:, None], code, 0)
    else:
        code = narrow_e4m3(tl.div_rn(value, factor[:, None]))
    return code


@triton.jit(do_not_specialize=["rows"])
def activation_kernel(
    x,  # (rows, columns) bf16, fp16 or f32
    codes,  # (rows, columns) i8 or e4m3
    scale,  # (rows, groups) f32
    rows,
    columns,
    groups,
    stride,
    RAGGED: tl.constexpr,  # columns is not a multiple of VECTOR
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    VECTORS: tl.constexpr,  # vectors per scale; of a single group rounded up to a power of two
    VECTOR: tl.constexpr,  # values in 16 bytes
):
    t = tl.arange(0, ROWS * GROUPS * VECTORS)
    across = tl.cdiv(groups, GROUPS)  # programs per row; one grid axis, because the second is limited to 65,535
    row = (tl.program_id(0) // across * ROWS + t // (GROUPS * VECTORS)).to(tl.int64)
    group = tl.program_id(0) % across * GROUPS + t // VECTORS % GROUPS
    first = (group * VECTORS + t % VECTORS) * VECTOR
    lane = tl.arange(0, VECTOR)[None, :]
    inside = (row < rows) & (first < columns)
    keep = inside[:, None]
    if RAGGED:
        keep = keep & (first[:, None] + lane < columns)
    value = widen(tl.load((x + row * stride + first)[:, None] + lane, mask=keep, other=0.0))
    largest = tl.max(magnitude_bits(value), axis=1)
    largest = repeat_each(tl.max(tl.reshape(largest, [ROWS * GROUPS, VECTORS]), axis=1), VECTORS)
    absmax = largest.to(tl.float32, bitcast=True)
    dtype: tl.constexpr = codes.dtype.element_ty
    step, factor = activation_step(absmax, dtype)
    code = activation_code(value, absmax, factor, dtype)
    tl.store(scale + row * groups + group, step, mask=inside & (t % VECTORS == 0))
    tl.store((codes + row * columns + first)[:, None] + lane, code, mask=keep)
