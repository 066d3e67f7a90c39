"""Triton kernels of the FP8 backward; `qarl_kernels.fp8_backward` launches and documents them."""

from __future__ import annotations

import triton
import triton.language as tl

from qarl_kernels.activation import FP8_MAX
from qarl_kernels.blocks import product_tile, split_columns, tile_of
from qarl_kernels.casts import narrow_e4m3, widen
from qarl_kernels.quantize_kernels import magnitude_bits

_FP8_MAX = tl.constexpr(FP8_MAX)
_MIN_STEP = tl.constexpr(2.0**-120)  # has a finite reciprocal; far below the limit for activations: gradients are small


@triton.jit
def _step(bits):
    """Return the scale of values whose largest magnitude has these bits; not finite if that magnitude is not."""
    absmax = bits.to(tl.float32, bitcast=True)
    step = tl.div_rn(absmax, tl.full(bits.shape, _FP8_MAX, tl.float32))
    return tl.maximum(step, _MIN_STEP, propagate_nan=tl.PropagateNan.ALL)


@triton.jit(do_not_specialize=["rows"])
def extents_kernel(
    x,  # (rows, columns) bf16, fp16 or e4m3
    factor,  # (columns,) f32, multiplies the values for row codes; None unless FACTOR
    row_bits,  # (rows,) i32 zeros; receives the bits of each row's largest magnitude if ROW
    column_bits,  # (columns,) i32 zeros; the same of columns, without the factor
    rows,
    columns,
    stride,
    ROW: tl.constexpr,
    FACTOR: tl.constexpr,
    STRIP: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    if FACTOR:
        multiplier = tl.load(factor + c, mask=c < columns, other=0.0)[None, :]
    largest = tl.zeros([BLOCK_R, BLOCK_C], tl.int32)
    for start in range(0, STRIP, BLOCK_R):
        r = tl.program_id(1) * STRIP + start + tl.arange(0, BLOCK_R)
        inside = (r < rows)[:, None] & (c < columns)[None, :]
        value = widen(tl.load(x + r.to(tl.int64)[:, None] * stride + c[None, :], mask=inside, other=0.0))
        largest = tl.maximum(largest, magnitude_bits(value))
        if ROW:
            if FACTOR:
                value = value * multiplier
            tl.atomic_max(row_bits + r, tl.max(magnitude_bits(value), axis=1), mask=r < rows, sem="relaxed")
    tl.atomic_max(column_bits + c, tl.max(largest, axis=0), mask=c < columns, sem="relaxed")


@triton.jit(do_not_specialize=["rows"])
def codes_kernel(
    x,  # (rows, columns) bf16, fp16 or e4m3
    factor,  # (columns,) f32; None unless FACTOR
    row_bits,  # (rows,) i32
    column_bits,  # (columns,) i32
    row_codes,  # (rows, columns) e4m3, row stride `row_pitch`
    row_scale,  # (rows,) f32
    column_codes,  # (columns, rows) e4m3, row stride `column_pitch`, a multiple of BLOCK_R and at least `rows`
    column_scale,  # (columns,) f32
    rows,
    columns,
    stride,
    row_pitch,
    column_pitch,
    ROW: tl.constexpr,
    FACTOR: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    r = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    wide = r.to(tl.int64)[:, None]
    inside = (r < rows)[:, None] & (c < columns)[None, :]
    value = widen(tl.load(x + wide * stride + c[None, :], mask=inside, other=0.0))
    step = _step(tl.load(column_bits + c, mask=c < columns, other=0))
    code = narrow_e4m3(value * tl.div_rn(tl.full(step.shape, 1.0, tl.float32), step)[None, :])
    # No mask on rows: the padding takes the zeros, and a mask would turn vector stores into byte stores.
    at = column_codes + c.to(tl.int64)[:, None] * column_pitch + r[None, :]
    tl.store(at, tl.trans(code), mask=(c < columns)[:, None])
    if tl.program_id(1) == 0:
        tl.store(column_scale + c, step, mask=c < columns)
    if ROW:
        if FACTOR:
            value = value * tl.load(factor + c, mask=c < columns, other=0.0)[None, :]
        step = _step(tl.load(row_bits + r, mask=r < rows, other=0))
        code = narrow_e4m3(value * tl.div_rn(tl.full(step.shape, 1.0, tl.float32), step)[:, None])
        tl.store(row_codes + wide * row_pitch + c[None, :], code, mask=inside)
        if tl.program_id(0) == 0:
            tl.store(row_scale + r, step, mask=r < rows)


@triton.jit
def transpose_kernel(
    x,  # (rows, columns) e4m3
    out,  # (columns, rows) e4m3, row stride `pitch`, a multiple of BLOCK_R and at least `rows`
    rows,
    columns,
    stride,
    pitch,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    r = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = (r < rows)[:, None] & (c < columns)[None, :]
    code = tl.load(x + r.to(tl.int64)[:, None] * stride + c[None, :], mask=inside, other=0.0)
    tl.store(out + c.to(tl.int64)[:, None] * pitch + r[None, :], tl.trans(code), mask=(c < columns)[:, None])


@triton.jit
def _add_halves(y, into, s_a, s_b, rm, n, M, N, stride):
    left, right = split_columns(y)
    _add(left, into, s_a, s_b, rm, n, M, N, stride)
    _add(right, into, s_a, s_b, rm, n + left.shape[1], M, N, stride)


@triton.jit
def _add(y, into, s_a, s_b, rm, n, M, N, stride):
    rn = n + tl.arange(0, y.shape[1])
    y = y * tl.load(s_b + rn, mask=rn < N, other=0.0)[None, :]
    y *= tl.load(s_a + rm, mask=rm < M, other=0.0)[:, None]
    at = into + rm.to(tl.int64)[:, None] * stride + rn[None, :]
    inside = (rm < M)[:, None] & (rn < N)[None, :]
    tl.store(at, tl.load(at, mask=inside, other=0.0) + y, mask=inside)


@triton.jit
def add_product_kernel(
    a,  # (M, K) e4m3 or its descriptor
    b,  # (N, K) e4m3 or its descriptor
    into,  # (M, N) f32
    s_a,  # (M,) f32
    s_b,  # (N,) f32
    M,
    N,
    K,
    stride_a,
    stride_b,
    stride_into,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TMA: tl.constexpr,
):
    """into += (a @ b^T) * s_a * s_b, with one chain of tensor-core products over K.

    `into` is read and written a few columns at a time: registers cannot hold a second float32 tile.
    """
    pid_m, pid_n = tile_of(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N))
    m = pid_m * BLOCK_M
    n = pid_n * BLOCK_N
    steps = tl.cdiv(K, BLOCK_K)
    acc = product_tile(a, b, m, n, M, N, K, steps, stride_a, stride_b, BLOCK_M, BLOCK_N, BLOCK_K, TMA)
    rm = m + tl.arange(0, BLOCK_M)
    if BLOCK_N == 256:
        left, right = split_columns(acc)
        _add_halves(left, into, s_a, s_b, rm, n, M, N, stride_into)
        _add_halves(right, into, s_a, s_b, rm, n + 128, M, N, stride_into)
    else:
        _add_halves(acc, into, s_a, s_b, rm, n, M, N, stride_into)
