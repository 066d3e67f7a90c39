"""y = x @ w^T for 16-bit, INT8 and FP8 operands, with the scales of W8A8 and FP8 in the epilogue.

One kernel, whose operands come through the tensor memory accelerator on Hopper and through pointers elsewhere. With
few tokens the product is computed as w @ x^T, so that the 64 rows that wgmma wants are rows of w.

Batch invariance: an output element is a chain of tensor-core products along K. INT8 is exact in any order. 16-bit:
mma.sync, wgmma in either operand order and cuBLAS's kernels without split-K give the same bits, whatever the tile. FP8:
wgmma chains agree with each other (and with cuBLAS with fast accumulation), mma.sync does not, so tiles of FP8 on
Hopper are always wgmma's: the side that holds 64 rows or more comes first. `max_num_imprecise_acc` stays at Triton's
default for Hopper (one chain over all of K), which is what fast accumulation means.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from qarl_kernels import library
from qarl_kernels.blocks import dot_of_rows, no_sum, of_rows, operand, tile_of
from qarl_kernels.casts import narrow
from qarl_kernels.direct import Descriptor
from qarl_kernels.integers import cdiv
from qarl_kernels.launch import capability_of, launch, multiprocessors, supports_tma
from qarl_kernels.output import output
from qarl_kernels.plans import planned
from qarl_kernels.tuning import Tile, lookup


@triton.jit
def scaled(y, s_x, in_m, s_w, in_n):
    """y (BLOCK_M, BLOCK_N), a sum of products of codes, in float32 with the scales of its weight and then its rows.

    s_x (BLOCK_M,) fp32, s_w (BLOCK_N,): pointers, read where in_m and in_n.
    """
    y = y.to(tl.float32) * tl.load(s_w, mask=in_n, other=0.0).to(tl.float32)[None, :]
    return y * tl.load(s_x, mask=in_m, other=0.0)[:, None]


@triton.jit(do_not_specialize=["M", "programs"])
def gemm_kernel(
    x,
    w,
    out,
    s_x,
    s_w,
    bias,
    M,
    N,
    K,
    stride_xm,
    stride_wn,
    stride_om,
    programs,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SWAP: tl.constexpr,
    ACC: tl.constexpr,
    SCALED: tl.constexpr,
    BIAS: tl.constexpr,
    TMA: tl.constexpr,
    TMA_OUT: tl.constexpr,
    PERSISTENT: tl.constexpr,
    HALVES: tl.constexpr,
):
    """x (M, K), w (N, K), out (M, N); s_x (M,) fp32, s_w (N,), bias (N,). See the module for the order of sums."""
    num_m = tl.cdiv(M, BLOCK_M)
    num_n = tl.cdiv(N, BLOCK_N)
    steps = tl.cdiv(K, BLOCK_K)
    tl.assume(steps > 0)
    for pid in tl.range(tl.program_id(0), num_m * num_n, programs, flatten=PERSISTENT):
        pid_m, pid_n = tile_of(pid, num_m, num_n)
        m = pid_m * BLOCK_M
        n = pid_n * BLOCK_N
        acc = no_sum(BLOCK_M, BLOCK_N, SWAP, ACC)
        for step in range(steps):
            a = operand(x, m, M, step * BLOCK_K, K, stride_xm, BLOCK_M, BLOCK_K, TMA)
            b = operand(w, n, N, step * BLOCK_K, K, stride_wn, BLOCK_N, BLOCK_K, TMA)
            acc = dot_of_rows(a, b, acc, SWAP)
        rm = m + tl.arange(0, BLOCK_M)
        rn = n + tl.arange(0, BLOCK_N)
        y = of_rows(acc, SWAP)
        if SCALED:
            y = scaled(y, s_x + rm, rm < M, s_w + rn, rn < N)
        if BIAS:
            y += tl.load(bias + rn, mask=rn < N, other=0.0).to(tl.float32)[None, :]
        if TMA_OUT:
            if HALVES:  # half of the tile at a time: the smaller staging buffer leaves room for a pipeline stage
                left, right = tl.split(y.reshape(BLOCK_M, 2, BLOCK_N // 2).permute(0, 2, 1))
                out.store([m, n], narrow(left, out.dtype))
                out.store([m, n + BLOCK_N // 2], narrow(right, out.dtype))
            else:
                out.store([m, n], narrow(y, out.dtype))
        else:
            at = out + rm.to(tl.int64)[:, None] * stride_om + rn[None, :]
            tl.store(at, narrow(y, out.dtype.element_ty), mask=(rm < M)[:, None] & (rn < N)[None, :])


@planned
def dense(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """y = x @ weight^T + bias, FP32 accumulation, one rounding; a row's bits do not depend on the other rows.

    x: (M, K) bf16 or fp16, any row stride; weight: (N, K) of x's dtype; bias: (N,). out: (M, N), any row stride, is
    filled if given. Returns (M, N) of out_dtype (out's, else x's).
    """
    if x.dtype not in (torch.bfloat16, torch.float16) or weight.dtype != x.dtype:
        raise ValueError(f"dense needs bf16 or fp16 operands of one dtype, not {x.dtype} and {weight.dtype}; cast them")
    return _run("dense", x, weight, None, None, bias, out_dtype or (x if out is None else out).dtype, out)


@planned
def w8a8(
    qx: Tensor,
    s_x: Tensor,
    codes: Tensor,
    s_w: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    out: Tensor | None = None,
) -> Tensor:
    """y = (qx @ codes^T in int32) * s_w * s_x + bias, bit-equal to the reference.

    qx: (M, K) int8; s_x: (M, 1) fp32; codes: (N, K) int8; s_w: (N, 1). out: as in `dense`. Returns (M, N).
    """
    if qx.dtype != torch.int8 or codes.dtype != torch.int8:
        raise ValueError(f"w8a8 needs int8 codes, not {qx.dtype} and {codes.dtype}; quantize the activations first")
    return _run("w8a8", qx, codes, s_x, s_w, bias, out_dtype, out)


@planned
def fp8(
    qx: Tensor,
    s_x: Tensor,
    codes: Tensor,
    s_w: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    out: Tensor | None = None,
) -> Tensor:
    """y = (qx @ codes^T in fp32) * s_w * s_x + bias, with the tensor cores' fast accumulation on Hopper.

    qx: (M, K) float8_e4m3fn; s_x: (M, 1) fp32; codes: (N, K) float8_e4m3fn; s_w: (N, 1). out: as in `dense`. Returns
    (M, N).
    """
    check_e4m3("fp8", qx, codes)
    return _run("fp8", qx, codes, s_x, s_w, bias, out_dtype, out)


def check_e4m3(name: str, qx: Tensor, codes: Tensor) -> None:
    """Raise ValueError, which names the scheme, unless both are e4m3 codes, on a GPU that multiplies them."""
    if qx.dtype != torch.float8_e4m3fn or codes.dtype != torch.float8_e4m3fn:
        raise ValueError(
            f"{name} needs float8_e4m3fn codes, not {qx.dtype} and {codes.dtype}; quantize the activations first"
        )
    if capability_of(qx) < (8, 9):
        raise ValueError("fp8 products need compute capability 8.9 (Ada, Hopper); use w8a8, or the reference")


def _run(
    table: str,
    x: Tensor,
    weight: Tensor,
    s_x: Tensor | None,
    s_w: Tensor | None,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    out: Tensor | None,
) -> Tensor:
    m, k = x.shape
    n = weight.shape[0]
    if weight.shape[1] != k:
        raise ValueError(f"x has {k} features and the weight {weight.shape[1]}; they must agree")
    if weight.stride(1) != 1:
        weight = weight.contiguous()
    if x.stride(1) != 1:
        x = x.contiguous()
    out = output(out, m, n, out_dtype, x.device)
    done = 0
    tile = lookup(table, n, k, m, x)
    decode = table == "dense" and m in library.DECODE_ROWS and capability_of(x) >= (9, 0)
    # Rows further apart may make cuBLAS choose a kernel that was not compared.
    if (decode or tile.way == "library") and bias is None and out_dtype == x.dtype and out.is_contiguous():
        done = library.product(x, weight, out, by_kernel)
    if tile.way == "library":
        tile = lookup(table, n, k, m - done, x, library=False)
    if done:
        run(x[done:], weight, None if s_x is None else s_x[done:], s_w, bias, out[done:], tile)
    else:  # as always in a decode, where the host's microseconds count
        run(x, weight, s_x, s_w, bias, out, tile)
    return out


# For rows that the tensor memory accelerator cannot read: loads of one element take many registers, tuned tiles spill.
POINTERS = Tile("x_first", 64, 64, 32)


def by_kernel(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """out = x @ weight^T by the kernel itself, which `library` compares cuBLAS with."""
    run(x, weight, None, None, None, out, lookup("dense", *weight.shape, x.shape[0], x, library=False))


def run(
    x: Tensor,
    weight: Tensor,
    s_x: Tensor | None,
    s_w: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
    tile: Tile,
) -> None:
    """Fill out (M, N) with the product of x (M, K) and weight (N, K), scaled by s_x (M, 1) and s_w (N, 1) if given."""
    m, k = x.shape
    n = weight.shape[0]
    if m == 0 or n == 0:
        return
    tma = supports_tma(x) and supports_tma(weight)
    if not tma and capability_of(x) >= (9, 0):
        tile = POINTERS
    swap, block_k = tile.way == "w_first", tile.block_k
    # A float32 tile staged for the accelerator, or held while the next one loads, does not fit beside the stages.
    narrow_out = out.element_size() == 2
    tma_out = tma and not swap and narrow_out and supports_tma(out)
    halves = tma_out and tile.halves
    tiles = cdiv(m, tile.block_m) * cdiv(n, tile.block_n)
    programs = min(tiles, multiprocessors(x)) if tile.persistent and tma and narrow_out else tiles
    launch(
        gemm_kernel,
        (programs,),
        num_warps=tile.warps,
        num_stages=tile.stages,
        x=Descriptor(x, (tile.block_m, block_k)) if tma else x,
        w=Descriptor(weight, (tile.block_n, block_k)) if tma else weight,
        out=Descriptor(out, (tile.block_m, tile.block_n // (2 if halves else 1))) if tma_out else out,
        s_x=s_x,
        s_w=s_w,
        bias=bias,
        M=m,
        N=n,
        K=k,
        stride_xm=x.stride(0),
        stride_wn=weight.stride(0),
        stride_om=out.stride(0),
        programs=programs,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=block_k,
        SWAP=swap,
        ACC=tl.int32 if x.dtype == torch.int8 else tl.float32,
        SCALED=s_x is not None,
        BIAS=bias is not None,
        TMA=tma,
        TMA_OUT=tma_out,
        PERSISTENT=programs < tiles,
        HALVES=halves,
    )
