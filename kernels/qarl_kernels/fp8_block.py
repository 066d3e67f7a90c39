"""y = sum over blocks of 128 features of (qx_b @ codes_b^T) * s_x,b * s_w,b: FP8 with 1 x 128 and 128 x 128 scales.

A block's product is one chain of tensor-core instructions from zero; blocks are added in order in FP32, so a row's
bits depend on nothing but itself and the weight.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from qarl_kernels.blocks import dot_of_rows, no_sum, of_rows, operand, tile_of
from qarl_kernels.casts import narrow
from qarl_kernels.direct import Descriptor
from qarl_kernels.gemm import check_e4m3
from qarl_kernels.integers import cdiv
from qarl_kernels.launch import launch, supports_tma
from qarl_kernels.output import output
from qarl_kernels.plans import planned
from qarl_kernels.tuning import Tile, lookup


@triton.jit
def scaled_block(a, b, s_a, s_b, none, SWAP: tl.constexpr):
    """The product of a block's codes a (BLOCK_M, 128), b (BLOCK_N, 128), from the zeros `none`, with its scales.

    s_a: (BLOCK_M,) fp32; s_b: a number. Returns (BLOCK_M, BLOCK_N), with SWAP its transpose.
    """
    product = dot_of_rows(a, b, none, SWAP)
    if SWAP:
        product *= (s_a * s_b)[None, :]
    else:
        product *= (s_a * s_b)[:, None]
    return product


@triton.jit(do_not_specialize=["M"])
def fp8_block_kernel(
    x,
    w,
    s_x,
    s_w,
    bias,
    out,
    M,
    N,
    K,
    stride_xm,
    stride_wn,
    stride_om,
    stride_sx,
    stride_sw,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SWAP: tl.constexpr,
    BIAS: tl.constexpr,
    TMA: tl.constexpr,
    STAGES: tl.constexpr,
):
    """x (M, K), w (N, K) e4m3; s_x (M, K/128), s_w (N/128, K/128) fp32; out (M, N). BLOCK_N divides 128."""
    num_m = tl.cdiv(M, BLOCK_M)
    num_n = tl.cdiv(N, BLOCK_N)
    pid_m, pid_n = tile_of(tl.program_id(0), num_m, num_n)
    m = pid_m * BLOCK_M
    n = pid_n * BLOCK_N
    rm = m + tl.arange(0, BLOCK_M)
    rn = n + tl.arange(0, BLOCK_N)
    x_scales = s_x + tl.where(rm < M, rm, 0).to(tl.int64) * stride_sx
    w_scales = s_w + n // 128 * stride_sw
    acc = no_sum(BLOCK_M, BLOCK_N, SWAP, tl.float32)
    none = tl.zeros_like(acc)
    for block in tl.range(tl.cdiv(K, 128), num_stages=STAGES):  # stated here, it pipelines the scales' loads too
        a = operand(x, m, M, block * 128, K, stride_xm, BLOCK_M, 128, TMA)
        b = operand(w, n, N, block * 128, K, stride_wn, BLOCK_N, 128, TMA)
        acc += scaled_block(a, b, tl.load(x_scales + block), tl.load(w_scales + block), none, SWAP)
    y = of_rows(acc, SWAP)
    if BIAS:
        y += tl.load(bias + rn, mask=rn < N, other=0.0).to(tl.float32)[None, :]
    tl.store(
        out + rm.to(tl.int64)[:, None] * stride_om + rn[None, :],
        narrow(y, out.dtype.element_ty),
        mask=(rm < M)[:, None] & (rn < N)[None, :],
    )


@planned
def fp8_block(
    qx: Tensor,
    s_x: Tensor,
    codes: Tensor,
    s_w: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    out: Tensor | None = None,
) -> Tensor:
    """y = sum over blocks of (qx_b @ codes_b^T) * (s_x,b * s_w,b) + bias.

    qx: (M, K) float8_e4m3fn; s_x: (M, ceil(K / 128)) fp32; codes: (N, K) float8_e4m3fn; s_w: (ceil(N / 128),
    ceil(K / 128)); bias: (N,). out: (M, N), any row stride, is filled if given. Returns (M, N) of out_dtype.
    """
    check_e4m3("fp8_block", qx, codes)
    m, k = qx.shape
    n = codes.shape[0]
    if codes.shape[1] != k or s_w.shape != (-(-n // 128), -(-k // 128)) or s_x.shape != (m, -(-k // 128)):
        raise ValueError(
            f"fp8_block: x {tuple(qx.shape)}, weight {tuple(codes.shape)}, scales {tuple(s_x.shape)} and "
            f"{tuple(s_w.shape)} do not belong together"
        )
    return run(qx, s_x, codes, s_w.float(), bias, out_dtype, lookup("fp8_block", n, k, m, qx), out)


def run(
    qx: Tensor,
    s_x: Tensor,
    codes: Tensor,
    s_w: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    tile: Tile,
    out: Tensor | None = None,
) -> Tensor:
    """`fp8_block` with a given tile."""
    m, k = qx.shape
    n = codes.shape[0]
    if qx.stride(1) != 1:
        qx = qx.contiguous()
    out = output(out, m, n, out_dtype, qx.device)
    tma = supports_tma(qx) and supports_tma(codes)
    launch(
        fp8_block_kernel,
        (cdiv(m, tile.block_m) * cdiv(n, tile.block_n),),
        num_warps=tile.warps,
        num_stages=tile.stages,
        x=Descriptor(qx, (tile.block_m, 128)) if tma else qx,
        w=Descriptor(codes, (tile.block_n, 128)) if tma else codes,
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
        BIAS=bias is not None,
        TMA=tma,
        STAGES=tile.stages,
    )
    return out
