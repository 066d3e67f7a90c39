"""y = x @ ((codes - zero) * scale)^T: int4 weights, 16-bit activations, FP32 accumulation; dense or grouped by expert.

Three ways to the same bits; the tuned table picks one by the number of rows:

- `narrow` (decode): mma.sync on 16 weight rows per warp. Eight products of 16 input features follow each other, one
  per nibble of the words, so nothing is shuffled: a thread's words are its matrix fragment.
- `wide`: wgmma with the dequantized weight as the register operand and x from shared memory (y^T = W x^T).
- `dequantized`: codes to 16-bit values once, then `gemm.dense`.

The weight's value is rounded once, (code - zero) * scale, as in the reference, and K is never split: the tensor core
adds 16 products at a time, in order, whichever instruction runs it. mma.sync, wgmma with either operand order and
cuBLAS without split-K agree bit for bit (seen on H100, and tested), so the three ways are one function.

`narrow` and `wide` read the tiled form of a weight, see `qarl_kernels.tile`. A grouped product's programs each take
rows of one expert (`blocks.program_tile`); the rest of the kernel is the same, and so are the bits of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from qarl_kernels import gemm
from qarl_kernels.blocks import COMPILED, int4_rows, program_tile, source_rows
from qarl_kernels.casts import narrow
from qarl_kernels.dequantize import dequantize_int4
from qarl_kernels.integers import cdiv
from qarl_kernels.moe.groups import Groups, output_features, output_rows
from qarl_kernels.planes import eight_products, run_tiled, store, wide_product, x_planes, x_rows
from qarl_kernels.plans import planned
from qarl_kernels.tile import untile_int4
from qarl_kernels.tuning import Tile, lookup

WORDS = 16  # words of one row in it; nibble j of word w belongs to feature 16 j + w


def _planes_asm(scales: int, half: bool) -> tuple[str, str]:
    """PTX that turns two words into eight pairs of 16-bit weights, and its constraints.

    Operands: eight outputs (pairs), two words, `scales` pairs of scales, as many of offsets. A nibble u is placed in
    the mantissa of B (128 in bf16, 1024 in fp16), which makes B + u without a conversion; offset = -(B + zero), so the
    first fused multiply-add is exact, and the second (times scale, plus -0) rounds once.
    """
    kind, magic, one = ("f16x2", "0x64006400", "0x3C003C00") if half else ("bf16x2", "0x43004300", "0x3F803F80")
    lines = [
        ".reg .b32 even, odd, mask, base, one, zero;",
        f"mov.b32 mask, 0x000F000F; mov.b32 base, {magic}; mov.b32 one, {one}; mov.b32 zero, 0x80008000;",
        "prmt.b32 even, $8, $9, 0x5410; prmt.b32 odd, $8, $9, 0x7632;",
    ]
    for j in range(8):
        source = "even" if j < 4 else "odd"
        lines.append(f"lop3.b32 ${j}, {source}, mask, base, 0xEA;")
        if j % 4 != 3:
            lines.append(f"shr.u32 {source}, {source}, 4;")
    for j in range(8):
        scale = 10 + j * scales // 8
        lines.append(f"fma.rn.{kind} ${j}, ${j}, one, ${scale + scales}; fma.rn.{kind} ${j}, ${j}, ${scale}, zero;")
    return "{\n" + "\n".join(lines) + "\n}", ",".join(["=r"] * 8 + ["r"] * (2 + 2 * scales))


_BF16_1, _ARGS_1 = (tl.constexpr(text) for text in _planes_asm(1, half=False))
_BF16_2, _ARGS_2 = (tl.constexpr(text) for text in _planes_asm(2, half=False))
_BF16_4, _ARGS_4 = (tl.constexpr(text) for text in _planes_asm(4, half=False))
_EIGHT_BF16, _EIGHT_FP16 = tl.constexpr((tl.bfloat16,) * 8), tl.constexpr((tl.float16,) * 8)
_FP16_1 = tl.constexpr(_planes_asm(1, half=True)[0])
_FP16_2 = tl.constexpr(_planes_asm(2, half=True)[0])
_FP16_4 = tl.constexpr(_planes_asm(4, half=True)[0])


@triton.jit
def _half_word(meta, shift: tl.constexpr, dtype: tl.constexpr, shape: tl.constexpr):
    """Bits [shift, shift + 16) of meta (BLOCK_N,) as `dtype`, broadcast to (BLOCK_N, WORDS)."""
    value = (meta >> shift).to(tl.int16).to(dtype, bitcast=True)
    return tl.broadcast_to(value[:, None], shape)


@triton.jit
def _plane(words, j: tl.constexpr, scale, offset, BASE: tl.constexpr):
    """The meaning of the assembly, one plane: ((BASE + nibble) + offset) * scale, rounded once."""
    value = ((words >> (4 * j)) & 0xF).to(tl.float32) + (offset.to(tl.float32) + BASE)
    return narrow(value * scale.to(tl.float32), scale.dtype)


@triton.jit
def _planes(words, meta, stride, DTYPE: tl.constexpr, GROUPS: tl.constexpr):
    """Eight planes (BLOCK_N, WORDS) of 16-bit weights, plane j holding features 16 j .. 16 j + 15 of the block.

    words: int32 (BLOCK_N, WORDS). meta: pointers (BLOCK_N,) to the block's first group; groups are `stride` apart.
    """
    BF16: tl.constexpr = DTYPE == tl.bfloat16
    BASE: tl.constexpr = 128.0 if BF16 else 1024.0
    SHAPE: tl.constexpr = words.shape
    OUT: tl.constexpr = _EIGHT_BF16 if BF16 else _EIGHT_FP16
    m0 = tl.load(meta)
    s0 = _half_word(m0, 0, DTYPE, SHAPE)
    o0 = _half_word(m0, 16, DTYPE, SHAPE)
    s1, o1, s2, o2, s3, o3 = s0, o0, s0, o0, s0, o0
    if GROUPS == 2:
        m1 = tl.load(meta + stride)
        s2 = _half_word(m1, 0, DTYPE, SHAPE)
        o2 = _half_word(m1, 16, DTYPE, SHAPE)
        s3, o3 = s2, o2
    if GROUPS == 4:
        m1 = tl.load(meta + stride)
        m2 = tl.load(meta + 2 * stride)
        m3 = tl.load(meta + 3 * stride)
        s1 = _half_word(m1, 0, DTYPE, SHAPE)
        o1 = _half_word(m1, 16, DTYPE, SHAPE)
        s2 = _half_word(m2, 0, DTYPE, SHAPE)
        o2 = _half_word(m2, 16, DTYPE, SHAPE)
        s3 = _half_word(m3, 0, DTYPE, SHAPE)
        o3 = _half_word(m3, 16, DTYPE, SHAPE)
    if COMPILED:
        if GROUPS == 1:
            p0, p1, p2, p3, p4, p5, p6, p7 = tl.inline_asm_elementwise(
                _BF16_1 if BF16 else _FP16_1, _ARGS_1, [words, s0, o0], dtype=OUT, is_pure=True, pack=2
            )
        elif GROUPS == 2:
            p0, p1, p2, p3, p4, p5, p6, p7 = tl.inline_asm_elementwise(
                _BF16_2 if BF16 else _FP16_2, _ARGS_2, [words, s0, s2, o0, o2], dtype=OUT, is_pure=True, pack=2
            )
        else:
            p0, p1, p2, p3, p4, p5, p6, p7 = tl.inline_asm_elementwise(
                _BF16_4 if BF16 else _FP16_4,
                _ARGS_4,
                [words, s0, s1, s2, s3, o0, o1, o2, o3],
                dtype=OUT,
                is_pure=True,
                pack=2,
            )
    else:
        p0 = _plane(words, 0, s0, o0, BASE)
        p1 = _plane(words, 1, s0, o0, BASE)
        p2 = _plane(words, 2, s1, o1, BASE)
        p3 = _plane(words, 3, s1, o1, BASE)
        p4 = _plane(words, 4, s2, o2, BASE)
        p5 = _plane(words, 5, s2, o2, BASE)
        p6 = _plane(words, 6, s3, o3, BASE)
        p7 = _plane(words, 7, s3, o3, BASE)
    return p0, p1, p2, p3, p4, p5, p6, p7


@triton.jit(do_not_specialize=["M"])
def narrow_kernel(
    x,  # (M, K) bf16 or fp16; (T, K) with `order`
    tiled,  # (ceil(N / 16), ceil(K / 128), 16, 16) i32, with experts (EXPERTS * N, K)
    meta,  # (ceil(K / 128) * GROUPS, meta_n) i32
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
    GROUPS: tl.constexpr,  # that a block of 128 features has scales of: 1, 2 or 4
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
        source = rm if order is None else source_rows(order, rm, end, SLOTS)
        rk = tl.arange(0, 16)[None, :]
        rows = x + source.to(tl.int64)[:, None] * stride_xm + rk
        acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
        for block in range(tl.cdiv(K, 128)):
            w = tl.load(words + block * 256)
            xs = x_planes(rows + block * 128, live, block * 128 + rk, K, EVEN)
            planes = _planes(w, meta + row + block * GROUPS * meta_n, meta_n, x.dtype.element_ty, GROUPS)
            acc = eight_products(acc, planes, xs)
        store(acc, out, bias, m, n, end, N, stride_om, False)


@triton.jit(do_not_specialize=["M"])
def wide_kernel(
    x,  # as in `narrow_kernel`, or a descriptor (TMA)
    tiled,
    meta,
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
    TMA: tl.constexpr,  # `qarl_kernels.planes` explains TMA and SPLIT
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
            planes = _planes(w, meta + row + block * GROUPS * meta_n, meta_n, DTYPE, GROUPS)
            acc = wide_product(acc, planes, rows, m, block * 128, K, EVEN, TMA, SPLIT)
        store(acc, out, bias, m, n, end, N, stride_om, TMA_OUT)


@planned
def w4a16(
    x: Tensor,
    packed: Tensor | None,
    scale: Tensor,
    zero_point: Tensor | None,
    tiled: Tensor | None,
    meta: Tensor | None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    groups: Groups | None = None,
    gathered: bool = False,
    tile: Tile | None = None,
) -> Tensor:
    """y = x @ ((codes - zero) * scale rounded to x's dtype)^T + bias, dense or per expert.

    Args:
        x: (M, K) bf16 or fp16, any row stride. With groups one row per sorted pair; if gathered (T, K), one per token.
        packed: (N, ceil(K / 8)) int32, as compressed-tensors stores it. May be None if tiled and meta are given.
        scale: (N, K / group).
        zero_point: (ceil(N / 8), K / group) int32, or None.
        tiled, meta: The same weight as `qarl_kernels.tile` arranges it. Without them every M is dequantized first.
        bias: (N,), or None. Grouped products have none.
        out_dtype: Of the result. Default: out's dtype, else x's.
        out: (M, N) to fill, any row stride, or None.
        groups: Rows belong to experts; the weight is then that of all experts, concatenated, and N counts one expert.
        tile: For tests and tuning; changes no bit. Default: the tuned one.

    Returns:
        (M, N) of out_dtype; with groups in sorted order.

    Raises:
        ValueError: Shapes do not fit each other or the groups.
    """
    m, k, n = output_rows(x, groups, gathered), x.shape[1], output_features(len(scale), groups)
    if packed is not None and packed.shape[1] != cdiv(k, 8):
        raise ValueError(f"x has {k} features and the weight {packed.shape[1] * 8} packed ones; they must agree")
    tile = tile or lookup("w4a16", n, k, m, x, groups=groups, gathered=gathered)
    if tile.way == "dequantized" or tiled is None or meta is None:
        if packed is None:  # untiling takes a tenth of the time of what follows
            assert tiled is not None, "w4a16 needs the weight packed or tiled"
            packed = untile_int4(tiled, len(scale), k)
        weight = dequantize_int4(packed, scale, zero_point, k, x.dtype)
        return gemm.dense(x, weight, bias, out_dtype, out, groups, gathered)
    wide = tile.way == "wide"
    own = {"meta": meta, "meta_n": meta.shape[1], "GROUPS": meta.shape[0] // tiled.shape[1]}
    kernel, dtype = wide_kernel if wide else narrow_kernel, out_dtype or (x if out is None else out).dtype
    return run_tiled(kernel, x, tiled, n, bias, out, dtype, tile, groups, gathered, wide, **own)
