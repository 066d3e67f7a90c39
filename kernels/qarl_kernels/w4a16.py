"""y = x @ ((codes - zero) * scale)^T: int4 weights, 16-bit activations, FP32 accumulation.

Three ways to the same bits, of which the tuned table picks one by M:

- `narrow` (decode): mma.sync on 16 weight rows a warp. Eight products of 16 input features follow each other, one per
  nibble of the words, so that nothing is shuffled: a thread's words are its matrix fragment.
- `wide`: wgmma with the dequantized weight as the register operand and x from shared memory (y^T = W x^T).
- `dequantized`: codes to 16-bit values once, then `gemm.dense`.

The weight's value is rounded once, (code - zero) * scale, as in the reference, and K is never split: the tensor core
adds 16 products at a time, in order, whichever instruction runs it. mma.sync, wgmma with either operand order and
cuBLAS without split-K agree bit for bit (seen on H100, and tested), so the three ways are one function.

The fused ways read the tiled form of a weight, see `qarl_kernels.tile`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from qarl_kernels import gemm
from qarl_kernels.blocks import int4_rows, tile_of
from qarl_kernels.casts import narrow
from qarl_kernels.dequantize import dequantize_int4
from qarl_kernels.launch import INTERPRETED
from qarl_kernels.output import output
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
def _planes(words, meta, stride, DTYPE: tl.constexpr, GROUPS: tl.constexpr, ASM: tl.constexpr):
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
    if ASM:
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


@triton.jit
def narrow_sum(
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
):
    """y^T (BLOCK_N, BLOCK_M) fp32 by eight products of 16 features a block.

    rows: pointers to the rows of x (BLOCK_M, 1), read where `live`; words (BLOCK_N, 16), metas (BLOCK_N,): to those of
    the weight.
    """
    rk = tl.arange(0, 16)[None, :]
    rows += rk
    acc = tl.zeros((words.shape[0], BLOCK_M), dtype=tl.float32)
    for block in range(tl.cdiv(K, 128)):
        w = tl.load(words + block * 256)
        k = block * 128
        at = rows + k
        k += rk
        xs = x_planes(at, live, k, K, EVEN)
        planes = _planes(w, metas + block * GROUPS * meta_n, meta_n, rows.dtype.element_ty, GROUPS, ASM)
        acc = eight_products(acc, planes, xs)
    return acc


@triton.jit
def wide_sum(
    x,
    m,
    words,
    metas,
    K,
    meta_n,
    BLOCK_M: tl.constexpr,
    DTYPE: tl.constexpr,
    GROUPS: tl.constexpr,
    EVEN: tl.constexpr,
    ASM: tl.constexpr,
    TMA: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """As `narrow_sum`, by warpgroup products, for BLOCK_N >= 64. x, m: see `qarl_kernels.planes.x_tile`."""
    acc = tl.zeros((words.shape[0], BLOCK_M), dtype=tl.float32)
    for block in range(tl.cdiv(K, 128)):
        w = tl.load(words + block * 256)
        planes = _planes(w, metas + block * GROUPS * meta_n, meta_n, DTYPE, GROUPS, ASM)
        acc = wide_product(acc, planes, x, m, block * 128, K, EVEN, TMA, SPLIT)
    return acc


@triton.jit(do_not_specialize=["M"])
def narrow_kernel(
    x,
    tiled,
    meta,
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
):
    """x (M, K); tiled (N/16, K/128, 16, 16) int32; meta (K/128 * GROUPS, meta_n) int32; out (M, N)."""
    num_m = tl.cdiv(M, BLOCK_M)
    num_n = tl.cdiv(N, BLOCK_N)
    pid_m, pid_n = tile_of(tl.program_id(0), num_m, num_n)
    rn = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    rm = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    live = (rm < M)[:, None]
    words, row = int4_rows(tiled, rn, K, meta_n)
    rows = x + rm.to(tl.int64)[:, None] * stride_xm
    acc = narrow_sum(rows, live, words, meta + row, K, meta_n, BLOCK_M, GROUPS, EVEN, ASM)
    store(acc, out, bias, pid_m * BLOCK_M, pid_n * BLOCK_N, M, N, stride_om, BIAS, False)


@triton.jit(do_not_specialize=["M"])
def wide_kernel(
    x,
    tiled,
    meta,
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
    TMA: tl.constexpr,
    TMA_OUT: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """As `narrow_kernel`, by warpgroup products, for BLOCK_N >= 64. `qarl_kernels.planes` explains TMA and SPLIT."""
    pid_m, pid_n = tile_of(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N))
    m = pid_m * BLOCK_M
    rn = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    words, row = int4_rows(tiled, rn, K, meta_n)
    DTYPE: tl.constexpr = x.dtype if TMA else x.dtype.element_ty
    rows = x_rows(x, m, M, stride_xm, BLOCK_M, TMA)
    acc = wide_sum(rows, m, words, meta + row, K, meta_n, BLOCK_M, DTYPE, GROUPS, EVEN, ASM, TMA, SPLIT)
    store(acc, out, bias, m, pid_n * BLOCK_N, M, N, stride_om, BIAS, TMA_OUT)


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
) -> Tensor:
    """y = x @ bf16((codes - zero) * scale)^T + bias.

    x: (M, K) bf16 or fp16, any row stride. packed: (N, ceil(K / 8)) int32, scale: (N, groups), zero_point:
    (ceil(N / 8), groups) int32 or None, as compressed-tensors stores them. tiled, meta: the tiled form of the same
    weight (`qarl_kernels.tile`), or None: then every M goes the `dequantized` way. packed may be None where tiled and
    meta are there. bias: (N,). out: (M, N), any row stride, is filled if given. Returns (M, N).
    """
    m, k = x.shape
    n = scale.shape[0]
    if packed is not None and packed.shape[1] != -(-k // 8):
        raise ValueError(f"x has {k} features and the weight {packed.shape[1] * 8} packed ones; they must agree")
    tile = lookup("w4a16", n, k, m, x)
    if tile.way == "dequantized" or tiled is None or meta is None:
        if packed is None:  # put back in order first, a tenth of what follows
            assert tiled is not None, "w4a16 needs the weight packed or tiled"
            packed = untile_int4(tiled, n, k)
        return gemm.dense(x, dequantize_int4(packed, scale, zero_point, k, x.dtype), bias, out_dtype, out)
    return fused(x, tiled, meta, n, bias, out_dtype or (x if out is None else out).dtype, tile, out)


def fused(
    x: Tensor,
    tiled: Tensor,
    meta: Tensor,
    n: int,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    tile: Tile,
    out: Tensor | None = None,
) -> Tensor:
    """The narrow or wide kernel on a tiled weight of n output features. Returns (M, n), `out` if given."""
    out = output(out, x.shape[0], n, out_dtype, x.device)
    wide = tile.way == "wide"
    own = {"meta": meta, "meta_n": meta.shape[1], "GROUPS": meta.shape[0] // tiled.shape[1], "ASM": not INTERPRETED}
    run_tiled(wide_kernel if wide else narrow_kernel, x, tiled, bias, out, tile, wide, **own)
    return out
