"""y = sum over groups of (qx_g @ codes_g^T) * s_g, times s_x: int4 weights, int8 activations; dense or per expert.

The product within a group is exact in int32, and groups are added in order in FP32 without contraction, so a result
has the bits of `reference.w4a8` whatever the tile. The kernel reads the tiled form of the weight (`qarl_kernels.tile`)
and multiplies by 16 * code, which is a nibble moved to the top of a byte; the scale is divided by 16, which is exact.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from qarl_kernels.blocks import COMPILED, dot, int4_rows, program_tile, source_rows
from qarl_kernels.groups import Groups
from qarl_kernels.planes import eight_planes, four_planes
from qarl_kernels.shapes import output_rows
from qarl_kernels.tiled_product import store, tiled_product
from qarl_kernels.tuning import Tile, lookup

# Four words in, eight planes of four int8 out: a 4 x 4 transpose of bytes, then each byte's nibbles, sign bit flipped
# because the stored nibble is code + 8.
_ASM = tl.constexpr("""{
.reg .b32 a, b, c, d, r, mask, flip;
mov.b32 mask, 0xF0F0F0F0; mov.b32 flip, 0x80808080;
prmt.b32 a, $8, $9, 0x5140; prmt.b32 b, $10, $11, 0x5140;
prmt.b32 c, $8, $9, 0x7362; prmt.b32 d, $10, $11, 0x7362;
prmt.b32 r, a, b, 0x5410; lop3.b32 $1, r, mask, flip, 0x6A; shl.b32 r, r, 4; lop3.b32 $0, r, mask, flip, 0x6A;
prmt.b32 r, a, b, 0x7632; lop3.b32 $3, r, mask, flip, 0x6A; shl.b32 r, r, 4; lop3.b32 $2, r, mask, flip, 0x6A;
prmt.b32 r, c, d, 0x5410; lop3.b32 $5, r, mask, flip, 0x6A; shl.b32 r, r, 4; lop3.b32 $4, r, mask, flip, 0x6A;
prmt.b32 r, c, d, 0x7632; lop3.b32 $7, r, mask, flip, 0x6A; shl.b32 r, r, 4; lop3.b32 $6, r, mask, flip, 0x6A;
}""")
_ARGUMENTS = tl.constexpr("=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r")
_EIGHT = tl.constexpr((tl.int8,) * 8)


@triton.jit
def _plane(words, j: tl.constexpr):
    """One plane as the assembly computes it: 16 * (nibble - 8)."""
    return ((((words >> (4 * j)) & 0xF) - 8) * 16).to(tl.int8)


@triton.jit
def _planes(words):
    """Eight planes (BLOCK_N, 16) of 16 * code, plane j holding features 16 j .. 16 j + 15 of the block."""
    if COMPILED:
        planes = tl.inline_asm_elementwise(_ASM, _ARGUMENTS, [words], dtype=_EIGHT, is_pure=True, pack=4)
    else:
        planes = ()
        for j in tl.static_range(8):
            planes += (_plane(words, j),)
    return planes


@triton.jit
def _side_by_side(planes, group: tl.constexpr, GROUPS: tl.constexpr):
    """The planes of one of a block's GROUPS (1, 2, 4) groups, (BLOCK_N, 128 / GROUPS)."""
    if GROUPS == 1:
        codes = eight_planes(planes)
    elif GROUPS == 2:
        codes = four_planes(planes, 4 * group)
    else:
        pair = tl.join(planes[2 * group], planes[2 * group + 1])
        codes = pair.permute(0, 2, 1).reshape(pair.shape[0], 32)
    return codes


@triton.jit
def _x_tile(x, live, k, K, SIZE: tl.constexpr, EVEN: tl.constexpr):
    """x^T of SIZE features from k (SIZE, BLOCK_M). x: pointers to the rows (BLOCK_M,), loaded if `live`."""
    at = k + tl.arange(0, SIZE)
    if EVEN:
        tile = tl.load(x[:, None] + at[None, :], mask=live[:, None], other=0)
    else:
        tile = tl.load(x[:, None] + at[None, :], mask=live[:, None] & (at < K)[None, :], other=0)
    return tile.T


@triton.jit
def _add_part(acc, codes, x, live, k, K, scales, SIZE: tl.constexpr, EVEN: tl.constexpr):
    """acc plus the product of one group: codes (BLOCK_N, SIZE) times 16, scales (BLOCK_N,) pointers."""
    none = tl.zeros(acc.shape, dtype=tl.int32)
    part = dot(codes, _x_tile(x, live, k, K, SIZE, EVEN), none)
    return acc + part.to(tl.float32) * (tl.load(scales) * 0.0625)[:, None]


