"""y = (x @ (codes * scale)^T) / global scale: NVFP4 weights, 16-bit activations, FP32 sums; dense or per expert.

Three ways to the same bits, as in `qarl_kernels.w4a16`, whose tiled form (`qarl_kernels.tile`) this is: plane j of a
tile, nibble j of its words, holds 16 neighbouring features, which are a group with one scale.

- `narrow` (decode): mma.sync on 16 weight rows per warp, eight products of one plane each.
- `wide`: wgmma with the weight as the register operand.
- `dequantized`: codes * scale to a matrix once, then `gemm`'s kernel.

Shapes that no table has take the defaults of w4a16, whose kernels have the same structure.

A weight is multiplied as code * scale, which 16 bits hold exactly, so nothing is rounded before the tensor core. The
FP32 sum is multiplied by fl(1 / global scale), bias is added, and the result is rounded once. K is never split.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from qarl_kernels import gemm, tuning
from qarl_kernels.blocks import COMPILED, int4_rows, program_tile, source_rows
from qarl_kernels.casts import narrow
from qarl_kernels.dequantize import check_stored
from qarl_kernels.moe.groups import Groups, output_features, output_rows
from qarl_kernels.nvfp4_weights import GROUP, scaled_nvfp4
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


@triton.jit(do_not_specialize=["M"])
def narrow_kernel(
    x,  # (M, K) bf16 or fp16; (T, K) with `order`
    tiled,  # (ceil(N / 16), ceil(K / 128), 16, 16) i32, with experts (EXPERTS * N, K)
    scales,  # (2 * ceil(K / 128), width) i32, see `tile_nvfp4`
    global_scale,  # (1,) f32
    bias,  # (N,) or None
    out,  # (M, N)
    order,  # (M,) i32 or None, see `blocks.source_rows`
    starts,  # (EXPERTS + 1,) i32 or None, see `blocks.program_tile`
    M,
    N,
    K,
    stride_xm,
    stride_om,
    width,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
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
        words, row = int4_rows(tiled, rn, K, width)
        source = rm if order is None else source_rows(order, rm, end, SLOTS)
        rk = tl.arange(0, 16)[None, :]
        rows = x + source.to(tl.int64)[:, None] * stride_xm + rk
        acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
        for block in range(tl.cdiv(K, 128)):
            w = tl.load(words + block * 256)
            xs = x_planes(rows + block * 128, live, block * 128 + rk, K, EVEN)
            planes = _planes(w, scales + row + block * 2 * width, width, x.dtype.element_ty)
            acc = eight_products(acc, planes, xs)
        acc *= tl.div_rn(1.0, tl.load(global_scale))
        store(acc, out, bias, m, n, end, N, stride_om, False)


@triton.jit(do_not_specialize=["M"])
def wide_kernel(
    x,  # as in `narrow_kernel`, or a descriptor (TMA)
    tiled,
    scales,
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
    width,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
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
        words, row = int4_rows(tiled, rn, K, width)
        DTYPE: tl.constexpr = x.dtype if TMA else x.dtype.element_ty
        rows = x_rows(x, order, m, end, stride_xm, SLOTS, BLOCK_M, TMA)
        acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
        for block in range(tl.cdiv(K, 128)):
            w = tl.load(words + block * 256)
            planes = _planes(w, scales + row + block * 2 * width, width, DTYPE)
            acc = wide_product(acc, planes, rows, m, block * 128, K, EVEN, TMA, SPLIT)
        acc *= tl.div_rn(1.0, tl.load(global_scale))
        store(acc, out, bias, m, n, end, N, stride_om, TMA_OUT)


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
    groups: Groups | None = None,
    gathered: bool = False,
    tile: Tile | None = None,
) -> Tensor:
    """y = (x @ (codes * scale)^T) / global_scale + bias, dense or per expert; all experts share the global scale.

    Args:
        x: (M, K) bf16 or fp16, any row stride. With groups one row per sorted pair; if gathered (T, K), one per token.
        packed: (N, K / 2) uint8, as compressed-tensors stores it. None: made from tiled if the product needs it.
        scale: (N, K / 16) float8_e4m3fn.
        global_scale: (1,) float32.
        tiled, scales: The same weight as `tile_nvfp4` arranges it.
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
    if scale.shape[1] * GROUP != k:
        raise ValueError(f"x has {k} features and the weight {scale.shape[1] * GROUP}; they must agree")
    tile = tile or tuning.lookup("nvfp4a16", n, k, m, x, groups=groups, gathered=gathered)
    dtype = out_dtype or (x if out is None else out).dtype
    if tile.way == "dequantized":
        packed = untile_nvfp4(tiled, len(scale), k) if packed is None else packed
        return dequantized(x, packed, scale, global_scale, bias, dtype, out, groups, gathered)
    wide = tile.way == "wide"
    own = {"scales": scales, "global_scale": global_scale, "width": scales.shape[1]}
    kernel = wide_kernel if wide else narrow_kernel
    return run_tiled(kernel, x, tiled, n, bias, out, dtype, tile, groups, gathered, wide, **own)


def dequantized(
    x: Tensor,
    packed: Tensor,
    scale: Tensor,
    global_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    out: Tensor | None = None,
    groups: Groups | None = None,
    gathered: bool = False,
) -> Tensor:
    """The product with codes * scale as a matrix of x's dtype, scaled in the epilogue. Returns (M, N), or `out`."""
    weight = scaled_nvfp4(packed, scale, x.dtype)
    m, n = output_rows(x, groups, gathered, bias), output_features(len(weight), groups)
    if x.stride(1) != 1:
        x = x.contiguous()
    out = output(out, m, n, out_dtype, x.device)
    ones = torch.ones(len(x), 1, dtype=torch.float32, device=x.device)
    divided = global_scale.reciprocal().expand(len(weight)).contiguous()
    # Not by the library, whose products have no scales.
    tile = tuning.lookup("dense", n, x.shape[1], m, x, library=False, groups=groups, gathered=gathered)
    gemm.run(x, weight, ones, divided, bias, out, tile, groups, gathered)
    return out
