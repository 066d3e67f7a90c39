"""Rows of tokens in the order of their experts."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from qarl_kernels.groups import Groups
from qarl_kernels.integers import cdiv, next_power_of_2
from qarl_kernels.launch import launch
from qarl_kernels.rows import check_rows

COLUMNS, COPY_WARPS = 2048, 4  # per program: features of one row


@triton.jit
def _copy_kernel(
    x,  # (T, columns)
    order,  # (R,) i32
    out,  # (R, columns)
    slots,
    columns,
    stride_x,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0)
    token = (tl.load(order + row) // slots).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    keep = column < columns
    value = tl.load(x + token * stride_x + column, mask=keep)
    tl.store(out + row.to(tl.int64) * columns + column, value, mask=keep)


def rows_in_order(x: Tensor, groups: Groups) -> Tensor:
    """Gather the tokens' rows in sorted order with Triton: (R, H) of x's dtype, contiguous.

    x: (T, H) bf16 or fp16, last dimension contiguous, arbitrary row stride. Raises ValueError for other x.
    """
    check_rows("x", x)
    if x.shape[0] * groups.slots != groups.rows:
        raise ValueError(f"x must have {groups.rows // groups.slots} rows for these groups, not {x.shape[0]}")
    columns = x.shape[1]
    out = torch.empty(groups.rows, columns, dtype=x.dtype, device=x.device)
    width = min(COLUMNS, max(16, next_power_of_2(columns)))
    launch(
        _copy_kernel,
        (groups.rows, cdiv(columns, width)),
        num_warps=COPY_WARPS,
        x=x,
        order=groups.order,
        out=out,
        slots=groups.slots,
        columns=columns,
        stride_x=x.stride(0),
        COLUMNS=width,
    )
    return out
