"""y = sum over groups of (qx_g @ codes_g^T) * s_g, times s_x: int4 weights against int8 activations.

The product inside a group is exact in int32, and groups are added in order in FP32 without contraction, so a result
has the bits of `reference.w4a8` whatever the tile. The kernel reads the tiled form of the weight (`qarl_kernels.tile`)
and multiplies by 16 times the code, which is a nibble moved to the top of its byte; the scale makes up for it exactly.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from qarl_kernels.blocks import dot, int4_rows, tile_of
from qarl_kernels.casts import narrow
from qarl_kernels.launch import INTERPRETED
from qarl_kernels.output import output
from qarl_kernels.planes import run_tiled
from qarl_kernels.plans import planned
from qarl_kernels.tuning import Tile, lookup

# Products of more than this many features may not fit float32's 24 bits: 127 * 8 * 16384 < 2^24 (as in the reference).
EXACT_BLOCKS = 128

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
    """The meaning of the assembly, one plane: 16 * (nibble - 8)."""
    return ((((words >> (4 * j)) & 0xF) - 8) * 16).to(tl.int8)


@triton.jit
def _planes(words, ASM: tl.constexpr):
    """Eight planes (BLOCK_N, 16) of 16 * code, plane j holding features 16 j .. 16 j + 15 of the block."""
    if ASM:
        p0, p1, p2, p3, p4, p5, p6, p7 = tl.inline_asm_elementwise(
            _ASM, _ARGUMENTS, [words], dtype=_EIGHT, is_pure=True, pack=4
        )
    else:
        p0, p1, p2, p3 = _plane(words, 0), _plane(words, 1), _plane(words, 2), _plane(words, 3)
        p4, p5, p6, p7 = _plane(words, 4), _plane(words, 5), _plane(words, 6), _plane(words, 7)
    return p0, p1, p2, p3, p4, p5, p6, p7


@triton.jit
def _two(a, b):
    """Planes a, b (BLOCK_N, 16) as (BLOCK_N, 32)."""
    return tl.join(a, b).permute(0, 2, 1).reshape(a.shape[0], 32)


@triton.jit
def _four(a, b, c, d):
    q = tl.join(tl.join(a, c), tl.join(b, d))  # (BLOCK_N, 16, 2, 2)
    return q.permute(0, 2, 3, 1).reshape(a.shape[0], 64)


@triton.jit
def _eight(a, b, c, d, e, f, g, h):
    q = tl.join(tl.join(tl.join(a, e), tl.join(c, g)), tl.join(tl.join(b, f), tl.join(d, h)))
    return q.permute(0, 2, 3, 4, 1).reshape(a.shape[0], 128)


@triton.jit
def _x_tile(x, live, k, K, SIZE: tl.constexpr, EVEN: tl.constexpr):
    """x^T of SIZE features from k (SIZE, BLOCK_M). x: pointers to the rows (BLOCK_M,)."""
    at = k + tl.arange(0, SIZE)
    if EVEN:
        tile = tl.load(x[:, None] + at[None, :], mask=live[:, None], other=0)
    else:
        tile = tl.load(x[:, None] + at[None, :], mask=live[:, None] & (at < K)[None, :], other=0)
    return tile.T


@triton.jit
def group_sums(
    rows,
    live,
    words,
    metas,
    K,
    meta_n,
    BLOCK_M: tl.constexpr,
    GROUPS: tl.constexpr,
    EVEN: tl.constexpr,
    ASM: tl.constexpr,
    STAGES: tl.constexpr,
):
    """y^T (BLOCK_N, BLOCK_M) fp32 but for the scales of x: the groups' products times their scales, added in order.

    rows: pointers to the rows of x (BLOCK_M,), read where `live`; words (BLOCK_N, 16), metas (BLOCK_N,): to those of
    the weight.
    """
    blocks = tl.cdiv(K, 128)
    none = tl.zeros((words.shape[0], BLOCK_M), dtype=tl.int32)
    acc = tl.zeros((words.shape[0], BLOCK_M), dtype=tl.float32)
    if GROUPS == 0:
        scale = tl.load(metas) * 0.0625
        for first in range(0, blocks, 128):
            part = none
            for block in range(first, min(first + 128, blocks)):
                xt = _x_tile(rows, live, block * 128, K, 128, EVEN)
                p0, p1, p2, p3, p4, p5, p6, p7 = _planes(tl.load(words + block * 256), ASM)
                part = dot(_eight(p0, p1, p2, p3, p4, p5, p6, p7), xt, part)
            acc += part.to(tl.float32) * scale[:, None]
    else:
        for block in tl.range(blocks, num_stages=STAGES):  # stated here, it pipelines the scales' loads too
            k = block * 128
            p0, p1, p2, p3, p4, p5, p6, p7 = _planes(tl.load(words + block * 256), ASM)
            scales = metas + block * GROUPS * meta_n
            if GROUPS == 1:
                part = dot(_eight(p0, p1, p2, p3, p4, p5, p6, p7), _x_tile(rows, live, k, K, 128, EVEN), none)
                acc += part.to(tl.float32) * (tl.load(scales) * 0.0625)[:, None]
            elif GROUPS == 2:
                part = dot(_four(p0, p1, p2, p3), _x_tile(rows, live, k, K, 64, EVEN), none)
                acc += part.to(tl.float32) * (tl.load(scales) * 0.0625)[:, None]
                part = dot(_four(p4, p5, p6, p7), _x_tile(rows, live, k + 64, K, 64, EVEN), none)
                acc += part.to(tl.float32) * (tl.load(scales + meta_n) * 0.0625)[:, None]
            else:
                part = dot(_two(p0, p1), _x_tile(rows, live, k, K, 32, EVEN), none)
                acc += part.to(tl.float32) * (tl.load(scales) * 0.0625)[:, None]
                part = dot(_two(p2, p3), _x_tile(rows, live, k + 32, K, 32, EVEN), none)
                acc += part.to(tl.float32) * (tl.load(scales + meta_n) * 0.0625)[:, None]
                part = dot(_two(p4, p5), _x_tile(rows, live, k + 64, K, 32, EVEN), none)
                acc += part.to(tl.float32) * (tl.load(scales + 2 * meta_n) * 0.0625)[:, None]
                part = dot(_two(p6, p7), _x_tile(rows, live, k + 96, K, 32, EVEN), none)
                acc += part.to(tl.float32) * (tl.load(scales + 3 * meta_n) * 0.0625)[:, None]
    return acc


@triton.jit(do_not_specialize=["M"])
def w4a8_kernel(
    x,
    tiled,
    meta,
    s_x,
    bias,
    out,
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
    BIAS: tl.constexpr,
    ASM: tl.constexpr,
    STAGES: tl.constexpr,
):
    """x (M, K) int8; tiled (N/16, K/128, 16, 16) int32; meta (K/128 * GROUPS, meta_n) fp32; s_x (M,) fp32; out (M, N).

    GROUPS: groups of a block of 128 features (1, 2, 4); 0 when the whole row is one group.
    """
    num_m = tl.cdiv(M, BLOCK_M)
    num_n = tl.cdiv(N, BLOCK_N)
    pid_m, pid_n = tile_of(tl.program_id(0), num_m, num_n)
    rm = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    rn = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    live = rm < M
    words, row = int4_rows(tiled, rn, K, meta_n)
    acc = group_sums(
        x + rm.to(tl.int64) * stride_xm, live, words, meta + row, K, meta_n, BLOCK_M, GROUPS, EVEN, ASM, STAGES
    )
    y = acc * tl.load(s_x + rm, mask=live, other=0.0)[None, :]
    if BIAS:
        y += tl.load(bias + rn, mask=rn < N, other=0.0).to(tl.float32)[:, None]
    tl.store(
        out + rm.to(tl.int64)[None, :] * stride_om + rn[:, None],
        narrow(y, out.dtype.element_ty),
        mask=live[None, :] & (rn < N)[:, None],
    )


@planned
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
    out: Tensor | None = None,
) -> Tensor:
    """y = (sum over groups of (qx_g @ codes_g^T) * s_g) * s_x + bias.

    qx: (M, K) int8 and s_x: (M, 1) fp32, per token. tiled, meta: the weight's tiled form (`tile_int4`, `meta_w4a8`).
    channel: every row of the weight is one group. out: (M, out_features), any row stride, is filled if given. Returns
    (M, out_features) of out_dtype.
    """
    m, k = qx.shape
    if qx.dtype != torch.int8 or k != in_features:
        raise ValueError(f"w4a8 needs int8 activations of {in_features} features, not {qx.dtype} of {k}")
    tile = lookup("w4a8", out_features, k, m, qx)
    return tiled_product(qx, s_x, tiled, meta, out_features, bias, out_dtype, channel, tile, out)


def tiled_product(
    qx: Tensor,
    s_x: Tensor,
    tiled: Tensor,
    meta: Tensor,
    n: int,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    channel: bool,
    tile: Tile,
    out: Tensor | None = None,
) -> Tensor:
    """The kernel on a tiled weight of n output features. Returns (M, n), `out` if given."""
    out = output(out, qx.shape[0], n, out_dtype, qx.device)
    groups = 0 if channel else meta.shape[0] // tiled.shape[1]
    own = {"meta": meta, "meta_n": meta.shape[1], "s_x": s_x, "GROUPS": groups}
    run_tiled(w4a8_kernel, qx, tiled, bias, out, tile, False, ASM=not INTERPRETED, STAGES=tile.stages, **own)
    return out
