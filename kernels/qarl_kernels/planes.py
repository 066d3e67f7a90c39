"""4-bit weights in registers: words of the tiled form (`qarl_kernels.tile`) to eight planes of 16-bit values.

Plane j of a block holds nibble j of each word, which are 16 adjacent input features. Inline PTX computes all eight
planes of two words at once. A version in plain Triton defines the results, and runs in the interpreter.
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


# Index: number of groups (1, 2 or 4) // 2.
_INT4_BF16 = tl.constexpr(tuple(_int4_asm(groups, half=False)[0] for groups in (1, 2, 4)))
_INT4_FP16 = tl.constexpr(tuple(_int4_asm(groups, half=True)[0] for groups in (1, 2, 4)))
_INT4_ARGS = tl.constexpr(tuple(_int4_asm(groups, half=True)[1] for groups in (1, 2, 4)))


@triton.jit
def _scale_and_offset(meta, dtype: tl.constexpr, shape: tl.constexpr):
    """The low and the high half of meta (BLOCK_N,) i32 as 16-bit floats, broadcast to (BLOCK_N, 16)."""
    scale = meta.to(tl.int16).to(dtype, bitcast=True)
    offset = (meta >> 16).to(tl.int16).to(dtype, bitcast=True)
    return tl.broadcast_to(scale[:, None], shape), tl.broadcast_to(offset[:, None], shape)


@triton.jit
def _int4_plane(words, j: tl.constexpr, scale, offset, BASE: tl.constexpr):
    """One plane as the assembly computes it: ((BASE + nibble) + offset) * scale, rounded once."""
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
    metas, scales, offsets = (), (), ()
    for group in tl.static_range(GROUPS):
        metas += (tl.load(meta + group * stride),)
    for group in tl.static_range(GROUPS):
        scale, offset = _scale_and_offset(metas[group], DTYPE, words.shape)
        scales += (scale,)
        offsets += (offset,)
    if COMPILED:
        ASM: tl.constexpr = _INT4_BF16[GROUPS // 2] if BF16 else _INT4_FP16[GROUPS // 2]
        inputs = (words,)
        inputs += scales + offsets
        planes = tl.inline_asm_elementwise(ASM, _INT4_ARGS[GROUPS // 2], inputs, dtype=OUT, is_pure=True, pack=2)
    else:
        planes = ()
        for j in tl.static_range(8):
            planes += (_int4_plane(words, j, scales[j * GROUPS // 8], offsets[j * GROUPS // 8], BASE),)
    return planes


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
    """One plane as the assembly computes it: code * scale, exact in DTYPE. scales: words of four scales (BLOCK_N, 1).

    Read as fp16, the shifted bits are code * 2^-14 and scale * 2^-8; 4194304 = 2^22 undoes both.
    """
    nibble = words >> (4 * j)
    code = (((nibble & 8) << 12) | ((nibble & 7) << 9)).to(tl.int16).to(tl.float16, bitcast=True)
    scale = (((scales >> (8 * (j % 4))) & 0xFF) << 7).to(tl.int16).to(tl.float16, bitcast=True)
    return narrow(code.to(tl.float32) * (scale.to(tl.float32) * 4194304.0), DTYPE)


@triton.jit
def nvfp4_planes(words, scales, width, DTYPE: tl.constexpr):
    """Eight planes (BLOCK_N, 16) of code * scale, plane j holding features 16 j .. 16 j + 15 of the block.

    words: int32 (BLOCK_N, 16). scales: pointers (BLOCK_N,) to the words of the block's first four scales; the words of
    the other four are `width` words later.
    """
    first = tl.load(scales)[:, None]
    last = tl.load(scales + width)[:, None]
    if COMPILED:
        planes = tl.inline_asm_elementwise(
            _NVFP4_BF16 if DTYPE == tl.bfloat16 else _NVFP4_FP16,
            _NVFP4_ARGS,
            [words, tl.broadcast_to(first, words.shape), tl.broadcast_to(last, words.shape)],
            dtype=_EIGHT_BF16 if DTYPE == tl.bfloat16 else _EIGHT_FP16,
            is_pure=True,
            pack=2,
        )
    else:
        planes = ()
        for j in tl.static_range(8):
            planes += (_nvfp4_plane(words, j, first if j < 4 else last, DTYPE),)
    return planes


@triton.jit
def four_planes(planes, first: tl.constexpr):
    """Concatenate planes `first` to `first` + 3, (BLOCK_N, 16) each, to (BLOCK_N, 64)."""
    # (BLOCK_N, 16, 2, 2): the last axes are the bits of a plane's number
    q = tl.join(tl.join(planes[first], planes[first + 2]), tl.join(planes[first + 1], planes[first + 3]))
    return q.permute(0, 2, 3, 1).reshape(q.shape[0], 64)


@triton.jit
def eight_planes(planes):
    """Concatenate all eight planes to (BLOCK_N, 128)."""
    even = tl.join(tl.join(planes[0], planes[4]), tl.join(planes[2], planes[6]))
    odd = tl.join(tl.join(planes[1], planes[5]), tl.join(planes[3], planes[7]))
    return tl.join(even, odd).permute(0, 2, 3, 4, 1).reshape(even.shape[0], 128)
