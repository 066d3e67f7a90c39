"""y = (x @ (codes_e * scale_e)^T) / global scale for rows of experts: `qarl_kernels.nvfp4a16` with a weight an expert.

All experts share the global scale. The ways are those of `qarl_kernels.moe.w4a16`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from qarl_kernels.blocks import int4_rows
from qarl_kernels.moe import codes
from qarl_kernels.moe.groups import Groups
from qarl_kernels.moe.starting import rows_of_program
from qarl_kernels.moe.tiled import run_tiled
from qarl_kernels.moe.tuning import tile_for
from qarl_kernels.nvfp4_weights import scaled_nvfp4
from qarl_kernels.nvfp4a16 import narrow_sum, untile_nvfp4, wide_sum
from qarl_kernels.planes import store
from qarl_kernels.tuning import Tile


@triton.jit(do_not_specialize=["tiles"])
def narrow_kernel(
    x,
    tiled,
    scales,
    global_scale,
    out,
    order,
    starts,
    N,
    K,
    stride_xm,
    stride_om,
    width,
    experts,
    slots,
    tiles,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LANES: tl.constexpr,
    GATHERED: tl.constexpr,
    EVEN: tl.constexpr,
):
    """x (T or R, K); tiled, scales: of the weight (E * N, K), see `nvfp4a16.narrow_kernel`; order, starts: `Groups`."""
    expert, first, end, n, source = rows_of_program(
        order, starts, experts, slots, tiles, N, BLOCK_M, BLOCK_N, LANES, GATHERED
    )
    if first < end:
        words, row = int4_rows(tiled, expert * N + n + tl.arange(0, BLOCK_N), K, width)
        live = (first + tl.arange(0, BLOCK_M) < end)[:, None]
        rows = x + source[:, None] * stride_xm
        acc = narrow_sum(rows, live, words, scales + row, global_scale, K, width, BLOCK_M, EVEN)
        store(acc, out, None, first, n, end, N, stride_om, False, False)


@triton.jit(do_not_specialize=["tiles"])
def wide_kernel(
    x,
    tiled,
    scales,
    global_scale,
    out,
    order,
    starts,
    N,
    K,
    stride_xm,
    stride_om,
    width,
    experts,
    slots,
    tiles,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LANES: tl.constexpr,
    GATHERED: tl.constexpr,
    EVEN: tl.constexpr,
    TMA: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """As `narrow_kernel`, by warpgroup products, for BLOCK_N >= 64. `qarl_kernels.planes` explains TMA and SPLIT."""
    expert, first, end, n, source = rows_of_program(
        order, starts, experts, slots, tiles, N, BLOCK_M, BLOCK_N, LANES, GATHERED
    )
    if first < end:
        words, row = int4_rows(tiled, expert * N + n + tl.arange(0, BLOCK_N), K, width)
        if TMA:
            rows = x
        else:
            rows = x + source * stride_xm
        DTYPE: tl.constexpr = x.dtype if TMA else x.dtype.element_ty
        acc = wide_sum(rows, first, words, scales + row, global_scale, K, width, BLOCK_M, DTYPE, EVEN, TMA, SPLIT)
        store(acc, out, None, first, n, end, N, stride_om, False, False)


def grouped_nvfp4a16(
    x: Tensor,
    packed: Tensor | None,
    scale: Tensor,
    global_scale: Tensor,
    tiled: Tensor,
    scales: Tensor,
    n: int,
    groups: Groups,
    gathered: bool,
) -> Tensor:
    """y = (x @ (codes * scale)^T) / global_scale with the weight of each row's expert.

    x: (T, K) bf16 or fp16 if gathered, else (R, K) in sorted order. packed, scale, global_scale, tiled, scales: of the
    weights of all experts, (E * n, K), as `qarl_kernels.nvfp4a16.nvfp4a16` takes them. Returns (R, n) of x's dtype, in
    sorted order.

    Raises ValueError where x and the weight do not fit the groups.
    """
    k = x.shape[1]
    tile = tile_for("nvfp4a16", groups, n, k, gathered, x)
    if tile.way == "dequantized":
        packed = untile_nvfp4(tiled, len(scale), k) if packed is None else packed
        tile = tile_for("dense", groups, n, k, gathered, x)
        return dequantized(x, packed, scale, global_scale, n, groups, gathered, tile)
    return fused(x, tiled, scales, global_scale, n, groups, gathered, tile)


def dequantized(
    x: Tensor,
    packed: Tensor,
    scale: Tensor,
    global_scale: Tensor,
    n: int,
    groups: Groups,
    gathered: bool,
    tile: Tile,
) -> Tensor:
    """The product over codes * scale as matrices of x's dtype. Returns (R, n)."""
    weight = scaled_nvfp4(packed, scale, x.dtype)
    ones = torch.ones(len(x), 1, dtype=torch.float32, device=x.device)
    divided = global_scale.reciprocal().expand(len(weight)).contiguous()
    return codes.run(x, ones, weight, divided, n, groups, gathered, x.dtype, tile)


def fused(
    x: Tensor,
    tiled: Tensor,
    scales: Tensor,
    global_scale: Tensor,
    n: int,
    groups: Groups,
    gathered: bool,
    tile: Tile,
) -> Tensor:
    """The narrow or wide kernel on the tiled weights of all experts, n output features each. Returns (R, n)."""
    wide = tile.way == "wide"
    own = {"scales": scales, "global_scale": global_scale, "width": scales.shape[1]}
    return run_tiled(wide_kernel if wide else narrow_kernel, x, tiled, n, groups, gathered, x.dtype, tile, wide, **own)
