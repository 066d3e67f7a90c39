"""Gradient of an embedding table: rows of the same token are summed in batch order, without atomics."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from qarl_kernels.casts import widen
from qarl_kernels.integers import cdiv, next_power_of_2
from qarl_kernels.launch import launch
from qarl_kernels.rows import check_rows

ROWS, COLUMNS = 4, 1024  # tile of a program: rows of one token loaded at once, features


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
