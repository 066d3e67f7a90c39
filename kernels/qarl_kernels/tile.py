"""The tiled form of 4-bit weights, which the fused products read: codes in tiles, scales in columns.

`tiled` int32 [N16, K128, 16, 16], N16 = ceil(N / 16), K128 = ceil(K / 128): nibble j (bits 4j to 4j + 3) of
tiled[a, b, r, w] is the stored nibble (code + 8) of row 16a + r, column 128b + 16j + w; code 0 beyond N and K.

`meta` [K128 * P, 16 * N16], P = 128 / group for groups of 32 and 64, else 1: entry [b * P + p, n] describes the group
of row n that holds column 128b + p * 128 / P.

The kernels gather words: word w of a tile's row takes a nibble from each of the eight words 2j + w // 8 of that row's
16, which are in the L1 cache after the first access. They write whole 16-byte pieces only.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from qarl_kernels.casts import widen
from qarl_kernels.dequantize import FLOATS, check_stored
from qarl_kernels.integers import cdiv
from qarl_kernels.launch import launch

ROWS = 16
COLUMNS = 128
TILES = 4  # tiles along K per program: 4 words in each of 256 threads
_EMPTY = tl.constexpr(-0x77777778)  # 0x88888888: eight nibbles of code 0
_META_ROWS = 32
_META_COLUMNS = 64


@triton.jit
def tile_kernel(
    packed,  # (rows, words) i32
    tiled,  # (row_tiles, column_tiles, 16, 16) i32
    rows,
    columns,
    words,
    column_tiles,
    RAGGED: tl.constexpr,  # columns is not a multiple of 8: a row's last word is partly used
    TILES: tl.constexpr,
):
    across = tl.cdiv(column_tiles, TILES)  # programs per row; one grid axis, because the second is limited to 65,535
    a = (tl.program_id(0) // across).to(tl.int64)
    line = tl.arange(0, TILES * 16)[:, None]  # (tile, row of the tile)
    b = tl.program_id(0) % across * TILES + line // 16
    row = a * 16 + line % 16
    half = tl.arange(0, 2)[None, :]
    eight = tl.arange(0, 8)[None, None, :]
    value = tl.zeros([TILES * 16, 2, 8], tl.int32)
    for j in tl.static_range(8):
        word = b * 16 + 2 * j + half
        source = tl.load(packed + row * words + word, mask=(row < rows) & (word < words), other=_EMPTY)[:, :, None]
        nibble = (source >> (eight * 4)) & 15
        if RAGGED:
            nibble = tl.where(word[:, :, None] * 8 + eight < columns, nibble, 8)
        value |= nibble << (4 * j)
    target = tiled + (a * column_tiles + b) * 256 + (line % 16) * 16 + half * 8
    tl.store(target[:, :, None] + eight, value, mask=(b < column_tiles)[:, :, None])


@triton.jit
def untile_kernel(
    tiled,  # (row_tiles, column_tiles, 16, 16) i32
    packed,  # (rows, words) i32
    rows,
    columns,
    words,
    column_tiles,
    RAGGED: tl.constexpr,
    TILES: tl.constexpr,
):
    across = tl.cdiv(column_tiles, TILES)
    a = (tl.program_id(0) // across).to(tl.int64)
    line = tl.arange(0, TILES * 16)[:, None]
    b = tl.program_id(0) % across * TILES + line // 16
    row = a * 16 + line % 16
    half = tl.arange(0, 2)[None, :]
    eight = tl.arange(0, 8)[None, :, None]
    word = b[:, :, None] * 16 + 2 * eight + half[:, None, :]
    value = tl.zeros([TILES * 16, 8, 2], tl.int32)
    start = tiled + (a * column_tiles + b) * 256 + (line % 16) * 16 + half * 8
    for i in tl.static_range(8):
        source = tl.load(start + i, mask=b < column_tiles, other=0)[:, None, :]
        nibble = (source >> (eight * 4)) & 15
        if RAGGED:
            nibble = tl.where(word * 8 + i < columns, nibble, 0)
        value |= nibble << (4 * i)
    row = row[:, :, None]
    tl.store(packed + row * words + word, value, mask=(row < rows) & (word < words))


@triton.jit
def meta_kernel(
    scale,  # (rows, groups) i16 bits if PACKED, else bf16, fp16 or f32
    zero_point,  # (ceil(rows / 8), groups) i32; not read if SYMMETRIC
    meta,  # (entries, width) i32 if PACKED, else f32
    rows,
    groups,
    entries,
    width,
    ONE_GROUP: tl.constexpr,
    PACKED: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    OFFSET: tl.constexpr,  # bits of -B in the scale's dtype; those of -(B + z) are these with z in the lowest
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    entry = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    row = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    group = entry * 0 if ONE_GROUP else entry
    inside = (row < rows) & (group < groups)
    source = row.to(tl.int64) * groups + group
    if PACKED:
        bits = tl.load(scale + source, mask=inside, other=0).to(tl.int32) & 0xFFFF
        zero = tl.full([BLOCK_M, BLOCK_N], 8, tl.int32)
        if not SYMMETRIC:
            nibbles = tl.load(zero_point + (row // 8).to(tl.int64) * groups + group, mask=inside, other=_EMPTY)
            zero = (nibbles >> ((row % 8) * 4)) & 15
        value = ((zero | OFFSET) << 16) | bits
    else:
        value = widen(tl.load(scale + source, mask=inside, other=0.0))
    tl.store(meta + entry.to(tl.int64) * width + row, value, mask=(entry < entries) & (row < width))


@torch.no_grad()
def tile_int4(packed: Tensor, in_features: int) -> Tensor:
    """Rearrange packed codes, int32 [N, ceil(K / 8)], into tiles, int32 [ceil(N / 16), ceil(K / 128), 16, 16].

    Raises:
        ValueError: packed is not a contiguous matrix of this shape.
    """
    n, words = len(packed), cdiv(in_features, 8)
    check_stored("packed", packed, (torch.int32,), (n, words))
    tiled = torch.empty(_tiles(n, in_features), dtype=torch.int32, device=packed.device)
    _rearrange(tile_kernel, packed, tiled, in_features)
    return tiled


@torch.no_grad()
def untile_int4(tiled: Tensor, out_features: int, in_features: int) -> Tensor:
    """Undo `tile_int4`: int32 [N, ceil(K / 8)], with missing nibbles zero as they are stored.

    Raises:
        ValueError: tiled does not have the shape of an N x K weight.
    """
    check_stored("tiled", tiled, (torch.int32,), _tiles(out_features, in_features))
    packed = torch.empty(out_features, cdiv(in_features, 8), dtype=torch.int32, device=tiled.device)
    _rearrange(untile_kernel, packed, tiled, in_features)
    return packed


def _tiles(n: int, k: int) -> tuple[int, int, int, int]:
    return cdiv(n, ROWS), cdiv(k, COLUMNS), 16, 16


def _rearrange(kernel: Any, packed: Tensor, tiled: Tensor, columns: int) -> None:
    rows, words = packed.shape
    launch(
        kernel,
        (cdiv(tiled.shape[1], TILES) * tiled.shape[0],),
        num_warps=8,
        packed=packed,
        tiled=tiled,
        rows=rows,
        columns=columns,
        words=words,
        column_tiles=tiled.shape[1],
        RAGGED=columns % 8 != 0,
        TILES=TILES,
    )


@torch.no_grad()
def meta_w4a16(
    scale: Tensor,
    zero_point: Tensor | None,
    out_features: int,
    in_features: int,
    group: int | None,
    dtype: torch.dtype,
) -> Tensor:
    """Arrange scales and zero points for the w4a16 kernels: weight = ((B + u) + offset) * scale, u a stored nibble.

    Args:
        scale: `dtype` [N, K / group], contiguous.
        zero_point: int32 [ceil(N / 8), K / group], contiguous, or None if symmetric.
        out_features, in_features: N, K.
        group: 32, 64 or 128; None: one group per row.
        dtype: Dtype of the activations, bfloat16 (B = 128) or float16 (B = 1024).

    Returns:
        int32 [K128 * P, 16 * N16]: the scale's bits in the low half, those of offset = -(B + zero nibble) in the high
        half. Beyond N and K: scale 0, offset -(B + 8).

    Raises:
        ValueError: dtypes or shapes do not fit each other.
    """
    if dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"dtype must be bfloat16 or float16, not {dtype}; dequantize the weight for other activations")
    check_stored("scale", scale, (dtype,), (out_features, 1 if group is None else in_features // group))
    if zero_point is not None:
        check_stored("zero_point", zero_point, (torch.int32,), (cdiv(out_features, 8), scale.shape[1]))
    offset = 0xC300 if dtype == torch.bfloat16 else 0xE400
    return _meta(scale.view(torch.int16), zero_point, out_features, in_features, group, torch.int32, offset)


@torch.no_grad()
def meta_w4a8(scale: Tensor, out_features: int, in_features: int, group: int | None) -> Tensor:
    """Arrange scales for the w4a8 kernel: float32 [K128 * P, 16 * N16], 0 beyond N and K.

    scale: bf16, fp16 or fp32 [N, K / group], contiguous; group: 32, 64, 128, or None for one group per row. Raises
    ValueError if scale does not fit the shape (out_features, in_features) = (N, K).
    """
    check_stored("scale", scale, FLOATS, (out_features, 1 if group is None else in_features // group))
    return _meta(scale, None, out_features, in_features, group, torch.float32, 0)


def _meta(
    scale: Tensor, zero_point: Tensor | None, n: int, k: int, group: int | None, dtype: torch.dtype, offset: int
) -> Tensor:
    parts = 1 if group is None else COLUMNS // group
    entries, width = cdiv(k, COLUMNS) * parts, cdiv(n, ROWS) * ROWS
    meta = torch.empty(entries, width, dtype=dtype, device=scale.device)
    launch(
        meta_kernel,
        (cdiv(width, _META_COLUMNS), cdiv(entries, _META_ROWS)),
        num_warps=4,
        scale=scale,
        zero_point=meta if zero_point is None else zero_point,
        meta=meta,
        rows=n,
        groups=scale.shape[1],
        entries=entries,
        width=width,
        ONE_GROUP=group is None,
        PACKED=dtype == torch.int32,
        SYMMETRIC=zero_point is None,
        OFFSET=offset,
        BLOCK_M=_META_ROWS,
        BLOCK_N=_META_COLUMNS,
    )
    return meta
