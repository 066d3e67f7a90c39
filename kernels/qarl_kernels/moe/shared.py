"""The gate of the shared expert: 1 / (1 + exp(-<x, w>)) in float32 without earlier rounding.

The order of the sum depends on the number of features only, so a token's bits do not depend on other tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from qarl_kernels.casts import widen
from qarl_kernels.integers import cdiv
from qarl_kernels.launch import launch
from qarl_kernels.moe import reference
from qarl_kernels.rows import VECTOR, check_rows, load_chunks, row_sum, row_tile

_VECTOR = tl.constexpr(VECTOR)


@triton.jit(do_not_specialize=["rows"])
def _gate_kernel(
    x,  # (rows, columns) bf16 or fp16
    weight,  # (columns,)
    gate,  # (rows,) f32
    rows,
    columns,
    stride,
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
    values = load_chunks(x + row * stride, exists, column, columns, CHUNKS, STEP, RAGGED)
    weights = load_chunks(weight, exists, column, columns, CHUNKS, STEP, RAGGED)
    products = widen(values[0]) * widen(weights[0])
    for c in tl.static_range(1, CHUNKS):
        products += widen(values[c]) * widen(weights[c])
    logit = row_sum(products, ROWS, VECTORS)
    at = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tl.store(gate + at, 1.0 / (1.0 + tl.exp(-logit)), at < rows)


def shared_gate(x: Tensor, weight: Tensor, kernels: bool = False) -> Tensor:
    """Return the gate of each token, (T,) float32.

    x: (T, H), last dimension contiguous, arbitrary row stride; for the kernel bf16 or fp16, H at most 32,768. weight:
    (1, H) of x's dtype, in plain torch also float32. kernels: use Triton. Raises ValueError for other operands.
    """
    rows, columns = x.shape
    if weight.shape != (1, columns):
        raise ValueError(
            f"the gate's weight must be [1, {columns}], as x has {columns} features, not {list(weight.shape)}"
        )
    if not kernels:
        return reference.shared_gate(x, weight)
    check_rows("x", x)
    if weight.dtype != x.dtype:
        raise ValueError(f"shared_gate needs operands of one dtype, not {x.dtype} and {weight.dtype}; cast them")
    tile = row_tile(columns)
    gate = torch.empty(rows, dtype=torch.float32, device=x.device)
    launch(
        _gate_kernel,
        (cdiv(rows, tile.rows),),
        num_warps=tile.warps,
        x=x,
        weight=weight,
        gate=gate,
        rows=rows,
        columns=columns,
        stride=x.stride(0),
        ROWS=tile.rows,
        VECTORS=tile.vectors,
        CHUNKS=tile.chunks,
        RAGGED=columns % VECTOR != 0,
    )
    return gate
