"""Gradient of `qarl_kernels.fused_norm`: of the two streams that are added, and of the norm's weight."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from qarl_kernels.casts import narrow, widen
from qarl_kernels.column_sum import add_partial_sums
from qarl_kernels.integers import cdiv
from qarl_kernels.launch import launch
from qarl_kernels.quantize_kernels import _of_group
from qarl_kernels.rows import (
    VECTOR,
    RowTile,
    backward_tile,
    check_rows,
    load_chunks,
    row_sum,
    store_chunks,
)

# Programs of the backward, each with many rows: four for each of Hopper's 132 multiprocessors. Partial sums of the
# weight's gradient depend on it, so it is a number and not a property of the device.
PROGRAMS = 528
STAGES = 1  # rows of the backward that are under way in each program

_VECTOR = tl.constexpr(VECTOR)


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
        if grad_hidden is not None and CHUNKS <= 3:  # longer rows wait for these, as registers do not suffice
            others = load_chunks(grad_hidden + row * stride_residual, exists, column, columns, CHUNKS, STEP, RAGGED)
        # Not before the loop: it comes from the cache, and registers are scarce.
        weights = load_chunks(weight, everywhere, column, columns, CHUNKS, STEP, RAGGED)
        root = tl.load(inverse + row, exists, other=0.0)[:, None]
        products = tl.zeros([ROWS * VECTORS, _VECTOR], tl.float32)
        for c in tl.static_range(CHUNKS):
            products += (widen(grads[c]) * widen(weights[c])) * (widen(values[c]) * root)
        total = row_sum(products, ROWS, VECTORS)
        mean = tl.div_rn(total, tl.full(total.shape, columns, tl.float32))
        mean = _of_group(mean, VECTORS)[:, None]
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
    tile: RowTile | None = None,
    programs: int = PROGRAMS,
    stages: int = STAGES,
) -> Tensor:
    """Gradient of x and of residual (T, H), which are the same; adds the weight's into grad_weight.

    Args:
        grad_normed: (T, H) 16-bit, what arrives at normed. grad_hidden: (T, H), what arrives at hidden, or None.
        hidden, inverse: as `qarl_kernels.fused_norm.add_rms_norm` returned them. weight: (H,).
        grad_weight: float32 (H,), contiguous. The same inputs add the same bits.
        tile, programs, stages: how the work is cut, for tuning.
    """
    check_rows("grad_normed", grad_normed)
    rows, columns = grad_normed.shape
    check_rows("hidden", hidden, columns)
    if grad_hidden is not None:
        check_rows("grad_hidden", grad_hidden, columns)
    tile = tile or backward_tile(columns)
    programs = min(cdiv(rows, tile.rows), max(1, programs // tile.rows))
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
        STAGES=stages,
        RAGGED=columns % VECTOR != 0,
    )
    add_partial_sums(partial, grad_weight)
    return grad
