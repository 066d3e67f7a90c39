"""y = x @ w_e^T for rows of experts, INT8 and FP8 codes, with the scales of W8A8 and FP8 in the epilogue.

`qarl_kernels.gemm` with a weight an expert: the chain of products and what follows it are its own functions, so a row
has the bits of `gemm.w8a8` and `gemm.fp8` with its expert's weight. What differs is which rows a tile has, and that
rows of x are gathered by pointers, which the tensor memory accelerator cannot do; weights come through it as there,
and so do rows in sorted order. FP8 on Hopper is always wgmma's, which wants the side of 64 rows first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from qarl_kernels.blocks import dot_of_rows, gathered, no_sum, of_rows, operand
from qarl_kernels.casts import narrow
from qarl_kernels.direct import Descriptor
from qarl_kernels.gemm import POINTERS, check_e4m3, scaled
from qarl_kernels.integers import cdiv
from qarl_kernels.launch import capability_of, launch, supports_tma
from qarl_kernels.moe.groups import Groups
from qarl_kernels.moe.starting import adjacent, check, empty, rows_of_program, rows_of_programs
from qarl_kernels.tuning import Tile, lookup


@triton.jit(do_not_specialize=["tiles"])
def codes_kernel(
    x,
    w,
    out,
    s_x,
    s_w,
    order,
    starts,
    N,
    K,
    stride_xm,
    stride_wn,
    stride_om,
    experts,
    slots,
    tiles,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LANES: tl.constexpr,
    GATHERED: tl.constexpr,
    SWAP: tl.constexpr,
    ACC: tl.constexpr,
    TMA_X: tl.constexpr,
    TMA_W: tl.constexpr,
):
    """x (T or R, K), w (E * N, K), s_x (T or R,) fp32, s_w (E * N,), out (R, N); order, starts of `Groups`."""
    expert, first, end, n, source = rows_of_program(
        order, starts, experts, slots, tiles, N, BLOCK_M, BLOCK_N, LANES, GATHERED
    )
    if first < end:
        acc = no_sum(BLOCK_M, BLOCK_N, SWAP, ACC)
        for step in range(tl.cdiv(K, BLOCK_K)):
            if TMA_X:
                a = x.load([first, step * BLOCK_K])
            else:
                a = gathered(x + source * stride_xm, step * BLOCK_K, K, BLOCK_K)
            b = operand(w, expert * N + n, experts * N, step * BLOCK_K, K, stride_wn, BLOCK_N, BLOCK_K, TMA_W)
            acc = dot_of_rows(a, b, acc, SWAP)
        rm, rn = first + tl.arange(0, BLOCK_M), n + tl.arange(0, BLOCK_N)
        live = rm < end
        y = scaled(of_rows(acc, SWAP), s_x + source, live, s_w + expert * N + rn, rn < N)
        at = out + rm.to(tl.int64)[:, None] * stride_om + rn[None, :]
        tl.store(at, narrow(y, out.dtype.element_ty), mask=live[:, None] & (rn < N)[None, :])


def grouped_w8a8(
    qx: Tensor, s_x: Tensor, codes: Tensor, s_w: Tensor, n: int, groups: Groups, gathered: bool, out_dtype: torch.dtype
) -> Tensor:
    """y = (qx @ codes_e^T in int32) * s_w,e * s_x of each row's expert e, bit-equal to the reference.

    qx: (T, K) int8 if gathered, else (R, K) in sorted order; s_x: as many rows, (., 1) fp32; codes: (E * n, K) int8,
    contiguous; s_w: (E * n, 1). Returns (R, n) of out_dtype, in sorted order.

    Raises ValueError where they are not such tensors.
    """
    if qx.dtype != torch.int8 or codes.dtype != torch.int8:
        raise ValueError(f"w8a8 needs int8 codes, not {qx.dtype} and {codes.dtype}; quantize the activations first")
    return run(
        qx,
        s_x,
        codes,
        s_w,
        n,
        groups,
        gathered,
        out_dtype,
        lookup("w8a8", n, qx.shape[1], groups.rows, qx, groups=groups, gathered=gathered),
    )


def grouped_fp8(
    qx: Tensor, s_x: Tensor, codes: Tensor, s_w: Tensor, n: int, groups: Groups, gathered: bool, out_dtype: torch.dtype
) -> Tensor:
    """As `grouped_w8a8` of float8_e4m3fn codes, in fp32 with the tensor cores' fast accumulation on Hopper."""
    check_e4m3("fp8", qx, codes)
    return run(
        qx,
        s_x,
        codes,
        s_w,
        n,
        groups,
        gathered,
        out_dtype,
        lookup("fp8", n, qx.shape[1], groups.rows, qx, groups=groups, gathered=gathered),
    )


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
    """`grouped_w8a8` or `grouped_fp8` with a given tile."""
    check("the experts' product", qx, groups, gathered, (codes.shape[0], codes.shape[1]), n)
    qx = adjacent(qx)
    tma_w = supports_tma(codes)
    tma_x = tma_w and not gathered and supports_tma(qx)
    if capability_of(qx) >= (9, 0) and not (tma_w and supports_tma(qx)):
        tile = POINTERS
    out = empty(qx, groups, n, out_dtype)
    own = rows_of_programs(groups, gathered, tile.block_m)
    launch(
        codes_kernel,
        (own["tiles"] * cdiv(n, tile.block_n),),
        num_warps=tile.warps,
        num_stages=tile.stages,
        x=Descriptor(qx, (tile.block_m, tile.block_k)) if tma_x else qx,
        w=Descriptor(codes, (tile.block_n, tile.block_k)) if tma_w else codes,
        out=out,
        s_x=s_x,
        s_w=s_w,
        N=n,
        K=codes.shape[1],
        stride_xm=qx.stride(0),
        stride_wn=codes.stride(0),
        stride_om=n,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        SWAP=tile.way == "w_first",
        ACC=tl.int32 if qx.dtype == torch.int8 else tl.float32,
        TMA_X=tma_x,
        TMA_W=tma_w,
        **own,
    )
    return out
