"""y = (x @ (codes * scale)^T) / global scale: NVFP4 weights, 16-bit activations, FP32 accumulation.

Three ways to the same bits, as in `qarl_kernels.w4a16`, whose tiles these are (`qarl_kernels.tile`): plane j of a tile,
nibble j of its words, holds 16 neighbouring features, which is a group with one scale.

- `narrow` (decode): mma.sync on 16 weight rows a warp, eight products of a plane each.
- `wide`: wgmma with the weight as the register operand.
- `dequantized`: codes * scale to a matrix once, then `gemm`'s kernel.

Where no table has tiles for it, the defaults of w4a16 serve, whose kernels have the same shape.

A weight is multiplied as code * scale, which 16 bits hold exactly, so nothing is rounded before the tensor core; the
sum in float32 is multiplied by fl(1 / global scale), bias is added, and the result rounded once. K is never split.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from qarl_kernels import gemm, tuning
from qarl_kernels.blocks import COMPILED, int4_rows, tile_of
from qarl_kernels.casts import narrow
from qarl_kernels.dequantize import check_stored
from qarl_kernels.nvfp4_weights import scaled_nvfp4
from qarl_kernels.output import output
from qarl_kernels.planes import eight_products, run_tiled, store, wide_product, x_planes, x_rows
from qarl_kernels.plans import planned
from qarl_kernels.tile import COLUMNS, ROWS, tile_int4, untile_int4
from qarl_kernels.tuning import Tile


def _planes_asm(half: bool) -> str:
    """PTX that turns two words of codes and the two words of their eight scales into eight pairs of 16-bit weights.

    Operands: eight outputs (pairs), two words, and the words of the first and of the last four scales, each of them
    twice because both elements of a pair have it. A nibble's sign, exponent and mantissa are moved to where a 16-bit
    float has them, which makes code * 2^-126 (in fp16 2^-14); bits of e4m3 likewise, which makes scale * 2^-120 (2^-8);
    subnormals agree. Multiplying by the powers of two is exact, and so is the product of code and scale.
    """
    if half:
        kind, mantissa, magnitude, byte, code, scale = "f16x2", 9, "0x0E000E00", 7, "0x74007400", "0x5C005C00"
    else:
        kind, mantissa, magnitude, byte, code, scale = "bf16x2", 6, "0x01C001C0", 4, "0x7E807E80", "0x7B807B80"
    lines = [
        ".reg .b32 even, odd, sign, size, part, up, step, steps, none, zero;",
        f"mov.b32 sign, 0x80008000; mov.b32 size, {magnitude}; mov.b32 none, 0; mov.b32 zero, 0x80008000;",
        f"mov.b32 up, {code}; mov.b32 steps, {scale};",
        "prmt.b32 even, $8, $9, 0x5410; prmt.b32 odd, $8, $9, 0x7632;",
    ]
    for j in range(8):
        source, place = ("even", 4 * j) if j < 4 else ("odd", 4 * (j - 4))
        shift = mantissa - place
        lines += [
            f"{'shl' if shift >= 0 else 'shr'}.b32 part, {source}, {abs(shift)}; and.b32 part, part, size;",
            f"shl.b32 ${j}, {source}, {12 - place}; lop3.b32 ${j}, ${j}, sign, part, 0xEA;",  # (a & b) | c
            f"prmt.b32 step, ${10 if j < 4 else 12}, none, 0x4{j % 4}4{j % 4}; shl.b32 step, step, {byte};",
            f"fma.rn.{kind} step, step, steps, zero; fma.rn.{kind} ${j}, ${j}, up, zero;",
            f"fma.rn.{kind} ${j}, ${j}, step, zero;",
        ]
    return "{\n" + "\n".join(lines) + "\n}"


_BF16, _FP16 = tl.constexpr(_planes_asm(half=False)), tl.constexpr(_planes_asm(half=True))
_ARGUMENTS = tl.constexpr(",".join(["=&r"] * 8 + ["r"] * 6))
_EIGHT_BF16, _EIGHT_FP16 = tl.constexpr((tl.bfloat16,) * 8), tl.constexpr((tl.float16,) * 8)


@triton.jit
def _plane(words, j: tl.constexpr, scales, DTYPE: tl.constexpr):
    """The meaning of the assembly, one plane: code * scale, exact in DTYPE. scales: words of four scales (BLOCK_N, 1).

    The bits of code and scale make halves of them times 2^-14 and 2^-8.
    """
    nibble = words >> (4 * j)
    code = (((nibble & 8) << 12) | ((nibble & 7) << 9)).to(tl.int16).to(tl.float16, bitcast=True)
    scale = (((scales >> (8 * (j % 4))) & 0xFF) << 7).to(tl.int16).to(tl.float16, bitcast=True)
    return narrow(code.to(tl.float32) * (scale.to(tl.float32) * 4194304.0), DTYPE)


@triton.jit
def _planes(words, scales, width, DTYPE: tl.constexpr):
    """Eight planes (BLOCK_N, 16) of code * scale, plane j holding features 16 j .. 16 j + 15 of the block.

    words: int32 (BLOCK_N, 16). scales: pointers (BLOCK_N,) to the words of the block's first four scales; the other
    four are `width` on.
    """
    first = tl.load(scales)[:, None]
    last = tl.load(scales + width)[:, None]
    if COMPILED:
        p0, p1, p2, p3, p4, p5, p6, p7 = tl.inline_asm_elementwise(
            _BF16 if DTYPE == tl.bfloat16 else _FP16,
            _ARGUMENTS,
            [words, tl.broadcast_to(first, words.shape), tl.broadcast_to(last, words.shape)],
            dtype=_EIGHT_BF16 if DTYPE == tl.bfloat16 else _EIGHT_FP16,
            is_pure=True,
            pack=2,
        )
    else:
        p0 = _plane(words, 0, first, DTYPE)
        p1 = _plane(words, 1, first, DTYPE)
        p2 = _plane(words, 2, first, DTYPE)
        p3 = _plane(words, 3, first, DTYPE)
        p4 = _plane(words, 4, last, DTYPE)
        p5 = _plane(words, 5, last, DTYPE)
        p6 = _plane(words, 6, last, DTYPE)
        p7 = _plane(words, 7, last, DTYPE)
    return p0, p1, p2, p3, p4, p5, p6, p7


@triton.jit
def narrow_sum(rows, live, words, scales, global_scale, K, width, BLOCK_M: tl.constexpr, EVEN: tl.constexpr):
    """y^T (BLOCK_N, BLOCK_M) fp32 by eight products of 16 features a block, divided by the global scale.

    rows: pointers to the rows of x (BLOCK_M, 1), read where `live`; words (BLOCK_N, 16), scales (BLOCK_N,): to those of
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
        planes = _planes(w, scales + block * 2 * width, width, rows.dtype.element_ty)
        acc = eight_products(acc, planes, xs)
    return acc * tl.div_rn(1.0, tl.load(global_scale))


