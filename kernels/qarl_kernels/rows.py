"""Building blocks for kernels that hold whole rows in registers: loads, stores, row sums, and quantization.

A program holds `rows` rows, each in chunks of `vectors` vectors of eight 16-bit values (16 bytes, one access of one
thread). A row of 12,288 values is six chunks of 2,048, not one block of 16,384 with a quarter left empty. A
program has one thread per vector of a chunk of its rows, so a thread holds one vector of each chunk: chunks add up
elementwise, and one sum over the threads of a row follows. Its order depends on the row's width alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from qarl_kernels.casts import widen
from qarl_kernels.integers import cdiv
from qarl_kernels.quantize_kernels import activation_code, activation_step, magnitude_bits, repeat_each

Activation = Literal["int8", "fp8", "fp8_group"] | None

VECTOR = 8  # 16-bit values in 16 bytes
GROUP = 128  # values that share a scale in fp8_group
MAX_ROW = 32_768
_VECTOR = tl.constexpr(VECTOR)
_GROUP = tl.constexpr(GROUP)
_GROUP_VECTORS = tl.constexpr(GROUP // VECTOR)


@dataclass(frozen=True)
class RowTile:
    """Rows of a program; vectors of a chunk, a power of two and at least 16 (one group); chunks of a row."""

    rows: int
    vectors: int
    chunks: int

    @property
    def warps(self) -> int:
        return self.rows * self.vectors // 32

    @property
    def lanes(self) -> int:
        """Values of a row that the tile has room for."""
        return self.chunks * self.vectors * VECTOR


def row_tiles(columns: int) -> list[RowTile]:
    """Return the tiles worth trying for rows of `columns` values.

    Tiles differ in the last bits of a row's sum, so the choice may depend on `columns` only.
    """
    tiles = []
    for vectors in (16, 32, 64, 128, 256, 512, 1024):
        chunks = cdiv(columns, vectors * VECTOR)
        if chunks <= 8 and (vectors == 16 or chunks * vectors * VECTOR < 2 * columns):
            tiles += [RowTile(max(1, threads // vectors), vectors, chunks) for threads in (128, 256)]
    return list(dict.fromkeys(tiles))


@cache
def row_tile(columns: int) -> RowTile:
    """Return a tile with few empty lanes and at least four chunks, so that several loads are in flight."""
    widest = 256 if columns <= 16_384 else 512
    return _roomy(columns, 4, widest)


@cache
def backward_tile(columns: int) -> RowTile:
    """Return a tile with fewer chunks and more threads, for kernels that hold sums of many rows beside a row."""
    return _roomy(columns, 2, 512)


def _roomy(columns: int, chunks: int, widest: int) -> RowTile:
    """Return the widest tile with at least `chunks` chunks and nearly full lanes, else the fullest tile."""
    if not 0 < columns <= MAX_ROW:
        raise ValueError(f"rows of {columns} values do not fit the registers of one program; at most {MAX_ROW} do")
    tiles = [tile for tile in row_tiles(columns) if tile.vectors <= widest and tile.rows <= max(1, 128 // tile.vectors)]
    full = [tile for tile in tiles if tile.lanes <= 1.15 * columns and tile.chunks >= chunks]
    return (
        max(full, key=lambda tile: tile.vectors) if full else min(tiles, key=lambda tile: (tile.lanes, -tile.vectors))
    )


def check_rows(name: str, x: Tensor, columns: int | None = None) -> None:
    """Raise ValueError unless x is a 16-bit matrix with contiguous rows (of `columns` values)."""
    wrong = x.ndim != 2 or x.dtype not in (torch.bfloat16, torch.float16) or (x.stride(1) != 1 and x.shape[1] > 1)
    if wrong or (columns is not None and x.shape[1] != columns):
        width = "" if columns is None else f" of {columns} columns"
        raise ValueError(
            f"{name} must be a 16-bit matrix{width} with contiguous rows, not {x.dtype} {tuple(x.shape)} of strides "
            f"{x.stride()}"
        )


def empty_codes(rows: int, columns: int, activation: Activation, device: torch.device) -> tuple[Tensor, Tensor]:
    """Allocate codes (rows, columns) and their float32 scales (rows, 1 or groups)."""
    groups = cdiv(columns, GROUP) if activation == "fp8_group" else 1
    dtype = torch.int8 if activation == "int8" else torch.float8_e4m3fn
    codes = torch.empty(rows, columns, dtype=dtype, device=device)
    return codes, torch.empty(rows, groups, dtype=torch.float32, device=device)


@triton.jit
def inside(row_inside, column, columns, RAGGED: tl.constexpr):
    """Return the mask of the vectors at `column` (T,): (T, 1), or (T, 8) if rows end inside a vector."""
    keep = (row_inside & (column < columns))[:, None]
    if RAGGED:
        keep = keep & (column[:, None] + tl.arange(0, _VECTOR)[None, :] < columns)
    return keep


@triton.jit
def load_chunks(start, row_inside, column, columns, CHUNKS: tl.constexpr, STEP: tl.constexpr, RAGGED: tl.constexpr):
    """Load a tuple of chunks (T, 8). start: (T,) pointers to the rows; column: (T,) columns of the first chunk."""
    lane = tl.arange(0, _VECTOR)[None, :]
    chunks = ()
    for c in tl.static_range(CHUNKS):
        at = column + c * STEP
        chunks += (tl.load((start + at)[:, None] + lane, inside(row_inside, at, columns, RAGGED), other=0.0),)
    return chunks


@triton.jit
def store_chunks(start, chunks, row_inside, column, columns, STEP: tl.constexpr, RAGGED: tl.constexpr):
    """Store chunks where `load_chunks` would load them."""
    lane = tl.arange(0, _VECTOR)[None, :]
    for c in tl.static_range(len(chunks)):
        at = column + c * STEP
        tl.store((start + at)[:, None] + lane, chunks[c], inside(row_inside, at, columns, RAGGED))


@triton.jit
def row_sum(x, ROWS: tl.constexpr, VECTORS: tl.constexpr):
    """Sum x (ROWS * VECTORS, 8) per row, (ROWS,), in an order that depends on the shape alone."""
    return tl.sum(tl.reshape(tl.sum(x, axis=1), [ROWS, VECTORS]), axis=1)


@triton.jit
def store_codes(
    chunks,  # tuple of (T, 8) bf16 or fp16, zeros past the row
    codes,  # (rows, columns) i8 or e4m3
    scale,  # (rows, 1) or (rows, groups) f32
    row,  # (T,) i64
    row_inside,  # (T,)
    column,  # (T,)
    columns,
    GROUPED: tl.constexpr,
    ROWS: tl.constexpr,
    VECTORS: tl.constexpr,
    RAGGED: tl.constexpr,
):
    """Quantize rows, or groups of 128 values, by the rule of `quantize_kernels.activation_kernel`."""
    dtype: tl.constexpr = codes.dtype.element_ty
    lane = tl.arange(0, _VECTOR)[None, :]
    start = codes + row * columns
    if not GROUPED:
        largest = tl.max(magnitude_bits(widen(chunks[0])), axis=1)
        for c in tl.static_range(1, len(chunks)):
            largest = tl.maximum(largest, tl.max(magnitude_bits(widen(chunks[c])), axis=1))
        largest = tl.max(tl.reshape(largest, [ROWS, VECTORS]), axis=1)
        absmax = repeat_each(largest, VECTORS).to(tl.float32, bitcast=True)
        step, factor = activation_step(absmax, dtype)
        tl.store(scale + row, step, row_inside & (column == 0))
    for c in tl.static_range(len(chunks)):
        at = column + c * (VECTORS * _VECTOR)
        value = widen(chunks[c])
        if GROUPED:
            largest = tl.max(magnitude_bits(value), axis=1)
            largest = tl.max(tl.reshape(largest, [ROWS * VECTORS // _GROUP_VECTORS, _GROUP_VECTORS]), axis=1)
            absmax = repeat_each(largest, _GROUP_VECTORS).to(tl.float32, bitcast=True)
            step, factor = activation_step(absmax, dtype)
            first = row_inside & (at < columns) & (at % _GROUP == 0)
            tl.store(scale + row * tl.cdiv(columns, _GROUP) + at // _GROUP, step, first)
        code = activation_code(value, absmax, factor, dtype)
        tl.store((start + at)[:, None] + lane, code, inside(row_inside, at, columns, RAGGED))
