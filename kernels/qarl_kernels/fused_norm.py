"""Residual addition, RMSNorm and the quantization after it in one kernel, and the gradient.

Values are rounded where `qarl_kernels.pointwise.rms_norm` on 16-bit tensors rounds them: after the residual addition,
after the normalization, and after the product with the weight. A row's bits depend on that row alone, and are the same
with or without a residual or a quantization.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from qarl_kernels.casts import narrow, widen
from qarl_kernels.integers import cdiv
from qarl_kernels.launch import launch
from qarl_kernels.quantize_kernels import repeat_each
from qarl_kernels.rows import (
    VECTOR,
    Activation,
    backward_tile,
    check_rows,
    empty_codes,
    inside,
    load_chunks,
    row_sum,
    row_tile,
    store_chunks,
    store_codes,
)
from qarl_kernels.token_sums import add_partial_sums

AGAIN_VECTORS, AGAIN_WARPS = 256, 4
# Programs of the backward, each for many rows: four per multiprocessor of a Hopper GPU. The partial sums of the
# weight's gradient depend on it, so it is a constant and not a property of the device.
PROGRAMS = 528
STAGES = 1  # rows in flight in each program of the backward

_VECTOR = tl.constexpr(VECTOR)


class Normed(NamedTuple):
    """Results of `add_rms_norm`.

    Attributes:
        hidden: (T, H), x + residual.
        inverse: (T,) float32, 1 / sqrt(mean(hidden^2) + eps).
        normed: (T, H), or None if not requested.
        codes, scale: Quantized normed, as `qarl_kernels.quantize.activation_codes` returns it, or None.
    """

    hidden: Tensor
    inverse: Tensor
    normed: Tensor | None
    codes: Tensor | None
    scale: Tensor | None


@triton.jit
def _scaled(hidden, inverse, weight):
    """Return weight * round(hidden * inverse), rounded. hidden, weight: (T, 8) 16-bit; inverse: (T,) f32."""
    normal = narrow(widen(hidden) * inverse[:, None], hidden.dtype)
    return narrow(widen(weight) * widen(normal), hidden.dtype)


@triton.jit(do_not_specialize=["rows"])
def _norm_kernel(
    x,  # (rows, columns) bf16 or fp16
    residual,  # (rows, columns), or None
    weight,  # (columns,)
    hidden,  # (rows, columns), None if residual is
    inverse,  # (rows,) f32
    normed,  # (rows, columns), or None
    codes,  # (rows, columns) i8 or e4m3, or None
    scale,  # (rows, 1) or (rows, groups) f32
    rows,
    columns,
    stride_x,
    stride_residual,
    eps,
    GROUPED: tl.constexpr,
    ROWS: tl.constexpr,
    VECTORS: tl.constexpr,
    CHUNKS: tl.constexpr,
    RAGGED: tl.constexpr,  # columns is not a multiple of 8
):
    STEP: tl.constexpr = VECTORS * _VECTOR
    t = tl.arange(0, ROWS * VECTORS)
    row = (tl.program_id(0) * ROWS + t // VECTORS).to(tl.int64)
    column = t % VECTORS * _VECTOR
    exists = row < rows
    values = load_chunks(x + row * stride_x, exists, column, columns, CHUNKS, STEP, RAGGED)
    if residual is not None:
        others = load_chunks(residual + row * stride_residual, exists, column, columns, CHUNKS, STEP, RAGGED)
        sums = ()
        for c in tl.static_range(CHUNKS):
            sums += (narrow(widen(values[c]) + widen(others[c]), values[c].dtype),)
        values = sums
        store_chunks(hidden + row * columns, values, exists, column, columns, STEP, RAGGED)
    squares = widen(values[0]) * widen(values[0])
    for c in tl.static_range(1, CHUNKS):
        squares += widen(values[c]) * widen(values[c])
    total = row_sum(squares, ROWS, VECTORS)
    width = tl.full(total.shape, columns, tl.float32)
    # Correctly rounded square root and division; rsqrt is an approximate instruction.
    root = tl.div_rn(tl.full(total.shape, 1.0, tl.float32), tl.sqrt_rn(tl.div_rn(total, width) + eps))
    at = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tl.store(inverse + at, root, at < rows)
    root = repeat_each(root, VECTORS)
    weights = load_chunks(weight, exists, column, columns, CHUNKS, STEP, RAGGED)
    results = ()
    for c in tl.static_range(CHUNKS):
        results += (_scaled(values[c], root, weights[c]),)
    if normed is not None:
        store_chunks(normed + row * columns, results, exists, column, columns, STEP, RAGGED)
    if codes is not None:
        store_codes(results, codes, scale, row, exists, column, columns, GROUPED, ROWS, VECTORS, RAGGED)


@triton.jit(do_not_specialize=["rows"])
def _again_kernel(
    hidden,  # (rows, columns) bf16 or fp16
    inverse,  # (rows,) f32
    weight,  # (columns,)
    normed,  # (rows, columns)
    rows,
    columns,
    row_vectors,  # vectors of a row
    stride,
    RAGGED: tl.constexpr,
    VECTORS: tl.constexpr,
):
    t = tl.program_id(0) * VECTORS + tl.arange(0, VECTORS)
    row = (t // row_vectors).to(tl.int64)
    column = t % row_vectors * _VECTOR
    exists = row < rows
    keep = inside(exists, column, columns, RAGGED)
    lane = tl.arange(0, _VECTOR)[None, :]
    value = tl.load((hidden + row * stride + column)[:, None] + lane, keep, other=0.0)
    factor = tl.load((weight + column)[:, None] + lane, keep, other=0.0)
    result = _scaled(value, tl.load(inverse + row, exists, other=0.0), factor)
    tl.store((normed + row * columns + column)[:, None] + lane, result, keep)


def add_rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    activation: Activation = None,
    want_normed: bool = True,
) -> Normed:
    """Compute hidden = x + residual, normed = weight * round(hidden / sqrt(mean(hidden^2) + eps)), and quantize normed.

    Args:
        x: (T, H) bf16 or fp16, last dimension contiguous, arbitrary row stride; H at most 32,768.
        residual: Like x, or None: then hidden is x itself.
        weight: (H,) of x's dtype.
        activation: Format of the codes for the product that follows, or None.
        want_normed: Whether to write normed.
    """
    check_rows("x", x)
    rows, columns = x.shape
    if residual is not None:
        check_rows("residual", residual, columns)
    tile = row_tile(columns)
    hidden = x if residual is None else torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    inverse = torch.empty(rows, dtype=torch.float32, device=x.device)
    normed = torch.empty(rows, columns, dtype=x.dtype, device=x.device) if want_normed else None
    codes, scale = empty_codes(rows, columns, activation, x.device) if activation else (None, None)
    launch(
        _norm_kernel,
        (cdiv(rows, tile.rows),),
        num_warps=tile.warps,
        x=x,
        residual=residual,
        weight=weight,
        hidden=None if residual is None else hidden,
        inverse=inverse,
        normed=normed,
        codes=codes,
        scale=scale,
        rows=rows,
        columns=columns,
        stride_x=x.stride(0),
        stride_residual=0 if residual is None else residual.stride(0),
        eps=float(eps),
        GROUPED=activation == "fp8_group",
        ROWS=tile.rows,
        VECTORS=tile.vectors,
        CHUNKS=tile.chunks,
        RAGGED=columns % VECTOR != 0,
    )
    return Normed(hidden, inverse, normed, codes, scale)


def rms_norm_again(hidden: Tensor, inverse: Tensor, weight: Tensor) -> Tensor:
    """Recompute the `normed` of `add_rms_norm`, bit for bit, from its `hidden` (T, H) and `inverse` (T,)."""
    check_rows("hidden", hidden)
    rows, columns = hidden.shape
    normed = torch.empty(rows, columns, dtype=hidden.dtype, device=hidden.device)
    row_vectors = cdiv(columns, VECTOR)
    launch(
        _again_kernel,
        (cdiv(rows * row_vectors, AGAIN_VECTORS),),
        num_warps=AGAIN_WARPS,
        hidden=hidden,
        inverse=inverse,
        weight=weight,
        normed=normed,
        rows=rows,
        columns=columns,
        row_vectors=row_vectors,
        stride=hidden.stride(0),
        RAGGED=columns % VECTOR != 0,
        VECTORS=AGAIN_VECTORS,
    )
    return normed


@triton.jit(do_not_specialize=["rows"])
def _norm_backward_kernel(
    grad_normed,  # (rows, columns) bf16 or fp16
    grad_hidden,  # (rows, columns), or None
    hidden,  # (rows, columns)
    inverse,  # (rows,) f32
    weight,  # (columns,)
    grad,  # (rows, columns)
    partial,  # (programs * ROWS, columns) f32
    rows,
    columns,
    stride_normed,
    stride_residual,
    stride_hidden,
    ROWS: tl.constexpr,
    VECTORS: tl.constexpr,
    CHUNKS: tl.constexpr,
    STAGES: tl.constexpr,
    RAGGED: tl.constexpr,
):
    STEP: tl.constexpr = VECTORS * _VECTOR
    t = tl.arange(0, ROWS * VECTORS)
    column = t % VECTORS * _VECTOR
    everywhere = t >= 0
    sums = ()
    for _ in tl.static_range(CHUNKS):
        sums += (tl.zeros([ROWS * VECTORS, _VECTOR], tl.float32),)
    for first in tl.range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
        row = (first + t // VECTORS).to(tl.int64)
        exists = row < rows
        values = load_chunks(hidden + row * stride_hidden, exists, column, columns, CHUNKS, STEP, RAGGED)
        grads = load_chunks(grad_normed + row * stride_normed, exists, column, columns, CHUNKS, STEP, RAGGED)
        if grad_hidden is not None and CHUNKS <= 3:  # longer rows load these later, for lack of registers
            others = load_chunks(grad_hidden + row * stride_residual, exists, column, columns, CHUNKS, STEP, RAGGED)
        # Loaded per row and not before the loop: it comes from the cache, and registers are scarce.
        weights = load_chunks(weight, everywhere, column, columns, CHUNKS, STEP, RAGGED)
        root = tl.load(inverse + row, exists, other=0.0)[:, None]
        products = tl.zeros([ROWS * VECTORS, _VECTOR], tl.float32)
        for c in tl.static_range(CHUNKS):
            products += (widen(grads[c]) * widen(weights[c])) * (widen(values[c]) * root)
        total = row_sum(products, ROWS, VECTORS)
        mean = tl.div_rn(total, tl.full(total.shape, columns, tl.float32))
        mean = repeat_each(mean, VECTORS)[:, None]
        results, added = (), ()
        for c in tl.static_range(CHUNKS):
            normal = widen(values[c]) * root
            result = (widen(grads[c]) * widen(weights[c]) - normal * mean) * root
            if grad_hidden is not None:
                if CHUNKS <= 3:
                    result += widen(others[c])
                else:
                    start, at = grad_hidden + row * stride_residual, column + c * STEP
                    result += widen(load_chunks(start, exists, at, columns, 1, STEP, RAGGED)[0])
            results += (narrow(result, grad.dtype.element_ty),)
            added += (sums[c] + widen(grads[c]) * normal,)
        sums = added
        store_chunks(grad + row * columns, results, exists, column, columns, STEP, RAGGED)
    row = (tl.program_id(0) * ROWS + t // VECTORS).to(tl.int64)
    store_chunks(partial + row * columns, sums, everywhere, column, columns, STEP, RAGGED)


def add_rms_norm_backward(
    grad_normed: Tensor,
    grad_hidden: Tensor | None,
    hidden: Tensor,
    inverse: Tensor,
    weight: Tensor,
    grad_weight: Tensor,
) -> Tensor:
    """Compute the gradient of x and residual, and add the weight's to grad_weight, deterministically.

    Args:
        grad_normed: (T, H) 16-bit, output gradient of normed.
        grad_hidden: (T, H), output gradient of hidden, or None.
        hidden, inverse: Results of `add_rms_norm`.
        weight: (H,).
        grad_weight: (H,) float32, contiguous.

    Returns:
        (T, H), the gradient of x, which is also that of residual.
    """
    check_rows("grad_normed", grad_normed)
    rows, columns = grad_normed.shape
    check_rows("hidden", hidden, columns)
    if grad_hidden is not None:
        check_rows("grad_hidden", grad_hidden, columns)
    tile = backward_tile(columns)
    programs = min(cdiv(rows, tile.rows), max(1, PROGRAMS // tile.rows))
    grad = torch.empty(rows, columns, dtype=hidden.dtype, device=hidden.device)
    partial = torch.empty(programs * tile.rows, columns, dtype=torch.float32, device=hidden.device)
    launch(
        _norm_backward_kernel,
        (programs,),
        num_warps=tile.warps,
        grad_normed=grad_normed,
        grad_hidden=grad_hidden,
        hidden=hidden,
        inverse=inverse,
        weight=weight,
        grad=grad,
        partial=partial,
        rows=rows,
        columns=columns,
        stride_normed=grad_normed.stride(0),
        stride_residual=0 if grad_hidden is None else grad_hidden.stride(0),
        stride_hidden=hidden.stride(0),
        ROWS=tile.rows,
        VECTORS=tile.vectors,
        CHUNKS=tile.chunks,
        STAGES=STAGES,
        RAGGED=columns % VECTOR != 0,
    )
    add_partial_sums(partial, grad_weight)
    return grad
