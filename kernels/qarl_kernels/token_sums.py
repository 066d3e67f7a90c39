"""Gradients that are sums over tokens (biases, norms, embedding), added to float32 buffers without atomics.

The order of a sum depends on the matrix's shape and on the token ids alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from qarl_kernels.casts import widen
from qarl_kernels.integers import cdiv, next_power_of_2
from qarl_kernels.launch import launch
from qarl_kernels.rows import check_rows

TILE = (32, 64)  # rows and columns of a column sum's program
PROGRAMS = 1056  # eight per multiprocessor of an H100; a constant, so that sums are equal on all devices
ROWS, COLUMNS = 4, 1024  # of the embedding's program: rows of one token loaded at once, features


@triton.jit(do_not_specialize=["rows"])
def _column_sum_kernel(
    x,  # (rows, columns) bf16, fp16 or f32
    into,  # ADD: (columns,) f32, else (stretches, columns) f32
    rows,
    columns,
    stretch,  # rows per program
    stride,
    ADD: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    keep = column < columns
    first = tl.program_id(1) * stretch
    last = tl.minimum(first + stretch, rows)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(first, last, ROWS):
        row = start + tl.arange(0, ROWS)
        at = x + row.to(tl.int64)[:, None] * stride + column[None, :]
        total += widen(tl.load(at, mask=(row < last)[:, None] & keep[None, :], other=0.0))
    result = tl.sum(total, axis=0)
    at = into + tl.program_id(1).to(tl.int64) * columns + column
    if ADD:
        result += tl.load(at, mask=keep, other=0.0)
    tl.store(at, result, mask=keep)


def _sum(x: Tensor, into: Tensor, stretch: int, add: bool, tile: tuple[int, int]) -> None:
    rows, columns = x.shape
    tile_rows, tile_columns = tile
    launch(
        _column_sum_kernel,
        (cdiv(columns, tile_columns), cdiv(rows, stretch)),
        num_warps=4,
        x=x,
        into=into,
        rows=rows,
        columns=columns,
        stretch=stretch,
        stride=x.stride(0),
        ADD=add,
        ROWS=tile_rows,
        COLUMNS=tile_columns,
    )


def add_partial_sums(partial: Tensor, into: Tensor) -> None:
    """into += partial.sum(0). partial: (P, N) float32, P some hundreds; into: (N,) float32."""
    if partial.shape[0]:
        _sum(partial, into, partial.shape[0], True, (64, 32))


def column_sum(x: Tensor, into: Tensor) -> None:
    """into += x.sum(0), the gradient of a bias, deterministically.

    Args:
        x: (T, N) bf16, fp16 or float32, last dimension contiguous, arbitrary row stride.
        into: (N,) float32, contiguous.
    """
    rows, columns = x.shape
    if into.shape != (columns,) or into.dtype != torch.float32 or not into.is_contiguous():
        raise ValueError(f"into must be a contiguous float32 vector of {columns}, not {into.dtype} {tuple(into.shape)}")
    if not rows or not columns:
        return
    stretches = max(1, PROGRAMS // cdiv(columns, TILE[1]))
    stretch = cdiv(cdiv(rows, stretches), TILE[0]) * TILE[0]
    if stretch >= rows:
        _sum(x, into, rows, True, TILE)
        return
    partial = torch.empty(cdiv(rows, stretch), columns, dtype=torch.float32, device=x.device)
    _sum(x, partial, stretch, False, TILE)
    add_partial_sums(partial, into)


@triton.jit
def _embedding_kernel(
    grad,  # (rows, columns) bf16 or fp16
    ids,  # (rows,) i64, sorted
    order,  # (rows,) i64, the row of grad of each id
    ends,  # (rows,) i64, end of the run of equal ids
    into,  # (vocabulary, columns) f32
    columns,
    stride,
    stride_into,
    padding_id,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    first = tl.program_id(0)
    token = tl.load(ids + first)
    before = tl.load(ids + tl.maximum(first - 1, 0))
    if (token != padding_id) & ((first == 0) | (before != token)):  # the program of the run's first row sums the run
        end = tl.load(ends + first).to(tl.int32)
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        keep = column < columns
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        for start in range(first, end, ROWS):
            at = start + tl.arange(0, ROWS)
            row = tl.load(order + at, mask=at < end, other=0)
            pointers = grad + row[:, None] * stride + column[None, :]
            total += widen(tl.load(pointers, mask=(at < end)[:, None] & keep[None, :], other=0.0))
        pointers = into + token * stride_into + column
        tl.store(pointers, tl.load(pointers, mask=keep, other=0.0) + tl.sum(total, axis=0), mask=keep)


def embedding_grad(grad: Tensor, ids: Tensor, into: Tensor, padding_id: int) -> None:
    """into[ids[t]] += grad[t] for every t, deterministically; equal ids are summed in float32. Does not synchronize.

    Args:
        grad: (T, H) bf16 or fp16, last dimension contiguous, arbitrary row stride.
        ids: (T,) int64.
        into: (V, H) float32, last dimension contiguous.
        padding_id: A token without gradient; -1: none.
    """
    check_rows("grad", grad)
    rows, columns = grad.shape
    if not rows:
        return
    ordered, order = torch.sort(ids, stable=True)
    tile_columns = min(COLUMNS, max(16, next_power_of_2(columns)))
    launch(
        _embedding_kernel,
        (rows, cdiv(columns, tile_columns)),
        num_warps=4,
        grad=grad,
        ids=ordered,
        order=order,
        ends=torch.searchsorted(ordered, ordered, right=True),
        into=into,
        columns=columns,
        stride=grad.stride(0),
        stride_into=into.stride(0),
        padding_id=padding_id,
        ROWS=ROWS,
        COLUMNS=tile_columns,
    )
