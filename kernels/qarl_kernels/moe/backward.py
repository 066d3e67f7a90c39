"""The two products of a grouped linear layer's backward: 16-bit operands, sums in float32.

    dx_r = dy_r @ W_e          of the expert e that row r belongs to; rounded once to dy's dtype
    dW_e += dy_e^T @ x_e       over the expert's rows in their order; added to a float32 gradient

One program owns a tile of dW_e and goes through the expert's rows, so the same inputs add the same bits; no atomics.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from qarl_kernels.blocks import dot
from qarl_kernels.integers import cdiv
from qarl_kernels.launch import launch
from qarl_kernels.moe import dense
from qarl_kernels.moe.groups import Groups
from qarl_kernels.moe.tiles import source_rows
from qarl_kernels.output import output
from qarl_kernels.tuning import Tile, lookup


@triton.jit
def _weight_grad_kernel(
    dy,  # (R, N) bf16 or fp16
    x,  # (T or R, K)
    into,  # (experts * N, K) f32
    order,  # (R,) i32
    starts,  # (experts + 1,) i32
    slots,
    N,
    K,
    stride_dy,
    stride_x,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    GATHERED: tl.constexpr,
):
    expert = tl.program_id(1)
    first = tl.load(starts + expert)
    end = tl.load(starts + expert + 1)
    if first < end:
        num_k = tl.cdiv(K, BLOCK_K)
        n = tl.program_id(0) // num_k * BLOCK_N + tl.arange(0, BLOCK_N)
        k_first = tl.program_id(0) % num_k * BLOCK_K
        k = k_first + tl.arange(0, BLOCK_K)
        acc = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
        source = source_rows(order, first + tl.arange(0, BLOCK_R), end, slots, GATHERED)
        for start in range(first, end, BLOCK_R):
            rows = start + tl.arange(0, BLOCK_R)
            live = (rows < end)[:, None]
            a = tl.load(
                dy + rows.to(tl.int64)[:, None] * stride_dy + n[None, :], mask=live & (n < N)[None, :], other=0.0
            )
            b = tl.load(
                x + source.to(tl.int64)[:, None] * stride_x + k[None, :], mask=live & (k < K)[None, :], other=0.0
            )
            # A step ahead: rows whose places are read in the same step are not read ahead of the product.
            source = source_rows(order, rows + BLOCK_R, end, slots, GATHERED)
            acc = dot(a.T, b, acc)
        # Half of the tile at a time: all of what is there takes as many registers as the sum, and a second program's.
        HALF: tl.constexpr = BLOCK_K // 2
        left, right = tl.split(acc.reshape(BLOCK_N, 2, HALF).permute(0, 2, 1))
        row, k = (expert.to(tl.int64) * N + n)[:, None] * K, k_first + tl.arange(0, HALF)
        _add(into + row + k[None, :], left, (n < N)[:, None] & (k < K)[None, :])
        k += HALF
        _add(into + row + k[None, :], right, (n < N)[:, None] & (k < K)[None, :])


@triton.jit
def _add(at, value, keep):
    """Add to what is there, where `keep`."""
    tl.store(at, tl.load(at, mask=keep, other=0.0) + value, mask=keep)


def grouped_input_grad(
    dy: Tensor, weight: Tensor, groups: Groups, out: Tensor | None = None, tile: Tile | None = None
) -> Tensor:
    """dx = dy @ W of each row's expert.

    Args:
        dy: (R, N) bf16 or fp16, in sorted order, rows contiguous, any distance apart.
        weight: (E * N, K) of dy's dtype.
        out: (R, K), any row stride, is filled if given.
        tile: for tuning.

    Returns:
        (R, K) of dy's dtype. What of the input was gathered, `combine.sum_over_slots` adds up.

    Raises:
        ValueError: shapes or dtypes do not agree.
    """
    dense.check_operands("grouped_input_grad", dy, weight, groups, False)
    n = dense.features("grouped_input_grad", weight, groups)
    if dy.shape[1] != n:
        raise ValueError(f"dy has {dy.shape[1]} features and an expert's weight {n}; they must agree")
    k = weight.shape[1]
    out = output(out, groups.rows, k, dy.dtype, dy.device)
    return dense.run(
        dy,
        weight,
        groups,
        False,
        True,
        k,
        out,
        tile or lookup("input_grad", n, k, groups.rows, dy, groups=groups, gathered=False),
    )


def grouped_weight_grad(
    dy: Tensor, x: Tensor, groups: Groups, gathered: bool, into: Tensor, tile: Tile | None = None
) -> None:
    """Add dy_e^T @ x_e of each expert to its part of `into`; that of an expert without rows is not touched.

    Args:
        dy: (R, N) bf16 or fp16, in sorted order. x: of dy's dtype, (T, K) if gathered, else (R, K); rows of both are
            contiguous, any distance apart.
        into: float32 (E * N, K), contiguous.
        tile: block_m output features, block_n input features, block_k rows at a time; for tuning.

    Raises:
        ValueError: shapes or dtypes do not agree.
    """
    n, k = dy.shape[1], x.shape[1]
    dense.check_operands("grouped_weight_grad", x, dy, groups, gathered)
    dense.check_operands("grouped_weight_grad", dy, x, groups, False)
    if into.shape != (groups.experts * n, k) or into.dtype != torch.float32 or not into.is_contiguous():
        raise ValueError(
            f"grouped_weight_grad: into must be contiguous float32 ({groups.experts * n}, {k}), not {into.dtype} "
            f"{tuple(into.shape)}"
        )
    if not (dense.loads_vectors(dy) and dense.loads_vectors(x)):
        tile = dense.POINTERS
    tile = tile or lookup("weight_grad", n, k, groups.rows, x, groups=groups, gathered=gathered)
    launch(
        _weight_grad_kernel,
        (cdiv(n, tile.block_m) * cdiv(k, tile.block_n), groups.experts),
        num_warps=tile.warps,
        num_stages=tile.stages,
        dy=dy,
        x=x,
        into=into,
        order=groups.order,
        starts=groups.starts,
        slots=groups.slots,
        N=n,
        K=k,
        stride_dy=dy.stride(0),
        stride_x=x.stride(0),
        BLOCK_N=tile.block_m,
        BLOCK_K=tile.block_n,
        BLOCK_R=tile.block_k,
        GATHERED=gathered,
    )
