"""Residual addition, RMSNorm and the quantization that follows it, in one kernel.

Values are rounded where `qarl_kernels.pointwise.rms_norm` on 16-bit tensors rounds them: the sum of the two streams,
the normalized value, its product with the weight. A row's bits depend on that row alone, and are the same with or
without a residual or a quantization.
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
from qarl_kernels.plans import planned
from qarl_kernels.quantize_kernels import _of_group
from qarl_kernels.rows import (
    VECTOR,
    Activation,
    RowTile,
    check_rows,
    empty_codes,
    inside,
    load_chunks,
    row_sum,
    row_tile,
    store_chunks,
    store_codes,
)

AGAIN_VECTORS, AGAIN_WARPS = 256, 4

_VECTOR = tl.constexpr(VECTOR)


class Normed(NamedTuple):
    """What `add_rms_norm` returns.

    hidden: (T, H), x + residual. inverse: (T,) float32, 1 / sqrt(mean(hidden^2) + eps). normed: (T, H) or None.
    codes, scale: of the quantized normed, as `qarl_kernels.quantize.activation_*` return them, or None.
    """

    hidden: Tensor
    inverse: Tensor
    normed: Tensor | None
    codes: Tensor | None
    scale: Tensor | None


@triton.jit
def _scaled(hidden, inverse, weight):
    """weight * round(hidden * inverse), rounded. hidden, weight: 16-bit (T, 8); inverse: f32 (T,)."""
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
    # Both correctly rounded, unlike the approximate instruction for 1 / sqrt.
    root = tl.div_rn(tl.full(total.shape, 1.0, tl.float32), tl.sqrt_rn(tl.div_rn(total, width) + eps))
    at = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tl.store(inverse + at, root, at < rows)
    root = _of_group(root, VECTORS)
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
    tile: RowTile | None = None,
) -> Normed:
    """hidden = x + residual; normed = weight * round(hidden / sqrt(mean(hidden^2) + eps)); its quantization.

    Args:
        x: bf16 or fp16 (T, H), rows contiguous, any distance apart; H at most 32,768.
        residual: as x, or None: hidden is x itself.
        weight: (H,) of x's dtype.
        activation: what normed is quantized to, for the product that follows; None: it is not.
        want_normed: whether normed is written.
        tile: how rows are held, for tuning.
    """
    return Normed(*_add_rms_norm(x, residual, weight, float(eps), activation, want_normed, tile))


@planned
def _add_rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    activation: Activation,
    want_normed: bool,
    tile: RowTile | None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    check_rows("x", x)
    rows, columns = x.shape
    if residual is not None:
        check_rows("residual", residual, columns)
    tile = tile or row_tile(columns)
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
        eps=eps,
        GROUPED=activation == "fp8_group",
        ROWS=tile.rows,
        VECTORS=tile.vectors,
        CHUNKS=tile.chunks,
        RAGGED=columns % VECTOR != 0,
    )
    return hidden, inverse, normed, codes, scale


@planned
def rms_norm_again(hidden: Tensor, inverse: Tensor, weight: Tensor) -> Tensor:
    """The `normed` of `add_rms_norm`, bit for bit, from its `hidden` (T, H) and `inverse` (T,)."""
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
