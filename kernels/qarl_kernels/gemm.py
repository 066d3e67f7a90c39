"""y = x @ w^T for 16-bit, INT8 and FP8 operands, dense or grouped by expert; W8A8 and FP8 scale in the epilogue.

One kernel. On Hopper it loads operands with the tensor memory accelerator (TMA), elsewhere through pointers. With few
rows it computes w @ x^T, because wgmma needs 64 rows on its first operand, which w has.

Grouped: each program computes rows of one expert with that expert's weight (`blocks.expert_rows`). Rows that are
gathered by token are loaded through pointers, because TMA loads only adjacent rows. A tile may reach into the next
expert's weight, which changes only columns that are not stored.

Batch invariance: an output element is a chain of tensor-core products along K. INT8 is exact in any order. 16-bit:
mma.sync, wgmma in either operand order and cuBLAS's kernels without split-K give the same bits, whatever the tile. FP8:
wgmma chains agree with each other (and with cuBLAS with fast accumulation), mma.sync does not, so FP8 tiles on Hopper
always use wgmma: the operand with at least 64 rows comes first. `max_num_imprecise_acc` stays at Triton's default for
Hopper (one chain over all of K), which is fast accumulation. So a row of a grouped product has the bits of
the dense product with its expert's weight.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from qarl_kernels import library
from qarl_kernels.blocks import (
    dot_of_rows,
    expert_rows,
    gathered_rows,
    no_sum,
    of_rows,
    operand,
    source_rows,
    split_columns,
    tile_of,
)
from qarl_kernels.casts import narrow
from qarl_kernels.groups import Groups
from qarl_kernels.integers import cdiv
from qarl_kernels.launch import capability_of, launch, multiprocessors, supports_tma, tma_descriptor
from qarl_kernels.shapes import check_16_bit, kernel_arguments, output_features, output_rows, row_tiles
from qarl_kernels.tuning import Tile, lookup


@triton.jit(do_not_specialize=["M", "programs"])
def gemm_kernel(
    x,  # (M, K), or a descriptor (TMA_X); (T, K) with `order`
    w,  # (N, K), with experts (EXPERTS * N, K), or if TRANSPOSED (EXPERTS * K, N); or a descriptor (TMA_W)
    out,  # (M, N), or a descriptor (TMA_OUT)
    s_x,  # (M,) f32, with `order` (T,); or None, and s_w too
    s_w,  # (N,), with experts (EXPERTS * N,)
    bias,  # (N,) or None
    order,  # (M,) i32 or None, see `blocks.source_rows`
    starts,  # (EXPERTS + 1,) i32 or None, see `blocks.expert_rows`
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
    TMA_X: tl.constexpr,
    TMA_W: tl.constexpr,
    TMA_OUT: tl.constexpr,
    PERSISTENT: tl.constexpr,
    HALVES: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    EXPERTS: tl.constexpr,  # 0: dense
    LANES: tl.constexpr,
    SLOTS: tl.constexpr,
):
    num_m = tl.num_programs(0) // tl.cdiv(N, BLOCK_N) if EXPERTS else tl.cdiv(M, BLOCK_M)
    num_n = tl.cdiv(N, BLOCK_N)
    steps = tl.cdiv(K, BLOCK_K)
    tl.assume(steps > 0)
    for pid in tl.range(tl.program_id(0), num_m * num_n, programs, flatten=PERSISTENT):
        pid_m, pid_n = tile_of(pid, num_m, num_n)
        if EXPERTS:
            expert, m, end = expert_rows(starts, pid_m, EXPERTS, LANES, BLOCK_M)
        else:
            expert, m, end = 0, pid_m * BLOCK_M, M
        n = pid_n * BLOCK_N
        size = K if TRANSPOSED else N
        first, last = expert * size, (expert + 1) * size  # rows of the expert's weight
        if EXPERTS == 0 or m < end:
            if order is not None:
                source = source_rows(order, m + tl.arange(0, BLOCK_M), end, SLOTS)
                rows = x + source.to(tl.int64) * stride_xm
            acc = no_sum(BLOCK_M, BLOCK_N, SWAP, ACC)
            for step in range(steps):
                k = step * BLOCK_K
                if order is None:
                    a = operand(x, m, end, k, K, stride_xm, BLOCK_M, BLOCK_K, TMA_X)
                else:
                    a = gathered_rows(rows, k, K, BLOCK_K)
                if TRANSPOSED:
                    b = operand(w, first + k, last, n, N, stride_wn, BLOCK_K, BLOCK_N, TMA_W).T
                else:
                    b = operand(w, first + n, last, k, K, stride_wn, BLOCK_N, BLOCK_K, TMA_W)
                acc = dot_of_rows(a, b, acc, SWAP)
            rm = m + tl.arange(0, BLOCK_M)
            rn = n + tl.arange(0, BLOCK_N)
            y = of_rows(acc, SWAP)
            if s_x is not None:
                y = y.to(tl.float32) * tl.load(s_w + first + rn, mask=rn < N, other=0.0).to(tl.float32)[None, :]
                y *= tl.load(s_x + (rm if order is None else source), mask=rm < end, other=0.0)[:, None]
            if bias is not None:
                y += tl.load(bias + rn, mask=rn < N, other=0.0).to(tl.float32)[None, :]
            if TMA_OUT:
                if HALVES:  # half of the tile at a time: a smaller staging buffer leaves memory for a pipeline stage
                    left, right = split_columns(y)
                    out.store([m, n], narrow(left, out.dtype))
                    out.store([m, n + BLOCK_N // 2], narrow(right, out.dtype))
                else:
                    out.store([m, n], narrow(y, out.dtype))
            else:
                at = out + rm.to(tl.int64)[:, None] * stride_om + rn[None, :]
                tl.store(at, narrow(y, out.dtype.element_ty), mask=(rm < end)[:, None] & (rn < N)[None, :])


def dense(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    groups: Groups | None = None,
    gathered: bool = False,
    tile: Tile | None = None,
) -> Tensor:
    """y = x @ weight^T + bias, FP32 accumulation, one rounding; a row's bits do not depend on the other rows.

    Args:
        x: (M, K) bf16 or fp16, arbitrary row stride. With groups one row per sorted pair, or (T, K) if `gathered`.
        weight: (N, K) of x's dtype. With groups, the concatenated weights of all experts; N counts one expert.
        bias: (N,), or None. Grouped products have none.
        out_dtype: Dtype of the result. Default: x's dtype.
        groups: The rows of each expert, for a mixture. None: a dense product.
        gathered: With groups, whether x has one row per token, which the product gathers.
        tile: For tests and tuning; changes no bit. Default: the tuned one.

    Returns:
        (M, N) of out_dtype; with groups in sorted order.

    Raises:
        ValueError: dtypes or shapes do not fit each other or the groups.
    """
    check_16_bit("dense", x, weight)
    return multiply("dense", x, weight, None, None, bias, out_dtype or x.dtype, groups, gathered, tile)


def scaled(
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
    """y = (qx @ codes^T) * s_w * s_x + bias: w8a8 of int8 codes, fp8 of float8_e4m3fn codes.

    int8 codes are summed in int32, so the result is bit-equal to the reference; e4m3 codes in fp32, on Hopper with the
    tensor cores' fast accumulation.

    qx: (M, K); s_x: (M, 1) fp32; codes: (N, K) of qx's dtype; s_w: (N, 1). The rest as in `dense`.
    """
    if qx.dtype == codes.dtype == torch.int8:
        return multiply("w8a8", qx, codes, s_x, s_w, bias, out_dtype, groups, gathered, tile)
    check_e4m3("a product of codes other than int8", qx, codes)
    return multiply("fp8", qx, codes, s_x, s_w, bias, out_dtype, groups, gathered, tile)


def check_e4m3(name: str, qx: Tensor, codes: Tensor) -> None:
    """Raise ValueError unless both are e4m3 codes on a GPU that multiplies them. name: What the message begins with."""
    if qx.dtype != torch.float8_e4m3fn or codes.dtype != torch.float8_e4m3fn:
        raise ValueError(
            f"{name} needs float8_e4m3fn codes, not {qx.dtype} and {codes.dtype}; quantize the activations first"
        )
    if capability_of(qx) < (8, 9):
        raise ValueError("fp8 products need compute capability 8.9 (Ada, Hopper); use w8a8, or the reference")


def multiply(
    family: str,
    x: Tensor,
    weight: Tensor,
    s_x: Tensor | None,
    s_w: Tensor | None,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    groups: Groups | None,
    gathered: bool,
    tile: Tile | None,
) -> Tensor:
    """Return (M, N) of out_dtype, computed by `gemm_kernel` or by cuBLAS. Operands as in `run`.

    family: One of `tuning.FAMILIES` that the kernel serves. tile: None: the tuned one.
    """
    m, n = output_rows(x, groups, gathered, bias), output_features(len(weight), groups)
    k = x.shape[1]
    if weight.shape[1] != k:
        raise ValueError(f"x has {k} features and the weight {weight.shape[1]}; they must agree")
    if weight.stride(1) != 1:
        weight = weight.contiguous()
    if x.stride(1) != 1:
        x = x.contiguous()
    out = torch.empty(m, n, dtype=out_dtype, device=x.device)
    done = 0
    plain = family == "dense" and groups is None and tile is None
    decode = plain and m in library.DECODE_ROWS and capability_of(x) >= (9, 0)
    tile = tile or lookup(family, n, k, m, x, groups=groups, gathered=gathered)
    if (decode or tile.way == "library") and bias is None and out_dtype == x.dtype:
        done = library.product(x, weight, out, by_kernel)
    if tile.way == "library":
        tile = lookup(family, n, k, m - done, x, library=False)
    if done:
        run(x[done:], weight, None if s_x is None else s_x[done:], s_w, bias, out[done:], tile)
    else:  # always taken in decodes, where the host's microseconds count
        run(x, weight, s_x, s_w, bias, out, tile, groups, gathered)
    return out


# For rows that TMA cannot read: loads of one element take many registers, so tuned tiles would spill.
POINTERS = Tile("x_first", 64, 64, 32)


def loads_vectors(x: Tensor) -> bool:
    """Whether the compiler knows that pointers to the rows, and their ends, are aligned."""
    return x.stride(0) % 16 == 0 and x.shape[1] % 16 == 0


def by_kernel(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """Fill out (M, N) with x (M, K) times weight (N, K) by `gemm_kernel`; `library` compares cuBLAS with it."""
    n, k = weight.shape
    run(x, weight, None, None, None, out, lookup("dense", n, k, x.shape[0], x, library=False))


def run(
    x: Tensor,
    weight: Tensor,
    s_x: Tensor | None,
    s_w: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
    tile: Tile,
    groups: Groups | None = None,
    gathered: bool = False,
    transposed: bool = False,
) -> None:
    """Fill out (M, N) with x (M, K) times weight (N, K), scaled by s_x (M, 1) and s_w (N, 1) if given.

    transposed: the weight is (K, N), for the gradient of a grouped product's input.
    """
    (m, n), k = out.shape, x.shape[1]
    if m == 0 or n == 0:
        return
    tile, tma_x, tma_w = _tile_and_tma(x, weight, tile, groups, gathered, transposed)
    swap = tile.way == "w_first"
    # A float32 tile that is staged for TMA, or kept while the next one loads, does not fit into shared memory beside
    # the pipeline stages. With groups, TMA stores of an expert's last tile would overwrite the next expert's rows.
    narrow_out = out.element_size() == 2
    tma_out = tma_x and tma_w and groups is None and not swap and narrow_out and supports_tma(out)
    halves = tma_out and tile.halves
    tiles = row_tiles(m, tile.block_m, groups) * cdiv(n, tile.block_n)
    persistent = groups is None and tile.persistent and tma_x and narrow_out
    programs = min(tiles, multiprocessors(x)) if persistent else tiles
    block_w = (tile.block_k, tile.block_n) if transposed else (tile.block_n, tile.block_k)
    launch(
        gemm_kernel,
        (programs,),
        num_warps=tile.warps,
        num_stages=tile.stages,
        x=tma_descriptor(x, (tile.block_m, tile.block_k)) if tma_x else x,
        w=tma_descriptor(weight, block_w) if tma_w else weight,
        out=tma_descriptor(out, (tile.block_m, tile.block_n // (2 if halves else 1))) if tma_out else out,
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
        BLOCK_K=tile.block_k,
        SWAP=swap,
        ACC=tl.int32 if x.dtype == torch.int8 else tl.float32,
        TMA_X=tma_x,
        TMA_W=tma_w,
        TMA_OUT=tma_out,
        PERSISTENT=programs < tiles,
        HALVES=halves,
        TRANSPOSED=transposed,
        **kernel_arguments(groups, gathered),
    )


def _tile_and_tma(
    x: Tensor, weight: Tensor, tile: Tile, groups: Groups | None, gathered: bool, transposed: bool
) -> tuple[Tile, bool, bool]:
    """Return the tile, and whether TMA loads x and the weight."""
    if groups is None:
        tma = supports_tma(x) and supports_tma(weight)
        return (POINTERS if not tma and capability_of(x) >= (9, 0) else tile), tma, tma
    tma_x = not gathered and supports_tma(x)
    # A transposed weight is summed over its rows; a block may reach into the next expert's, which pointer loads mask.
    tma_w = supports_tma(weight) and not (transposed and x.shape[1] % tile.block_k)
    if (tma_x or loads_vectors(x)) and (tma_w or loads_vectors(weight)):
        return tile, tma_x, tma_w
    return POINTERS, tma_x, False
