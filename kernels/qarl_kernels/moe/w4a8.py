"""int4 weights against int8 activations for rows of experts: `qarl_kernels.w4a8` with a weight an expert.

The sums are that module's function, exact in a group and in order over groups, so a row has the bits of
`reference.w4a8` with its expert's weight.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from qarl_kernels.blocks import int4_rows
from qarl_kernels.launch import INTERPRETED
from qarl_kernels.moe.groups import Groups
from qarl_kernels.moe.starting import rows_of_program
from qarl_kernels.moe.tiled import run_tiled
from qarl_kernels.moe.tuning import tile_for
from qarl_kernels.planes import store
from qarl_kernels.tuning import Tile
from qarl_kernels.w4a8 import group_sums


@triton.jit(do_not_specialize=["tiles"])
def grouped_w4a8_kernel(
    x,
    tiled,
    meta,
    s_x,
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
    STAGES: tl.constexpr,
):
    """x (T or R, K) int8; s_x as many fp32; tiled, meta: of the weight (E * N, K), see `w4a8.w4a8_kernel`."""
    expert, first, end, n, source = rows_of_program(
        order, starts, experts, slots, tiles, N, BLOCK_M, BLOCK_N, LANES, GATHERED
    )
    if first < end:
        words, row = int4_rows(tiled, expert * N + n + tl.arange(0, BLOCK_N), K, meta_n)
        live = first + tl.arange(0, BLOCK_M) < end
        rows = x + source * stride_xm
        acc = group_sums(rows, live, words, meta + row, K, meta_n, BLOCK_M, GROUPS, EVEN, ASM, STAGES)
        acc *= tl.load(s_x + source, mask=live, other=0.0)[None, :]
        store(acc, out, None, first, n, end, N, stride_om, False, False)


def grouped_w4a8(
    qx: Tensor,
    s_x: Tensor,
    tiled: Tensor,
    meta: Tensor,
    n: int,
    groups: Groups,
    gathered: bool,
    out_dtype: torch.dtype,
    channel: bool = False,
) -> Tensor:
    """y = (sum over groups of (qx_g @ codes_e,g^T) * s_e,g) * s_x with the weight of each row's expert e.

    qx: (T, K) int8 if gathered, else (R, K) in sorted order; s_x: as many rows, (., 1) fp32. tiled, meta, channel: of
    the weights of all experts, (E * n, K), as `qarl_kernels.w4a8.w4a8` takes them. Returns (R, n) of out_dtype, in
    sorted order.

    Raises ValueError where they are not such tensors.
    """
    if qx.dtype != torch.int8:
        raise ValueError(f"w4a8 needs int8 activations, not {qx.dtype}; quantize x first")
    tile = tile_for("w4a8", groups, n, qx.shape[1], gathered, qx)
    return run(qx, s_x, tiled, meta, n, groups, gathered, out_dtype, channel, tile)


def run(
    qx: Tensor,
    s_x: Tensor,
    tiled: Tensor,
    meta: Tensor,
    n: int,
    groups: Groups,
    gathered: bool,
    out_dtype: torch.dtype,
    channel: bool,
    tile: Tile,
) -> Tensor:
    """`grouped_w4a8` with a given tile."""
    own = {
        "meta": meta,
        "meta_n": meta.shape[1],
        "s_x": s_x,
        "GROUPS": 0 if channel else meta.shape[0] // tiled.shape[1],
        "ASM": not INTERPRETED,
        "STAGES": tile.stages,
    }
    return run_tiled(grouped_w4a8_kernel, qx, tiled, n, groups, gathered, out_dtype, tile, False, **own)