@triton.jit
def wide_sum(
    x,
    m,
    words,
    scales,
    global_scale,
    K,
    width,
    BLOCK_M: tl.constexpr,
    DTYPE: tl.constexpr,
    EVEN: tl.constexpr,
    TMA: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """As `narrow_sum`, by warpgroup products, for BLOCK_N >= 64. x, m: see `qarl_kernels.planes.x_tile`."""
    acc = tl.zeros((words.shape[0], BLOCK_M), dtype=tl.float32)
    for block in range(tl.cdiv(K, 128)):
        w = tl.load(words + block * 256)
        planes = _planes(w, scales + block * 2 * width, width, DTYPE)
        acc = wide_product(acc, planes, x, m, block * 128, K, EVEN, TMA, SPLIT)
    return acc * tl.div_rn(1.0, tl.load(global_scale))


@triton.jit(do_not_specialize=["M"])
def narrow_kernel(
    x,
    tiled,
    scales,
    global_scale,
    bias,
    out,
    M,
    N,
    K,
    stride_xm,
    stride_om,
    width,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EVEN: tl.constexpr,
    BIAS: tl.constexpr,
):
    """x (M, K); tiled (N/16, K/128, 16, 16) int32; scales (K/64, width) int32; global_scale (1,) fp32; out (M, N)."""
    pid_m, pid_n = tile_of(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N))
    rn = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    rm = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    live = (rm < M)[:, None]
    words, row = int4_rows(tiled, rn, K, width)
    rows = x + rm.to(tl.int64)[:, None] * stride_xm
    acc = narrow_sum(rows, live, words, scales + row, global_scale, K, width, BLOCK_M, EVEN)
    store(acc, out, bias, pid_m * BLOCK_M, pid_n * BLOCK_N, M, N, stride_om, BIAS, False)


@triton.jit(do_not_specialize=["M"])
def wide_kernel(
    x,
    tiled,
    scales,
    global_scale,
    bias,
    out,
    M,
    N,
    K,
    stride_xm,
    stride_om,
    width,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EVEN: tl.constexpr,
    BIAS: tl.constexpr,
    TMA: tl.constexpr,
    TMA_OUT: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """As `narrow_kernel`, by warpgroup products, for BLOCK_N >= 64. `qarl_kernels.planes` explains TMA and SPLIT."""
    pid_m, pid_n = tile_of(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N))
    m = pid_m * BLOCK_M
    rn = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    words, row = int4_rows(tiled, rn, K, width)
    DTYPE: tl.constexpr = x.dtype if TMA else x.dtype.element_ty
    rows = x_rows(x, m, M, stride_xm, BLOCK_M, TMA)
    acc = wide_sum(rows, m, words, scales + row, global_scale, K, width, BLOCK_M, DTYPE, EVEN, TMA, SPLIT)
    store(acc, out, bias, m, pid_n * BLOCK_N, M, N, stride_om, BIAS, TMA_OUT)


