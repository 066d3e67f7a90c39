"""Products with a tiled 4-bit weight (`qarl_kernels.tile`): the kernels of w4a16 and nvfp4a16, and their launch.

`narrow_kernel` is for few rows: mma.sync on 16 weight rows per warp. `wide_kernel` computes y^T = W x^T with the weight
as the register operand of warpgroup products. The tensor cores idle while a program turns words into weights, unless
another program on the multiprocessor keeps them busy, so what counts is that two or three programs fit: few registers,
few stages. Two options of a tile serve that, and change no bit:

- tma: x is loaded, and y stored, by the tensor memory accelerator. With pointers, the addresses and copies of x take a
  third of the loop's instructions and 40 registers.
- split: a block's product in two, of 64 features each; the second half's weight is made while the first one runs.

Dense and grouped products differ in a kernel's first lines only: `blocks.program_tile` chooses rows of one expert.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from qarl_kernels.blocks import COMPILED, dot, int4_rows, program_tile, source_rows
from qarl_kernels.casts import narrow
from qarl_kernels.gather_rows import rows_in_order
from qarl_kernels.groups import Groups
from qarl_kernels.integers import cdiv
from qarl_kernels.launch import launch, supports_tma, tma_descriptor
from qarl_kernels.planes import eight_planes, four_planes, int4_planes, nvfp4_planes
from qarl_kernels.shapes import kernel_arguments, output_rows, row_tiles
from qarl_kernels.tuning import Tile

BLOCK = 128  # input features of one tile of words


@triton.jit
def _x_plane(x, live, k, K, EVEN: tl.constexpr):
    if EVEN:
        tile = tl.load(x, mask=live, other=0.0)
    else:
        tile = tl.load(x, mask=live & (k < K), other=0.0)
    return tile.T


@triton.jit
def x_planes(x, live, k, K, EVEN: tl.constexpr):
    """Return x^T of a block's 128 features as eight tiles (16, BLOCK_M), with zeros beyond K and in rows not `live`.

    x: pointers (BLOCK_M, 16) to the block's first 16 features; k: the numbers of these features.
    """
    planes = ()
    for j in tl.static_range(8):
        planes += (_x_plane(x + 16 * j, live, k + 16 * j, K, EVEN),)
    return planes


@triton.jit
def x_rows(x, order, m, end, stride, SLOTS: tl.constexpr, BLOCK_M: tl.constexpr, TMA: tl.constexpr):
    """Return the source of rows [m, end) for `x_tile`: x itself if it is a descriptor, else row pointers (BLOCK_M,)."""
    if TMA:
        rows = x
    else:
        rows = x + source_rows(order, m + tl.arange(0, BLOCK_M), end, SLOTS).to(tl.int64) * stride
    return rows


@triton.jit
def x_tile(x, m, k, K, SIZE: tl.constexpr, EVEN: tl.constexpr, TMA: tl.constexpr):
    """Return features [k, k + SIZE) of BLOCK_M rows of x, zeros beyond K. Rows past the end may hold any finite values.

    x: a tensor descriptor (TMA), read from row m on; or pointers to the rows (BLOCK_M,).
    """
    if TMA:
        tile = x.load([m, k])
    else:
        at = k + tl.arange(0, SIZE)[None, :]
        if EVEN:
            tile = tl.load(x[:, None] + at)
        else:
            tile = tl.load(x[:, None] + at, mask=at < K, other=0.0)
    return tile


@triton.jit
def finished(acc):
    """Return acc, the sum of a warpgroup product, once that product is done.

    Using the sum inside the loop makes Triton wait for the product. Otherwise Triton 3.6 leaves products with a
    register operand in flight while the next step overwrites those registers (triton issue 9433): wrong sums on H100.
    """
    if COMPILED:
        acc = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [acc], dtype=tl.float32, is_pure=False, pack=1)
    return acc


@triton.jit
def wide_product(acc, planes, x, m, k, K, EVEN: tl.constexpr, TMA: tl.constexpr, SPLIT: tl.constexpr):
    """Return acc (BLOCK_N, BLOCK_M) plus a block's wgmma product. planes: eight (BLOCK_N, 16); x, m: see `x_tile`."""
    if SPLIT:
        x0 = x_tile(x, m, k, K, 64, EVEN, TMA)
        x1 = x_tile(x, m, k + 64, K, 64, EVEN, TMA)
        acc = dot(four_planes(planes, 0), x0.T, acc)
        acc = finished(dot(four_planes(planes, 4), x1.T, acc))
    else:
        xt = x_tile(x, m, k, K, 128, EVEN, TMA)
        acc = finished(dot(eight_planes(planes), xt.T, acc))
    return acc


