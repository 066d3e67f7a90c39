"""4-bit weights in registers: words of the tiled form (`qarl_kernels.tile`) to eight planes of 16-bit values.

Plane j of a block holds nibble j of each word, which are 16 neighbouring input features. Inline PTX makes all eight
planes of two words at once; the same in plain Triton is its meaning, which the interpreter runs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from qarl_kernels.blocks import COMPILED
from qarl_kernels.casts import narrow

_EIGHT_BF16, _EIGHT_FP16 = tl.constexpr((tl.bfloat16,) * 8), tl.constexpr((tl.float16,) * 8)


def _int4_asm(scales: int, half: bool) -> tuple[str, str]:
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


_BF16_1, _ARGS_1 = (tl.constexpr(text) for text in _int4_asm(1, half=False))
_BF16_2, _ARGS_2 = (tl.constexpr(text) for text in _int4_asm(2, half=False))
_BF16_4, _ARGS_4 = (tl.constexpr(text) for text in _int4_asm(4, half=False))
_FP16_1 = tl.constexpr(_int4_asm(1, half=True)[0])
_FP16_2 = tl.constexpr(_int4_asm(2, half=True)[0])
_FP16_4 = tl.constexpr(_int4_asm(4, half=True)[0])


@triton.jit
def _scale_and_offset(meta, dtype: tl.constexpr, shape: tl.constexpr):
    """The low and the high half of meta (BLOCK_N,) i32 as 16-bit floats, broadcast to (BLOCK_N, 16)."""
    scale = meta.to(tl.int16).to(dtype, bitcast=True)
    offset = (meta >> 16).to(tl.int16).to(dtype, bitcast=True)
    return tl.broadcast_to(scale[:, None], shape), tl.broadcast_to(offset[:, None], shape)


@triton.jit
def _int4_plane(words, j: tl.constexpr, scale, offset, BASE: tl.constexpr):
    """The meaning of the assembly, one plane: ((BASE + nibble) + offset) * scale, rounded once."""
    value = ((words >> (4 * j)) & 0xF).to(tl.float32) + (offset.to(tl.float32) + BASE)
    return narrow(value * scale.to(tl.float32), scale.dtype)


@triton.jit
def int4_planes(words, meta, stride, DTYPE: tl.constexpr, GROUPS: tl.constexpr):
    """Eight planes (BLOCK_N, 16) of (code - zero) * scale, rounded once to DTYPE.

    words: (BLOCK_N, 16) i32. meta: pointers (BLOCK_N,) to the block's first group; its GROUPS (1, 2, 4) groups are
    `stride` apart, see `tile.meta_w4a16`.
    """
    BF16: tl.constexpr = DTYPE == tl.bfloat16
    BASE: tl.constexpr = 128.0 if BF16 else 1024.0
    OUT: tl.constexpr = _EIGHT_BF16 if BF16 else _EIGHT_FP16
    m0 = tl.load(meta)
    m1, m2, m3 = m0, m0, m0
    if GROUPS == 2:
        m2 = tl.load(meta + stride)
        m3 = m2
    if GROUPS == 4:
        m1 = tl.load(meta + stride)
        m2 = tl.load(meta + 2 * stride)
        m3 = tl.load(meta + 3 * stride)
    s0, o0 = _scale_and_offset(m0, DTYPE, words.shape)
    s1, o1 = _scale_and_offset(m1, DTYPE, words.shape)
    s2, o2 = _scale_and_offset(m2, DTYPE, words.shape)
    s3, o3 = _scale_and_offset(m3, DTYPE, words.shape)
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
        p0 = _int4_plane(words, 0, s0, o0, BASE)
        p1 = _int4_plane(words, 1, s0, o0, BASE)
        p2 = _int4_plane(words, 2, s1, o1, BASE)
        p3 = _int4_plane(words, 3, s1, o1, BASE)
        p4 = _int4_plane(words, 4, s2, o2, BASE)
        p5 = _int4_plane(words, 5, s2, o2, BASE)
        p6 = _int4_plane(words, 6, s3, o3, BASE)
        p7 = _int4_plane(words, 7, s3, o3, BASE)
    return p0, p1, p2, p3, p4, p5, p6, p7


def _nvfp4_asm(half: bool) -> str:
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


_NVFP4_BF16, _NVFP4_FP16 = tl.constexpr(_nvfp4_asm(half=False)), tl.constexpr(_nvfp4_asm(half=True))
_NVFP4_ARGS = tl.constexpr(",".join(["=&r"] * 8 + ["r"] * 6))


@triton.jit
def _nvfp4_plane(words, j: tl.constexpr, scales, DTYPE: tl.constexpr):
    """The meaning of the assembly, one plane: code * scale, exact in DTYPE. scales: words of four scales (BLOCK_N, 1).

    The bits of code and scale make halves of them times 2^-14 and 2^-8.
    """
    nibble = words >> (4 * j)
    code = (((nibble & 8) << 12) | ((nibble & 7) << 9)).to(tl.int16).to(tl.float16, bitcast=True)
    scale = (((scales >> (8 * (j % 4))) & 0xFF) << 7).to(tl.int16).to(tl.float16, bitcast=True)
    return narrow(code.to(tl.float32) * (scale.to(tl.float32) * 4194304.0), DTYPE)


@triton.jit
def nvfp4_planes(words, scales, width, DTYPE: tl.constexpr):
    """Eight planes (BLOCK_N, 16) of code * scale, plane j holding features 16 j .. 16 j + 15 of the block.

    words: int32 (BLOCK_N, 16). scales: pointers (BLOCK_N,) to the words of the block's first four scales; the other
    four are `width` on.
    """
    first = tl.load(scales)[:, None]
    last = tl.load(scales + width)[:, None]
    if COMPILED:
        p0, p1, p2, p3, p4, p5, p6, p7 = tl.inline_asm_elementwise(
            _NVFP4_BF16 if DTYPE == tl.bfloat16 else _NVFP4_FP16,
            _NVFP4_ARGS,
            [words, tl.broadcast_to(first, words.shape), tl.broadcast_to(last, words.shape)],
            dtype=_EIGHT_BF16 if DTYPE == tl.bfloat16 else _EIGHT_FP16,
            is_pure=True,
            pack=2,
        )
    else:
        p0 = _nvfp4_plane(words, 0, first, DTYPE)
        p1 = _nvfp4_plane(words, 1, first, DTYPE)
        p2 = _nvfp4_plane(words, 2, first, DTYPE)
        p3 = _nvfp4_plane(words, 3, first, DTYPE)
        p4 = _nvfp4_plane(words, 4, last, DTYPE)
        p5 = _nvfp4_plane(words, 5, last, DTYPE)
        p6 = _nvfp4_plane(words, 6, last, DTYPE)
        p7 = _nvfp4_plane(words, 7, last, DTYPE)
    return p0, p1, p2, p3, p4, p5, p6, p7


@triton.jit
def four_planes(p0, p1, p2, p3):
    """Planes of 16 features (BLOCK_N, 16) side by side, (BLOCK_N, 64)."""
    q = tl.join(tl.join(p0, p2), tl.join(p1, p3))  # (BLOCK_N, 16, 2, 2): the last axes are the bits of the number
    return q.permute(0, 2, 3, 1).reshape(p0.shape[0], 64)


@triton.jit
def eight_planes(p0, p1, p2, p3, p4, p5, p6, p7):
    """As `four_planes`, (BLOCK_N, 128)."""
    q = tl.join(tl.join(tl.join(p0, p4), tl.join(p2, p6)), tl.join(tl.join(p1, p5), tl.join(p3, p7)))
    return q.permute(0, 2, 3, 4, 1).reshape(p0.shape[0], 128)
