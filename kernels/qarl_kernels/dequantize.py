"""Triton kernels that dequantize stored weights: (code - zero point) * scale in FP32, rounded once.

Bit-equal to `qarl_formats.weight.LowBitWeight.dequantize`. Each thread writes 16 bytes of bf16 or fp16.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from qarl_kernels.casts import narrow, widen
from qarl_kernels.integers import cdiv, next_power_of_2
from qarl_kernels.launch import launch
from qarl_kernels.reference import FP8_BLOCK
from qarl_kernels.shapes import check_tensor

TILE = 2048  # values per program: 8 in each of 256 threads

# These bits or'ed with a nibble u are the float 12,582,912 + u. The difference of two of them is exact, and one
# addition is four times as fast as a conversion.
_AS_FLOAT = tl.constexpr(0x4B400000)


@triton.jit
def dequantize_int4_kernel(
    packed,  # (rows, words) i32
    scale,  # (rows, groups)
    zero_point,  # (ceil(rows / 8), groups) i32; not read if SYMMETRIC
    out,  # (rows, columns) bf16, fp16 or f32
    rows,
    columns,
    words,
    groups,
    WORDS_PER_GROUP: tl.constexpr,  # 0: each row is one group
    SYMMETRIC: tl.constexpr,
    RAGGED: tl.constexpr,  # columns is not a multiple of 8: a row's last word is partly used
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
):
    t = tl.arange(0, ROWS * WORDS)  # one axis: adjacent threads have adjacent words
    across = tl.cdiv(words, WORDS)  # programs per row; one grid axis, because the second is limited to 65,535
    row = (tl.program_id(0) // across * ROWS + t // WORDS).to(tl.int64)
    word = tl.program_id(0) % across * WORDS + t % WORDS
    inside = (row < rows) & (word < words)
    group = word * 0 if WORDS_PER_GROUP == 0 else word // WORDS_PER_GROUP
    value = tl.load(packed + row * words + word, mask=inside, other=0)
    step = widen(tl.load(scale + row * groups + group, mask=inside, other=0.0))
    if SYMMETRIC:
        zero = tl.full(t.shape, 8, tl.int32)
    else:
        zero = tl.load(zero_point + (row // 8) * groups + group, mask=inside, other=0)
        zero = (zero >> ((row % 8).to(tl.int32) * 4)) & 15
    zero = (zero | _AS_FLOAT).to(tl.float32, bitcast=True)

    eight = tl.arange(0, 8)[None, :]
    code = (((value[:, None] >> (eight * 4)) & 15) | _AS_FLOAT).to(tl.float32, bitcast=True) - zero[:, None]
    keep = inside[:, None]
    if RAGGED:
        keep = keep & (word[:, None] * 8 + eight < columns)
    target = (out + row * columns + word * 8)[:, None] + eight
    tl.store(target, narrow(code * step[:, None], out.dtype.element_ty), mask=keep)


@triton.jit
def dequantize_bytes_kernel(
    codes,  # (rows, columns) i8 or e4m3
    scale,  # (scale rows, scale_columns)
    out,  # (rows, columns) bf16, fp16 or f32
    rows,
    columns,
    scale_columns,
    BLOCK: tl.constexpr,  # rows and columns per scale; 0: one scale per row
    RAGGED: tl.constexpr,  # columns is not a multiple of 8
    ROWS: tl.constexpr,
    EIGHTS: tl.constexpr,
):
    t = tl.arange(0, ROWS * EIGHTS)  # each thread takes eight codes of a row
    across = tl.cdiv(columns, EIGHTS * 8)
    row = (tl.program_id(0) // across * ROWS + t // EIGHTS).to(tl.int64)
    first = (tl.program_id(0) % across * EIGHTS + t % EIGHTS) * 8
    inside = (row < rows) & (first < columns)
    source = row if BLOCK == 0 else (row // BLOCK) * scale_columns + first // BLOCK
    step = widen(tl.load(scale + source, mask=inside, other=0.0))
    eight = tl.arange(0, 8)[None, :]
    keep = inside[:, None]
    if RAGGED:
        keep = keep & (first[:, None] + eight < columns)
    offset = (row * columns + first)[:, None] + eight
    code = widen(tl.load(codes + offset, mask=keep, other=0.0))
    tl.store(out + offset, narrow(code * step[:, None], out.dtype.element_ty), mask=keep)


def _tile(columns: int) -> tuple[int, int]:
    """(rows, columns) per program."""
    width = min(TILE, next_power_of_2(max(columns, 8)))
    return TILE // width, width


def check_stored(name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...], shape: tuple[int, ...]) -> None:
    """Raise ValueError unless a stored tensor is contiguous and has this shape and one of these dtypes."""
    check_tensor(name, tensor, dtypes, shape, "pass the tensors of one quantized weight as they are stored")


FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@torch.no_grad()
def dequantize_int4(
    packed: Tensor, scale: Tensor, zero_point: Tensor | None, in_features: int, dtype: torch.dtype
) -> Tensor:
    """Dequantize packed int4 codes to `dtype` [N, K].

    Args:
        packed: int32 [N, ceil(K / 8)]. All tensors are contiguous.
        scale: bf16, fp16 or fp32 [N, groups]. Groups of a row are equally long; if there are several, their length is a
            multiple of 8.
        zero_point: int32 [ceil(N / 8), groups], or None if symmetric.
        in_features: K.
        dtype: bfloat16, float16 or float32.

    Raises:
        ValueError: dtypes or shapes do not fit each other.
    """
    n, words = len(packed), cdiv(in_features, 8)
    groups = scale.shape[-1]
    check_stored("packed", packed, (torch.int32,), (n, words))
    check_stored("scale", scale, FLOATS, (n, groups))
    if zero_point is not None:
        check_stored("zero_point", zero_point, (torch.int32,), (cdiv(n, 8), groups))
    if groups > 1 and in_features % (8 * groups):
        raise ValueError(f"scale has {groups} groups, which does not divide {in_features} input features into words")
    out = torch.empty(n, in_features, dtype=dtype, device=packed.device)
    rows, width = _tile(in_features)
    launch(
        dequantize_int4_kernel,
        (cdiv(words, width // 8) * cdiv(n, rows),),
        num_warps=8,
        packed=packed,
        scale=scale,
        zero_point=packed if zero_point is None else zero_point,
        out=out,
        rows=n,
        columns=in_features,
        words=words,
        groups=groups,
        WORDS_PER_GROUP=0 if groups == 1 else words // groups,
        SYMMETRIC=zero_point is None,
        RAGGED=in_features % 8 != 0,
        ROWS=rows,
        WORDS=width // 8,
    )
    return out


@torch.no_grad()
def dequantize_bytes(codes: Tensor, scale: Tensor, dtype: torch.dtype, in_blocks: bool = False) -> Tensor:
    """Dequantize int8 or float8_e4m3fn codes [N, K] to `dtype` [N, K].

    scale: bf16, fp16 or fp32 [N, 1], or one per 128 x 128 block if `in_blocks` (e4m3 only). Both tensors are
    contiguous. Raises ValueError if dtypes or shapes do not fit each other.
    """
    block = FP8_BLOCK if in_blocks else 0
    n, k = codes.shape
    check_stored("codes", codes, (torch.float8_e4m3fn,) if block else (torch.int8, torch.float8_e4m3fn), (n, k))
    check_stored("scale", scale, FLOATS, (cdiv(n, block), cdiv(k, block)) if block else (n, 1))
    out = torch.empty(n, k, dtype=dtype, device=codes.device)
    rows, width = _tile(k)
    launch(
        dequantize_bytes_kernel,
        (cdiv(k, width) * cdiv(n, rows),),
        num_warps=8,
        codes=codes,
        scale=scale,
        out=out,
        rows=n,
        columns=k,
        scale_columns=scale.shape[1],
        BLOCK=block,
        RAGGED=k % 8 != 0,
        ROWS=rows,
        EIGHTS=width // 8,
    )
    return out