@triton.jit
def store(acc, out, bias, m, n, end, N, stride_om, TMA_OUT: tl.constexpr):
    """Store y^T (BLOCK_N, BLOCK_M) fp32, plus bias, rounded once, to rows [m, end) and columns [n, N) of out.

    out: a tensor descriptor of blocks (BLOCK_M, BLOCK_N) (TMA_OUT), or a pointer and `stride_om` between rows.
    """
    rn = n + tl.arange(0, acc.shape[0])
    if bias is not None:
        acc += tl.load(bias + rn, mask=rn < N, other=0.0).to(tl.float32)[:, None]
    if TMA_OUT:
        out.store([m, n], narrow(acc.T, out.dtype))
    else:
        rm = m + tl.arange(0, acc.shape[1])
        at = out + rm.to(tl.int64)[None, :] * stride_om + rn[:, None]
        tl.store(at, narrow(acc, out.dtype.element_ty), mask=(rm < end)[None, :] & (rn < N)[:, None])


@triton.jit
def _weights(words, meta, global_scale, meta_n, DTYPE: tl.constexpr, GROUPS: tl.constexpr):
    """Return the planes of a block's words: NVFP4 if there is a global scale, else int4."""
    if global_scale is None:
        planes = int4_planes(words, meta, meta_n, DTYPE, GROUPS)
    else:
        planes = nvfp4_planes(words, meta, meta_n, DTYPE)
    return planes