@triton.jit
def _row_sums(acc, rows, live, words, metas, K, EVEN: tl.constexpr):
    """Return acc plus the products of rows that are one group. Sums over 128 blocks of 128 features are exact."""
    blocks = tl.cdiv(K, 128)
    none = tl.zeros(acc.shape, dtype=tl.int32)
    scale = tl.load(metas) * 0.0625
    for first in range(0, blocks, 128):
        part = none
        for block in range(first, min(first + 128, blocks)):
            xt = _x_tile(rows, live, block * 128, K, 128, EVEN)
            part = dot(eight_planes(_planes(tl.load(words + block * 256))), xt, part)
        acc += part.to(tl.float32) * scale[:, None]
    return acc


@triton.jit
def _block_sums(acc, rows, live, words, scales, K, k, meta_n, GROUPS: tl.constexpr, EVEN: tl.constexpr):
    """acc plus the products of the GROUPS groups of one block of 128 features, in order."""
    planes = _planes(tl.load(words))
    SIZE: tl.constexpr = 128 // GROUPS
    for group in tl.static_range(GROUPS):
        codes = _side_by_side(planes, group, GROUPS)
        acc = _add_part(acc, codes, rows, live, k + group * SIZE, K, scales + group * meta_n, SIZE, EVEN)
    return acc


@triton.jit(do_not_specialize=["M"])
def w4a8_kernel(
    x,  # (M, K) i8; (T, K) with `order`
    tiled,  # (ceil(N / 16), ceil(K / 128), 16, 16) i32, with experts (EXPERTS * N, K)
    meta,  # (ceil(K / 128) * GROUPS, meta_n) f32; with GROUPS == 0 (ceil(K / 128), meta_n)
    s_x,  # (M,) f32; (T,) with `order`
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
    GROUPS: tl.constexpr,  # groups per block of 128 features (1, 2, 4); 0: the whole row is one group
    EVEN: tl.constexpr,
    EXPERTS: tl.constexpr,  # 0: dense
    LANES: tl.constexpr,
    SLOTS: tl.constexpr,
    STAGES: tl.constexpr,
):
    expert, m, end, n = program_tile(starts, M, N, EXPERTS, LANES, BLOCK_M, BLOCK_N)
    if EXPERTS == 0 or m < end:
        rn = expert * N + n + tl.arange(0, BLOCK_N)
        rm = m + tl.arange(0, BLOCK_M)
        live = rm < end
        words, row = int4_rows(tiled, rn, K, meta_n)
        source = (source_rows(order, rm, end, SLOTS) if EXPERTS else rm).to(tl.int64)
        rows = x + source * stride_xm
        metas = meta + row
        acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
        if GROUPS == 0:
            acc = _row_sums(acc, rows, live, words, metas, K, EVEN)
        else:
            # The number of stages is stated here so that the scales' loads are pipelined too.
            for block in tl.range(tl.cdiv(K, 128), num_stages=STAGES):
                scales = metas + block * GROUPS * meta_n
                acc = _block_sums(acc, rows, live, words + block * 256, scales, K, block * 128, meta_n, GROUPS, EVEN)
        acc *= tl.load(s_x + source, mask=live, other=0.0)[None, :]
        store(acc, out, bias, m, n, end, N, stride_om, False)


def w4a8(
    qx: Tensor,
    s_x: Tensor,
    tiled: Tensor,
    meta: Tensor,
    in_features: int,
    out_features: int,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    channel: bool = False,
    groups: Groups | None = None,
    gathered: bool = False,
    tile: Tile | None = None,
) -> Tensor:
    """y = (sum over groups of (qx_g @ codes_g^T) * s_g) * s_x + bias, dense or per expert.

    Args:
        qx, s_x: (M, K) int8 and (M, 1) fp32, one scale per row; with groups as in `gemm.dense`.
        tiled, meta: The weight's tiled form (`tile_int4`, `meta_w4a8`); with groups that of all experts, concatenated.
        in_features, out_features: K, and N of one expert.
        channel: Each row of the weight is one group.
        bias, out_dtype, groups, gathered, tile: As in `gemm.dense`.

    Returns:
        (M, N) of out_dtype; with groups in sorted order.
    """
    m, k = output_rows(qx, groups, gathered), qx.shape[1]
    if qx.dtype != torch.int8 or k != in_features:
        raise ValueError(f"w4a8 needs int8 activations of {in_features} features, not {qx.dtype} of {k}")
    tile = tile or lookup("w4a8", out_features, k, m, qx, groups=groups, gathered=gathered)
    own: dict[str, Any] = {"s_x": s_x, "STAGES": tile.stages, **({"GROUPS": 0} if channel else {})}
    given = bias, out_dtype, tile, groups, gathered
    return tiled_product(qx, tiled, meta, out_features, *given, w4a8_kernel, **own)
