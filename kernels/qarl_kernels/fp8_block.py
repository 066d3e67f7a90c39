"""y = sum over blocks of 128 features of (qx_b @ codes_b^T) * s_x,b * s_w,b: FP8 with 1 x 128 and 128 x 128 scales.

A block's product is one chain of tensor-core instructions from zero; blocks are added in order in FP32, so a row's
bits depend only on the row and the weight. Dense or grouped by expert, as in `qarl_kernels.gemm`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from qarl_kernels.blocks import dot_of_rows, gathered_rows, no_sum, of_rows, operand, program_tile, source_rows
from qarl_kernels.casts import narrow, widen
from qarl_kernels.gemm import check_e4m3
from qarl_kernels.groups import Groups
from qarl_kernels.integers import cdiv
from qarl_kernels.launch import launch, supports_tma, tma_descriptor
from qarl_kernels.shapes import kernel_arguments, output_features, output_rows, row_tiles
from qarl_kernels.tuning import Tile, lookup


@triton.jit
def _scaled_block(a, b, s_a, s_b, none, SWAP: tl.constexpr):
    """Return a @ b^T * s_a * s_b (BLOCK_M, BLOCK_N), with SWAP its transpose.

    a: (BLOCK_M, 128); b: (BLOCK_N, 128); s_a: (BLOCK_M,); s_b: a scalar; none: zeros of the result's shape.
    """
    product = dot_of_rows(a, b, none, SWAP)
    if SWAP:
        product *= (s_a * s_b)[None, :]
    else:
        product *= (s_a * s_b)[:, None]
    return product


@triton.jit(do_not_specialize=["M"])
def fp8_block_kernel(
    x,  # (M, K) e4m3, or a descriptor (TMA_X); (T, K) with `order`
    w,  # (N, K) e4m3, with experts (EXPERTS * N, K); or a descriptor (TMA_W)
    s_x,  # (M, ceil(K / 128)) f32; (T, ceil(K / 128)) with `order`
    s_w,  # (ceil(N / 128), ceil(K / 128)); with experts (EXPERTS * N / 128, ceil(K / 128)), 128 divides N
    bias,  # (N,) or None
    out,  # (M, N)
    order,  # (M,) i32 or None, see `blocks.source_rows`
    starts,  # (EXPERTS + 1,) i32 or None, see `blocks.program_tile`
    M,
    N,
    K,
    stride_xm,
    stride_wn,
    stride_om,
    stride_sx,
    stride_sw,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,  # divides 128
    SWAP: tl.constexpr,
    TMA_X: tl.constexpr,
    TMA_W: tl.constexpr,
    STAGES: tl.constexpr,
    EXPERTS: tl.constexpr,  # 0: dense
    LANES: tl.constexpr,
    SLOTS: tl.constexpr,
):
    expert, m, end, n = program_tile(starts, M, N, EXPERTS, LANES, BLOCK_M, BLOCK_N)
    if EXPERTS == 0 or m < end:
        rm = m + tl.arange(0, BLOCK_M)
        rn = n + tl.arange(0, BLOCK_N)
        source = source_rows(order, rm, end, SLOTS).to(tl.int64)
        x_scales = s_x + source * stride_sx
        w_scales = s_w + (expert * N + n) // 128 * stride_sw
        acc = no_sum(BLOCK_M, BLOCK_N, SWAP, tl.float32)
        none = tl.zeros_like(acc)
        # The number of stages is stated here so that the scales' loads are pipelined too.
        for block in tl.range(tl.cdiv(K, 128), num_stages=STAGES):
            if order is None:
                a = operand(x, m, end, block * 128, K, stride_xm, BLOCK_M, 128, TMA_X)
            else:
                a = gathered_rows(x + source * stride_xm, block * 128, K, 128)
            b = operand(w, expert * N + n, (expert + 1) * N, block * 128, K, stride_wn, BLOCK_N, 128, TMA_W)
            acc += _scaled_block(a, b, tl.load(x_scales + block), widen(tl.load(w_scales + block)), none, SWAP)
        y = of_rows(acc, SWAP)
        if bias is not None:
            y += tl.load(bias + rn, mask=rn < N, other=0.0).to(tl.float32)[None, :]
        at = out + rm.to(tl.int64)[:, None] * stride_om + rn[None, :]
        tl.store(at, narrow(y, out.dtype.element_ty), mask=(rm < end)[:, None] & (rn < N)[None, :])


def fp8_block(
    qx: Tensor,
    s_x: Tensor,
    codes: Tensor,
    s_w: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    groups: Groups | None = None,
    gathered: bool = False,
    tile: Tile | None = None,
) -> Tensor:
    """y = sum over blocks of (qx_b @ codes_b^T) * (s_x,b * s_w,b) + bias, dense or per expert.

    Args:
        qx, s_x: (M, K) float8_e4m3fn and (M, ceil(K / 128)) fp32; with groups as in `gemm.dense`.
        codes, s_w: (N, K) float8_e4m3fn, contiguous, and (ceil(N / 128), ceil(K / 128)); with groups those of all
            experts, concatenated, and 128 divides the N of one expert.
        bias, out_dtype, groups, gathered, tile: As in `gemm.dense`.

    Returns:
        (M, N) of out_dtype; with groups in sorted order.
    """
    check_e4m3("fp8_block", qx, codes)
    m, n = output_rows(qx, groups, gathered, bias), output_features(len(codes), groups)
    k, blocks = qx.shape[1], cdiv(qx.shape[1], 128)
    if groups is not None and groups.experts > 1 and n % 128:
        raise ValueError(f"fp8_block: experts of {n} output features would share scales, which span 128")
    if codes.shape[1] != k or s_w.shape != (cdiv(len(codes), 128), blocks) or s_x.shape != (len(qx), blocks):
        raise ValueError(
            f"fp8_block: x {tuple(qx.shape)}, weight {tuple(codes.shape)}, scales {tuple(s_x.shape)} and "
            f"{tuple(s_w.shape)} do not fit each other"
        )
    tile = tile or lookup("fp8_block", n, k, m, qx, groups=groups, gathered=gathered)
    if qx.stride(1) != 1:
        qx = qx.contiguous()
    out = torch.empty(m, n, dtype=out_dtype, device=qx.device)
    tma_w = supports_tma(codes) and (gathered or supports_tma(qx))
    tma_x = tma_w and not gathered
    launch(
        fp8_block_kernel,
        (row_tiles(m, tile.block_m, groups) * cdiv(n, tile.block_n),),
        num_warps=tile.warps,
        num_stages=tile.stages,
        x=tma_descriptor(qx, (tile.block_m, 128)) if tma_x else qx,
        w=tma_descriptor(codes, (tile.block_n, 128)) if tma_w else codes,
        s_x=s_x,
        s_w=s_w,
        bias=bias,
        out=out,
        M=m,
        N=n,
        K=k,
        stride_xm=qx.stride(0),
        stride_wn=codes.stride(0),
        stride_om=out.stride(0),
        stride_sx=s_x.stride(0),
        stride_sw=s_w.stride(0),
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        SWAP=tile.way == "w_first",
        TMA_X=tma_x,
        TMA_W=tma_w,
        STAGES=tile.stages,
        **kernel_arguments(groups, gathered),
    )
    return out