@triton.jit(do_not_specialize=["M"])
def narrow_kernel(
    x,  # (M, K) bf16 or fp16; (T, K) with `order`
    tiled,  # (ceil(N / 16), ceil(K / 128), 16, 16) i32, with experts (EXPERTS * N, K)
    meta,  # (ceil(K / 128) * GROUPS, meta_n) i32, see `tile.meta_w4a16`; NVFP4: `scales` of `nvfp4a16.tile_nvfp4`
    global_scale,  # (1,) f32 of NVFP4, else None
    bias,  # (N,) or None
    out,  # (M, N)
    order,  # (M,) i32 or None, see `blocks.source_rows`
    starts,  # (EXPERTS + 1,) i32 or None, see `blocks.program_tile`
    M,
    N,
    K,
    stride_xm,
    stride_om,
    meta_n,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUPS: tl.constexpr,  # rows of meta per block of 128 features: of int4 1, 2 or 4, one per scale; of NVFP4 2
    EVEN: tl.constexpr,  # K is a multiple of 128 and rows of x are aligned
    EXPERTS: tl.constexpr,  # 0: dense
    LANES: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """y^T by mma.sync: eight products of 16 features per block of 128."""
    expert, m, end, n = program_tile(starts, M, N, EXPERTS, LANES, BLOCK_M, BLOCK_N)
    if EXPERTS == 0 or m < end:
        rn = expert * N + n + tl.arange(0, BLOCK_N)
        rm = m + tl.arange(0, BLOCK_M)
        live = (rm < end)[:, None]
        words, row = int4_rows(tiled, rn, K, meta_n)
        source = source_rows(order, rm, end, SLOTS) if EXPERTS else rm
        rk = tl.arange(0, 16)[None, :]
        rows = x + source.to(tl.int64)[:, None] * stride_xm + rk
        acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
        for block in range(tl.cdiv(K, 128)):
            w = tl.load(words + block * 256)
            xs = x_planes(rows + block * 128, live, block * 128 + rk, K, EVEN)
            planes = _weights(w, meta + row + block * GROUPS * meta_n, global_scale, meta_n, x.dtype.element_ty, GROUPS)
            for j in tl.static_range(8):
                acc = dot(planes[j], xs[j], acc)
        if global_scale is not None:
            acc *= tl.div_rn(1.0, tl.load(global_scale))
        store(acc, out, bias, m, n, end, N, stride_om, False)


@triton.jit(do_not_specialize=["M"])
def wide_kernel(
    x,  # as in `narrow_kernel`, or a descriptor (TMA)
    tiled,
    meta,
    global_scale,
    bias,
    out,  # (M, N), or a descriptor (TMA_OUT)
    order,
    starts,
    M,
    N,
    K,
    stride_xm,
    stride_om,
    meta_n,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUPS: tl.constexpr,
    EVEN: tl.constexpr,
    EXPERTS: tl.constexpr,
    LANES: tl.constexpr,
    SLOTS: tl.constexpr,
    TMA: tl.constexpr,  # the module explains TMA and SPLIT
    TMA_OUT: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """y^T by warpgroup products, for BLOCK_N >= 64."""
    expert, m, end, n = program_tile(starts, M, N, EXPERTS, LANES, BLOCK_M, BLOCK_N)
    if EXPERTS == 0 or m < end:
        rn = expert * N + n + tl.arange(0, BLOCK_N)
        words, row = int4_rows(tiled, rn, K, meta_n)
        DTYPE: tl.constexpr = x.dtype if TMA else x.dtype.element_ty
        rows = x_rows(x, order, m, end, stride_xm, SLOTS, BLOCK_M, TMA)
        acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
        for block in range(tl.cdiv(K, 128)):
            w = tl.load(words + block * 256)
            planes = _weights(w, meta + row + block * GROUPS * meta_n, global_scale, meta_n, DTYPE, GROUPS)
            acc = wide_product(acc, planes, rows, m, block * 128, K, EVEN, TMA, SPLIT)
        if global_scale is not None:
            acc *= tl.div_rn(1.0, tl.load(global_scale))
        store(acc, out, bias, m, n, end, N, stride_om, TMA_OUT)


def tiled_product(
    x: Tensor,
    tiled: Tensor,
    meta: Tensor,
    n: int,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    tile: Tile,
    groups: Groups | None,
    gathered: bool,
    kernel: Any = None,
    **own: Any,
) -> Tensor:
    """Multiply x (M, K), or (T, K) if gathered, by a tiled weight of n features per expert.

    kernel: Default: `wide_kernel` or `narrow_kernel`, as the tile says. Only `wide_kernel` follows the tile's `tma` and
    `split`. own: Arguments that only this kernel has. Returns (M, n).
    """
    wide = kernel is None and tile.way == "wide"
    kernel = kernel or (wide_kernel if wide else narrow_kernel)
    m, k = output_rows(x, groups, gathered, bias), x.shape[1]
    experts = 1 if groups is None else groups.experts
    if tiled.shape[:2] != (cdiv(experts * n, 16), cdiv(k, BLOCK)):
        raise ValueError(f"x has {k} features, but a tiled weight {list(tiled.shape)} is not {experts} x {n} x {k}")
    if x.stride(1) != 1:
        x = x.contiguous()
    out = torch.empty(m, n, dtype=out_dtype, device=x.device)
    tma = tma_out = False
    if wide:
        tma = tile.tma and supports_tma(x)
        if tma and gathered:  # the accelerator reads adjacent rows: put the tokens' rows in sorted order first
            assert groups is not None
            x, gathered = rows_in_order(x, groups), False
        # A float32 tile takes too much shared memory. An expert's last tile would overwrite the next expert's rows.
        tma_out = tile.tma and groups is None and supports_tma(out) and out.element_size() == 2
        own |= {"TMA": tma, "TMA_OUT": tma_out, "SPLIT": tile.split}
    launch(
        kernel,
        (row_tiles(m, tile.block_m, groups) * cdiv(n, tile.block_n),),
        num_warps=tile.warps,
        num_stages=tile.stages,
        x=tma_descriptor(x, (tile.block_m, BLOCK // 2 if tile.split else BLOCK)) if tma else x,
        tiled=tiled,
        meta=meta,
        bias=bias,
        out=tma_descriptor(out, (tile.block_m, tile.block_n)) if tma_out else out,
        M=m,
        N=n,
        K=k,
        stride_xm=x.stride(0),
        stride_om=out.stride(0),
        meta_n=meta.shape[1],
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        EVEN=k % BLOCK == 0 and x.stride(0) * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0,
        **{"GROUPS": meta.shape[0] // tiled.shape[1], **own},
        **kernel_arguments(groups, gathered),
    )
    return out
