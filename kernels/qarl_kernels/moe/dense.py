"""Grouped 16-bit products: each row of x with the weight of its expert, all experts in one launch.

A program has a tile of one expert's rows. The chain of products along K is that of `qarl_kernels.gemm`, which says why
its bits depend on no tile; with few rows an expert it is computed as w @ x^T there as here. So a row has the bits that
`gemm.dense` gives it with that expert's weight alone, whatever else is in the batch.

Weights come through the tensor memory accelerator where there is one. A tile may reach into the next expert's rows,
which changes only columns that are not stored; in the backward those would be summed, so there they are masked.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from qarl_kernels.blocks import dot, operand, tile_of
from qarl_kernels.casts import narrow
from qarl_kernels.direct import Descriptor
from qarl_kernels.integers import cdiv
from qarl_kernels.launch import launch, supports_tma
from qarl_kernels.moe.groups import Groups
from qarl_kernels.moe.tiles import lanes_of, most_tiles, source_rows, tile_rows
from qarl_kernels.output import output
from qarl_kernels.tuning import Tile, lookup


@triton.jit(do_not_specialize=["tiles"])
def _grouped_kernel(
    x,  # (T or R, K) bf16 or fp16
    w,  # (experts * N, K), TRANSPOSED: (experts * K, N)
    out,  # (R, N)
    order,  # (R,) i32
    starts,  # (experts + 1,) i32
    tiles,  # of rows, at most
    experts,
    slots,
    N,
    K,
    stride_xm,
    stride_wn,
    stride_om,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LANES: tl.constexpr,
    SWAP: tl.constexpr,
    GATHERED: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    TMA_X: tl.constexpr,
    TMA_W: tl.constexpr,
):
    pid_m, pid_n = tile_of(tl.program_id(0), tiles, tl.cdiv(N, BLOCK_N))
    expert, first, end = tile_rows(starts, pid_m, experts, LANES, BLOCK_M)
    if first < end:
        n = pid_n * BLOCK_N
        rows = first + tl.arange(0, BLOCK_M)
        if SWAP:
            acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
        else:
            acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        if not TMA_X:
            source = x + source_rows(order, rows, end, slots, GATHERED).to(tl.int64)[:, None] * stride_xm
        for step in range(tl.cdiv(K, BLOCK_K)):
            k = step * BLOCK_K
            if TMA_X:
                a = x.load([first, k])
            else:
                rk = k + tl.arange(0, BLOCK_K)[None, :]
                a = tl.load(source + rk, mask=rk < K, other=0.0)
            if TRANSPOSED:
                row = expert * K + k
                b = operand(w, row, (expert + 1) * K, n, N, stride_wn, BLOCK_K, BLOCK_N, TMA_W).T
            else:
                row = expert * N + n
                b = operand(w, row, experts * N, k, K, stride_wn, BLOCK_N, BLOCK_K, TMA_W)
            if SWAP:
                acc = dot(b, a.T, acc)
            else:
                acc = dot(a, b.T, acc)
        if SWAP:
            y = acc.T
        else:
            y = acc
        rn = n + tl.arange(0, BLOCK_N)
        at = out + rows.to(tl.int64)[:, None] * stride_om + rn[None, :]
        tl.store(at, narrow(y, out.dtype.element_ty), mask=(rows < end)[:, None] & (rn < N)[None, :])


# For rows that are read an element at a time, which takes many registers.
POINTERS = Tile("x_first", 64, 64, 32)


def loads_vectors(x: Tensor) -> bool:
    """Whether pointers to the rows are known to the compiler as aligned, as are their ends."""
    return x.stride(0) % 16 == 0 and x.shape[1] % 16 == 0


def grouped_dense(
    x: Tensor, weight: Tensor, groups: Groups, gathered: bool, out: Tensor | None = None, tile: Tile | None = None
) -> Tensor:
    """Sorted row r of the result is a row of x times the transposed weight of the expert that r belongs to.

    Args:
        x: bf16 or fp16, rows contiguous, any distance apart: (T, K) if gathered, and row r reads that of its token;
            else (R, K), in sorted order.
        weight: (E * N, K) of x's dtype, expert e's rows from e * N on.
        out: (R, N), any row stride, is filled if given.
        tile: for tuning; changes no bit.

    Returns:
        (R, N) of x's dtype, FP32 accumulation, rounded once.

    Raises:
        ValueError: shapes or dtypes do not agree.
    """
    check_operands("grouped_dense", x, weight, groups, gathered)
    n = features("grouped_dense", weight, groups)
    if weight.shape[1] != x.shape[1]:
        raise ValueError(f"x has {x.shape[1]} features and the weight {weight.shape[1]}; they must agree")
    out = output(out, groups.rows, n, x.dtype, x.device)
    tile = tile or lookup("dense", n, x.shape[1], groups.rows, x, groups=groups, gathered=gathered)
    return run(x, weight, groups, gathered, False, n, out, tile)


def check_operands(name: str, x: Tensor, other: Tensor, groups: Groups, gathered: bool) -> None:
    """Raise ValueError unless x has the rows of `groups`, and both are of one 16-bit dtype with contiguous rows."""
    if x.dtype not in (torch.bfloat16, torch.float16) or other.dtype != x.dtype:
        raise ValueError(f"{name} needs bf16 or fp16 operands of one dtype, not {x.dtype} and {other.dtype}; cast them")
    rows = groups.rows // groups.slots if gathered else groups.rows
    if x.shape[0] != rows:
        raise ValueError(f"{name}: {rows} rows belong to these groups, not {x.shape[0]}")
    if x.stride(1) != 1 or other.stride(1) != 1:
        raise ValueError(f"{name}: rows of both operands must be contiguous; call .contiguous()")


def features(name: str, weight: Tensor, groups: Groups) -> int:
    """N of a weight (E * N, K)."""
    if weight.shape[0] % groups.experts:
        raise ValueError(f"{name}: the weight's {weight.shape[0]} rows are no multiple of {groups.experts} experts")
    return weight.shape[0] // groups.experts


def run(
    x: Tensor, weight: Tensor, groups: Groups, gathered: bool, transposed: bool, n: int, out: Tensor, tile: Tile
) -> Tensor:
    """Fill out (R, n) by the kernel; transposed: the weight is (E * K, n), and K is summed."""
    k = x.shape[1]
    tma_x = not gathered and supports_tma(x)
    tma_w = supports_tma(weight) and not (transposed and k % tile.block_k)
    if not ((tma_x or loads_vectors(x)) and (tma_w or loads_vectors(weight))):
        tile, tma_w = POINTERS, False
    tiles = most_tiles(groups, tile.block_m)
    block_w = (tile.block_k, tile.block_n) if transposed else (tile.block_n, tile.block_k)
    launch(
        _grouped_kernel,
        (tiles * cdiv(n, tile.block_n),),
        num_warps=tile.warps,
        num_stages=tile.stages,
        x=Descriptor(x, (tile.block_m, tile.block_k)) if tma_x else x,
        w=Descriptor(weight, block_w) if tma_w else weight,
        out=out,
        order=groups.order,
        starts=groups.starts,
        tiles=tiles,
        experts=groups.experts,
        slots=groups.slots,
        N=n,
        K=k,
        stride_xm=x.stride(0),
        stride_wn=weight.stride(0),
        stride_om=out.stride(0),
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        LANES=lanes_of(groups.experts),
        SWAP=tile.way == "w_first",
        GATHERED=gathered,
        TRANSPOSED=transposed,
        TMA_X=tma_x,
        TMA_W=tma_w,
    )
    return out
