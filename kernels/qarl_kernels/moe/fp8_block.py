"""FP8 with 1 x 128 and 128 x 128 scales for rows of experts: `qarl_kernels.fp8_block` with a weight an expert.

The product of a block and its scales are that module's function, and blocks are added in order in FP32 as there, so a
row has the bits of `fp8_block.fp8_block` with its expert's weight. Rows of x as in `qarl_kernels.moe.codes`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from qarl_kernels.blocks import gathered, no_sum, of_rows, operand
from qarl_kernels.casts import narrow, widen
from qarl_kernels.direct import Descriptor
from qarl_kernels.fp8_block import scaled_block
from qarl_kernels.gemm import check_e4m3
from qarl_kernels.integers import cdiv
from qarl_kernels.launch import launch, supports_tma
from qarl_kernels.moe.groups import Groups
from qarl_kernels.moe.starting import adjacent, check, empty, rows_of_program, rows_of_programs
from qarl_kernels.tuning import Tile, lookup


@triton.jit(do_not_specialize=["tiles"])
def grouped_block_kernel(
    x,
    w,
    s_x,
    s_w,
    out,
    order,
    starts,
    N,
    K,
    stride_xm,
    stride_wn,
    stride_om,
    stride_sx,
    stride_sw,
    experts,
    slots,
    tiles,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LANES: tl.constexpr,
    GATHERED: tl.constexpr,
    SWAP: tl.constexpr,
    TMA_X: tl.constexpr,
    TMA_W: tl.constexpr,
    STAGES: tl.constexpr,
):
    """x (T or R, K), w (E * N, K) e4m3; s_x (T or R, K/128) fp32; s_w (E * N/128, K/128); out (R, N).

    BLOCK_N divides 128, and 128 divides N where there are several experts.
    """
    expert, first, end, n, source = rows_of_program(
        order, starts, experts, slots, tiles, N, BLOCK_M, BLOCK_N, LANES, GATHERED
    )
    if first < end:
        x_scales = s_x + source * stride_sx
        w_scales = s_w + (expert * N + n) // 128 * stride_sw
        acc = no_sum(BLOCK_M, BLOCK_N, SWAP, tl.float32)
        none = tl.zeros_like(acc)
        for block in tl.range(tl.cdiv(K, 128), num_stages=STAGES):  # stated here, it pipelines the scales' loads too
            if TMA_X:
                a = x.load([first, block * 128])
            else:
                a = gathered(x + source * stride_xm, block * 128, K, 128)
            b = operand(w, expert * N + n, experts * N, block * 128, K, stride_wn, BLOCK_N, 128, TMA_W)
            acc += scaled_block(a, b, tl.load(x_scales + block), widen(tl.load(w_scales + block)), none, SWAP)
        y = of_rows(acc, SWAP)
        rm, rn = first + tl.arange(0, BLOCK_M), n + tl.arange(0, BLOCK_N)
        at = out + rm.to(tl.int64)[:, None] * stride_om + rn[None, :]
        tl.store(at, narrow(y, out.dtype.element_ty), mask=(rm < end)[:, None] & (rn < N)[None, :])


def grouped_fp8_block(
    qx: Tensor, s_x: Tensor, codes: Tensor, s_w: Tensor, n: int, groups: Groups, gathered: bool, out_dtype: torch.dtype
) -> Tensor:
    """y = sum over blocks of (qx_b @ codes_e,b^T) * (s_x,b * s_w,e,b), of each row's expert e.

    qx: (T, K) float8_e4m3fn if gathered, else (R, K) in sorted order; s_x: as many rows, (., ceil(K / 128)) fp32;
    codes: (E * n, K) float8_e4m3fn, contiguous; s_w: (ceil(E * n / 128), ceil(K / 128)). Returns (R, n) of out_dtype,
    in sorted order.

    Raises ValueError where they are not such tensors.
    """
    check_e4m3("fp8_block", qx, codes)
    if n % 128 and groups.experts > 1:
        raise ValueError(f"fp8_block: experts of {n} output features would share scales, which span 128")
    if s_w.shape != (cdiv(codes.shape[0], 128), cdiv(codes.shape[1], 128)) or s_x.shape != (len(qx), s_w.shape[1]):
        raise ValueError(
            f"fp8_block: x {tuple(qx.shape)}, weight {tuple(codes.shape)}, scales {tuple(s_x.shape)} and "
            f"{tuple(s_w.shape)} do not belong together"
        )
    tile = lookup("fp8_block", n, qx.shape[1], groups.rows, qx, groups=groups, gathered=gathered)
    return run(qx, s_x, codes, s_w, n, groups, gathered, out_dtype, tile)


def run(
    qx: Tensor,
    s_x: Tensor,
    codes: Tensor,
    s_w: Tensor,
    n: int,
    groups: Groups,
    gathered: bool,
    out_dtype: torch.dtype,
    tile: Tile,
) -> Tensor:
    """`grouped_fp8_block` with a given tile."""
    check("fp8_block", qx, groups, gathered, (codes.shape[0], codes.shape[1]), n)
    qx = adjacent(qx)
    tma_w = supports_tma(codes)
    tma_x = tma_w and not gathered and supports_tma(qx)
    out = empty(qx, groups, n, out_dtype)
    own = rows_of_programs(groups, gathered, tile.block_m)
    launch(
        grouped_block_kernel,
        (own["tiles"] * cdiv(n, tile.block_n),),
        num_warps=tile.warps,
        num_stages=tile.stages,
        x=Descriptor(qx, (tile.block_m, 128)) if tma_x else qx,
        w=Descriptor(codes, (tile.block_n, 128)) if tma_w else codes,
        s_x=s_x,
        s_w=s_w,
        out=out,
        N=n,
        K=codes.shape[1],
        stride_xm=qx.stride(0),
        stride_wn=codes.stride(0),
        stride_om=n,
        stride_sx=s_x.stride(0),
        stride_sw=s_w.stride(0),
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        SWAP=tile.way == "w_first",
        TMA_X=tma_x,
        TMA_W=tma_w,
        STAGES=tile.stages,
        **own,
    )
    return out