@torch.no_grad()
def tile_nvfp4(packed: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """A weight in the order in which the fused kernels read it.

    Args:
        packed: uint8 [N, K / 2], contiguous, as stored.
        scale: float8_e4m3fn [N, K / 16], contiguous, as stored.

    Returns:
        tiled: int32 [ceil(N / 16), ceil(K / 128), 16, 16], see `qarl_kernels.tile`.
        scales: int32 [2 * ceil(K / 128), 16 * ceil(N / 16)]: byte i of entry [h, n] is the scale of row n, features
            64 h + 16 i to 64 h + 16 i + 15; zero beyond N and K.

    Raises:
        ValueError: dtypes or shapes do not fit each other.
    """
    n, groups = scale.shape
    check_stored("weight_packed", packed, (torch.uint8,), (n, 8 * groups))
    check_stored("weight_scale", scale, (torch.float8_e4m3fn,), (n, groups))
    missing = 0, -groups % (COLUMNS // 16), 0, -n % ROWS
    scales = torch.nn.functional.pad(scale.view(torch.uint8), missing).view(torch.int32).t().contiguous()
    return tile_int4(packed.view(torch.int32), 16 * groups), scales


def untile_nvfp4(tiled: Tensor, out_features: int, in_features: int) -> Tensor:
    """`weight_packed`, uint8 [N, K / 2], of a weight that `tile_nvfp4` has put in order."""
    return untile_int4(tiled, out_features, in_features).view(torch.uint8)


@planned
def nvfp4a16(
    x: Tensor,
    packed: Tensor | None,
    scale: Tensor,
    global_scale: Tensor,
    tiled: Tensor,
    scales: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """y = (x @ (codes * scale)^T) / global_scale + bias.

    x: (M, K) bf16 or fp16, any row stride. packed: (N, K / 2) uint8, scale: (N, K / 16) float8_e4m3fn, global_scale:
    (1,) float32, as compressed-tensors stores them. tiled, scales: the same weight as `tile_nvfp4` orders it; packed
    may be None, and is then made from tiled where the product needs it. bias: (N,). out: (M, N), any row stride, is
    filled if given. Returns (M, N) of out_dtype (out's, else x's).
    """
    m, k = x.shape
    n, groups = scale.shape
    if groups * 16 != k:
        raise ValueError(f"x has {k} features and the weight {groups * 16}; they must agree")
    tile = tuning.lookup("nvfp4a16", n, k, m, x)
    dtype = out_dtype or (x if out is None else out).dtype
    if tile.way == "dequantized":
        packed = untile_nvfp4(tiled, n, k) if packed is None else packed
        return dequantized(x, packed, scale, global_scale, bias, dtype, out)
    return fused(x, tiled, scales, global_scale, n, bias, dtype, tile, out)


def dequantized(
    x: Tensor,
    packed: Tensor,
    scale: Tensor,
    global_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    out: Tensor | None = None,
) -> Tensor:
    """The product over codes * scale as a matrix of x's dtype. Returns (M, N), `out` if given."""
    weight = scaled_nvfp4(packed, scale, x.dtype)
    (m, k), n = x.shape, len(weight)
    if x.stride(1) != 1:
        x = x.contiguous()
    out = output(out, m, n, out_dtype, x.device)
    ones = torch.ones(m, 1, dtype=torch.float32, device=x.device)
    divided = global_scale.reciprocal().expand(n).contiguous()
    tile = tuning.lookup("dense", n, k, m, x, library=False)  # the library's products have no scales
    gemm.run(x, weight, ones, divided, bias, out, tile)
    return out


def fused(
    x: Tensor,
    tiled: Tensor,
    scales: Tensor,
    global_scale: Tensor,
    n: int,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    tile: Tile,
    out: Tensor | None = None,
) -> Tensor:
    """The narrow or wide kernel on a tiled weight of n output features. Returns (M, n), `out` if given."""
    out = output(out, x.shape[0], n, out_dtype, x.device)
    wide = tile.way == "wide"
    own = {"scales": scales, "global_scale": global_scale, "width": scales.shape[1]}
    run_tiled(wide_kernel if wide else narrow_kernel, x, tiled, bias, out, tile, wide, **own)
    return out
