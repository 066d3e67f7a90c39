"""SiLU(gate) * up with the quantization after it, and its gradient, which recomputes the product.

Values are rounded where 16-bit tensors in plain torch are: after SiLU, which is computed in float32, and after the
product. A row's bits depend on that row alone.
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
from qarl_kernels.rows import (
    VECTOR,
    Activation,
    check_rows,
    empty_codes,
    inside,
    load_chunks,
    row_tile,
    store_chunks,
    store_codes,
)

BACKWARD_VECTORS, BACKWARD_WARPS = 256, 4  # per program; a vector is eight values of gate and the eight of up

_VECTOR = tl.constexpr(VECTOR)


class Gated(NamedTuple):
    """Results of `swiglu`.

    Attributes:
        product: (T, I), or None if not requested.
        codes, scale: Quantized product, as `qarl_kernels.quantize.activation_codes` returns it, or None.
    """

    product: Tensor | None
    codes: Tensor | None
    scale: Tensor | None


@triton.jit
def _gated(gate, up):
    """Return round(round(silu(gate)) * up), 16-bit, and round(silu(gate)) and the sigmoid in f32."""
    wide = widen(gate)
    divisor = 1.0 + tl.exp(-wide)
    silu = widen(narrow(wide / divisor, gate.dtype))
    return narrow(silu * widen(up), gate.dtype), silu, 1.0 / divisor


@triton.jit(do_not_specialize=["rows"])
def _gated_kernel(
    gate_up,  # (rows, 2 * columns) bf16 or fp16
    product,  # (rows, columns), or None
    codes,  # (rows, columns) i8 or e4m3, or None
    scale,  # (rows, 1) or (rows, groups) f32
    rows,
    columns,
    stride,
    GROUPED: tl.constexpr,
    ROWS: tl.constexpr,
    VECTORS: tl.constexpr,
    CHUNKS: tl.constexpr,  # chunks per program: all of the row, or 1
    RAGGED: tl.constexpr,  # columns is not a multiple of 8
):
    STEP: tl.constexpr = VECTORS * _VECTOR
    t = tl.arange(0, ROWS * VECTORS)
    row = (tl.program_id(0) * ROWS + t // VECTORS).to(tl.int64)
    column = (tl.program_id(1) * (CHUNKS * VECTORS) + t % VECTORS) * _VECTOR
    exists = row < rows
    start = gate_up + row * stride
    gates = load_chunks(start, exists, column, columns, CHUNKS, STEP, RAGGED)
    ups = load_chunks(start + columns, exists, column, columns, CHUNKS, STEP, RAGGED)
    results = ()
    for c in tl.static_range(CHUNKS):
        result, _, _ = _gated(gates[c], ups[c])
        results += (result,)
    if product is not None:
        store_chunks(product + row * columns, results, exists, column, columns, STEP, RAGGED)
    if codes is not None:
        store_codes(results, codes, scale, row, exists, column, columns, GROUPED, ROWS, VECTORS, RAGGED)


@triton.jit(do_not_specialize=["rows"])
def _backward_kernel(
    grad,  # (rows, columns) bf16 or fp16
    gate_up,  # (rows, 2 * columns); each program reads its values before it writes their gradient there
    product,  # (rows, columns)
    rows,
    columns,
    row_vectors,  # vectors of a row of grad
    stride_grad,
    stride,
    RAGGED: tl.constexpr,
    VECTORS: tl.constexpr,
):
    t = tl.program_id(0) * VECTORS + tl.arange(0, VECTORS)
    row = (t // row_vectors).to(tl.int64)
    column = t % row_vectors * _VECTOR
    keep = inside(row < rows, column, columns, RAGGED)
    lane = tl.arange(0, _VECTOR)[None, :]
    start = gate_up + row * stride + column
    gate = tl.load(start[:, None] + lane, keep, other=0.0)
    up = tl.load((start + columns)[:, None] + lane, keep, other=0.0)
    output_grad = widen(tl.load((grad + row * stride_grad + column)[:, None] + lane, keep, other=0.0))
    result, silu, sigmoid = _gated(gate, up)
    tl.store((product + row * columns + column)[:, None] + lane, result, keep)
    slope = sigmoid * (1.0 + widen(gate) * (1.0 - sigmoid))
    tl.store(start[:, None] + lane, narrow(output_grad * widen(up) * slope, gate.dtype), keep)
    tl.store((start + columns)[:, None] + lane, narrow(output_grad * silu, gate.dtype), keep)


def _halves_of(gate_up: Tensor) -> tuple[int, int]:
    """Return the rows of gate_up and the columns of each half."""
    check_rows("gate_up", gate_up)
    rows, columns = gate_up.shape
    if columns % 2:
        raise ValueError(f"gate_up must have an even number of columns, not {columns}")
    return rows, columns // 2


def swiglu(gate_up: Tensor, activation: Activation = None, want_product: bool = True) -> Gated:
    """Compute round(silu(gate)) * up, and quantize it.

    Args:
        gate_up: (T, 2 I) bf16 or fp16, gate first; last dimension contiguous, arbitrary row stride; I at most 32,768.
        activation: Format of the codes for the matrix product that follows, or None.
        want_product: Whether to write the product.
    """
    rows, columns = _halves_of(gate_up)
    tile = row_tile(columns)
    whole = activation in ("int8", "fp8")  # one scale per row, else each chunk has its own program
    product = torch.empty(rows, columns, dtype=gate_up.dtype, device=gate_up.device) if want_product else None
    codes, scale = empty_codes(rows, columns, activation, gate_up.device) if activation else (None, None)
    launch(
        _gated_kernel,
        (cdiv(rows, tile.rows), 1 if whole else tile.chunks),
        num_warps=tile.warps,
        gate_up=gate_up,
        product=product,
        codes=codes,
        scale=scale,
        rows=rows,
        columns=columns,
        stride=gate_up.stride(0),
        GROUPED=activation == "fp8_group",
        ROWS=tile.rows,
        VECTORS=tile.vectors,
        CHUNKS=tile.chunks if whole else 1,
        RAGGED=columns % VECTOR != 0,
    )
    return Gated(product, codes, scale)


def swiglu_backward(grad: Tensor, gate_up: Tensor) -> Tensor:
    """Overwrite gate_up with its gradient, and return the product of `swiglu` (T, I), recomputed bit for bit.

    Args:
        grad: (T, I) 16-bit, output gradient of the product.
        gate_up: As for `swiglu`.
    """
    rows, columns = _halves_of(gate_up)
    check_rows("grad", grad, columns)
    product = torch.empty(rows, columns, dtype=gate_up.dtype, device=gate_up.device)
    row_vectors = cdiv(columns, VECTOR)
    launch(
        _backward_kernel,
        (cdiv(rows * row_vectors, BACKWARD_VECTORS),),
        num_warps=BACKWARD_WARPS,
        grad=grad,
        gate_up=gate_up,
        product=product,
        rows=rows,
        columns=columns,
        row_vectors=row_vectors,
        stride_grad=grad.stride(0),
        stride=gate_up.stride(0),
        RAGGED=columns % VECTOR != 0,
        VECTORS=BACKWARD_VECTORS,
    )
    return product
