"""y = x @ ((codes_e - zero_e) * scale_e)^T for rows of experts: `qarl_kernels.w4a16` with a weight an expert.

The same three ways to the same bits, by that module's own functions: `narrow` for few rows an expert, which reads the
words of each expert that has rows once for each tile of them, `wide` for more, and `dequantized`, where all experts'
weights become 16-bit values once. Which one is chosen by the rows an expert has in the mean.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from qarl_kernels.blocks import int4_rows
from qarl_kernels.dequantize import dequantize_int4
from qarl_kernels.launch import INTERPRETED
from qarl_kernels.moe.dense import grouped_dense
from qarl_kernels.moe.groups import Groups
from qarl_kernels.moe.starting import rows_of_program
from qarl_kernels.moe.tiled import run_tiled
from qarl_kernels.moe.tuning import tile_for
from qarl_kernels.planes import store
from qarl_kernels.tile import untile_int4
from qarl_kernels.tuning import Tile
from qarl_kernels.w4a16 import narrow_sum, wide_sum


@triton.jit(do_not_specialize=["tiles"])
def narrow_kernel(
    x,
    tiled,
    meta,
    out,
    order,
    starts,
    N,
    K,
    stride_xm,
    stride_om,
    meta_n,
    experts,
    slots,
    tiles,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LANES: tl.constexpr,
    GATHERED: tl.constexpr,
    GROUPS: tl.constexpr,
    EVEN: tl.constexpr,
    ASM: tl.constexpr,
):
    """x (T or R, K); tiled, meta: of the weight (E * N, K), see `w4a16.narrow_kernel`; order, starts of `Groups`."""
    expert, first, end, n, source = rows_of_program(
        order, starts, experts, slots, tiles, N, BLOCK_M, BLOCK_N, LANES, GATHERED
    )
    if first < end:
        words, row = int4_rows(tiled, expert * N + n + tl.arange(0, BLOCK_N), K, meta_n)
        live = (first + tl.arange(0, BLOCK_M) < end)[:, None]
        rows = x + source[:, None] * stride_xm
        acc = narrow_sum(rows, live, words, meta + row, K, meta_n, BLOCK_M, GROUPS, EVEN, ASM)
        store(acc, out, None, first, n, end, N, stride_om, False, False)


@triton.jit(do_not_specialize=["tiles"])
def wide_kernel(
    x,
    tiled,
    meta,
    out,
    order,
    starts,
    N,
    K,
    stride_xm,
    stride_om,
    meta_n,
    experts,
    slots,
    tiles,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LANES: tl.constexpr,
    GATHERED: tl.constexpr,
    GROUPS: tl.constexpr,
    EVEN: tl.constexpr,
    ASM: tl.constexpr,
    TMA: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """As `narrow_kernel`, by warpgroup products, for BLOCK_N >= 64. `qarl_kernels.planes` explains TMA and SPLIT."""
    expert, first, end, n, source = rows_of_program(
        order, starts, experts, slots, tiles, N, BLOCK_M, BLOCK_N, LANES, GATHERED
    )
    if first < end:
        words, row = int4_rows(tiled, expert * N + n + tl.arange(0, BLOCK_N), K, meta_n)
        if TMA:
            rows = x
        else:
            rows = x + source * stride_xm
        DTYPE: tl.constexpr = x.dtype if TMA else x.dtype.element_ty
        acc = wide_sum(rows, first, words, meta + row, K, meta_n, BLOCK_M, DTYPE, GROUPS, EVEN, ASM, TMA, SPLIT)
        store(acc, out, None, first, n, end, N, stride_om, False, False)


def grouped_w4a16(
    x: Tensor,
    packed: Tensor | None,
    scale: Tensor,
    zero_point: Tensor | None,
    tiled: Tensor | None,
    meta: Tensor | None,
    n: int,
    groups: Groups,
    gathered: bool,
) -> Tensor:
    """y = x @ bf16((codes - zero) * scale)^T with the weight of each row's expert.

    x: (T, K) bf16 or fp16 if gathered, else (R, K) in sorted order. packed, scale, zero_point, tiled, meta: of the
    weights of all experts, (E * n, K), as `qarl_kernels.w4a16.w4a16` takes them. Returns (R, n) of x's dtype, in sorted
    order.

    Raises ValueError where x and the weight do not fit the groups.
    """
    k = x.shape[1]
    tile = tile_for("w4a16", groups, n, k, gathered, x)
    if tile.way == "dequantized" or tiled is None or meta is None:
        if packed is None:
            assert tiled is not None, "w4a16 needs the weight packed or tiled"
            packed = untile_int4(tiled, len(scale), k)
        return grouped_dense(x, dequantize_int4(packed, scale, zero_point, k, x.dtype), groups, gathered)
    return fused(x, tiled, meta, n, groups, gathered, tile)


def fused(x: Tensor, tiled: Tensor, meta: Tensor, n: int, groups: Groups, gathered: bool, tile: Tile) -> Tensor:
    """The narrow or wide kernel on the tiled weights of all experts, n output features each. Returns (R, n)."""
    wide = tile.way == "wide"
    own = {"meta": meta, "meta_n": meta.shape[1], "GROUPS": meta.shape[0] // tiled.shape[1], "ASM": not INTERPRETED}
    return run_tiled(wide_kernel if wide else narrow_kernel, x, tiled, n, groups, gathered, x.dtype, tile, wide, **own)
