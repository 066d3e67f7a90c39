"""The two products of a linear layer's backward in FP8: e4m3 operands with one scale per row of each side.

    dx = dy @ W        one scale per token of dy, one per input feature (column) of W; summed over output features
    dW = dy^T @ x      one scale per feature (column) of dy and x; summed over tokens, added to a float32 gradient

FP8 tensor cores read both operands along the summed dimension, so dy and x must be transposed. dy is read twice: once
for the largest magnitudes of rows and columns, once to write both its codes and its transposed codes.

Why e4m3, and one scale over all tokens: e4m3 rounds each value within a range of 2^15 by 2.6 %, and underflow adds at
most 2^-10 / 448 of a column's largest value, for 16,384 tokens 3e-4 of the column's norm. So a product of random
operands has a relative error of 3.7 % and a cosine of 0.9993 to the exact one (e5m2 for dy: 0.998). One scale per 128
tokens would not reduce that, and would cost a float32 sum per block, a third of the product's speed. Sums use the
tensor cores' fast accumulation; over 16,384 tokens its 14 bits add 0.3 % (random signs) to 1.6 % (equal signs).

A row of dx depends on that row of dy alone. Everything is deterministic: the only atomics are integer maxima.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qarl_kernels import gemm
from qarl_kernels.fp8_backward_kernels import add_product_kernel, codes_kernel, extents_kernel, transpose_kernel
from qarl_kernels.integers import cdiv
from qarl_kernels.launch import capability_of, launch, multiprocessors, supports_tma, tma_descriptor
from qarl_kernels.tuning import Tile

E4M3 = torch.float8_e4m3fn
LINE = 128  # bytes; the row stride of codes is a multiple of it
EXTENTS = {"STRIP": 128, "BLOCK_R": 16, "BLOCK_C": 256}  # and 4 warps
CODES = {"BLOCK_R": 128, "BLOCK_C": 64}  # and 8 warps; LINE is a multiple of BLOCK_R

# Tiles of dW; the first that gives every multiprocessor a tile is used. All run wgmma, whose sums do not depend on the
# tile.
WEIGHT_TILES = (
    Tile("x_first", 128, 256, 128, warps=8, stages=4),
    Tile("x_first", 128, 128, 128, warps=8, stages=4),
    Tile("x_first", 64, 128, 128, warps=4, stages=4),
)
BEFORE_HOPPER = Tile("x_first", 64, 128, 64, warps=4, stages=3)


@dataclass(frozen=True)
class Codes:
    """A matrix as e4m3 codes (R, C), allocated by `_lines`, and one float32 scale per row, (R, 1)."""

    codes: Tensor
    scale: Tensor


@dataclass(frozen=True)
class Transposed:
    """A weight (N, K) transposed for dx.

    Attributes:
        codes: Codes (K, N).
        factor: float32 (N,) that dy's columns are multiplied by, or None. It holds the scales of a weight that is
            already FP8, so that its codes are not rounded again.
    """

    codes: Codes
    factor: Tensor | None


def input_grad_of(rows: Codes, weight: Transposed, dtype: torch.dtype) -> Tensor:
    """Return dx (M, K) of `dtype`. rows: codes of dy (M, N), from `quantize(dy, weight.factor)`."""
    return gemm.scaled(rows.codes, rows.scale, weight.codes.codes, weight.codes.scale, None, dtype)


def transpose(weight: Tensor, scale: Tensor | None = None) -> Transposed:
    """Transpose a weight for dx.

    Args:
        weight: (N, K), bf16 or fp16, which is quantized per column, or e4m3 codes.
        scale: (N, 1), scales of e4m3 codes; they become `factor`. None for 16-bit weights.
    """
    if (weight.dtype == E4M3) != (scale is not None):
        raise ValueError(
            f"a weight of {weight.dtype} {'without' if scale is None else 'with'} scale; only e4m3 has one"
        )
    if scale is None:
        return Transposed(columns_of(weight), None)
    n, k = weight.shape
    if scale.numel() != n:
        raise ValueError(f"scales {tuple(scale.shape)} for {n} rows of codes; the FP8 backward takes one per row")
    codes = _lines(k, n, weight.device)
    weight = weight if weight.stride(1) == 1 else weight.contiguous()
    launch(
        transpose_kernel,
        _grid(n, k),
        num_warps=8,
        x=weight,
        out=codes,
        rows=n,
        columns=k,
        stride=weight.stride(0),
        pitch=codes.stride(0),
        **CODES,
    )
    ones = torch.ones(k, 1, dtype=torch.float32, device=weight.device)
    return Transposed(Codes(codes, ones), scale.reshape(n).float())


def _lines(rows: int, columns: int, device: torch.device) -> Tensor:
    """Allocate codes (rows, columns), rows padded to whole LINEs; transposing kernels write zeros to the padding."""
    return torch.empty(rows, cdiv(columns, LINE) * LINE, dtype=E4M3, device=device)[:, :columns]


def _grid(rows: int, columns: int) -> tuple[int, int]:
    """Return the grid of a kernel that transposes (rows, columns), padding included."""
    return cdiv(columns, CODES["BLOCK_C"]), cdiv(rows, LINE) * (LINE // CODES["BLOCK_R"])


def quantize(x: Tensor, factor: Tensor | None = None, *, rows: bool = True) -> tuple[Codes | None, Codes]:
    """Quantize x * factor per row, and x transposed per column of x. A scale is max(largest magnitude / 448, 2^-120).

    Args:
        x: (M, N) bf16 or fp16.
        factor: (N,) float32, or None.
        rows: Whether to compute the codes of rows.

    Returns:
        Codes (M, N) of rows, or None, and (N, M) of columns.
    """
    if x.ndim != 2 or x.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"the FP8 backward quantizes bf16 and fp16 matrices, not {x.dtype} {tuple(x.shape)}")
    x = x if x.stride(1) == 1 else x.contiguous()
    m, n = x.shape
    bits = torch.zeros(m + n, dtype=torch.int32, device=x.device)
    scales = torch.empty(m + n, 1, dtype=torch.float32, device=x.device)
    row_codes = _lines(m, n, x.device) if rows else None
    column_codes = _lines(n, m, x.device)
    shared: dict[str, Any] = {
        "x": x,
        "factor": factor,
        "row_bits": bits[n:],
        "column_bits": bits[:n],
        "rows": m,
        "columns": n,
        "stride": x.stride(0),
        "ROW": rows,
        "FACTOR": rows and factor is not None,
    }
    grid = cdiv(n, EXTENTS["BLOCK_C"]), cdiv(m, EXTENTS["STRIP"])
    launch(extents_kernel, grid, num_warps=4, **shared, **EXTENTS)
    launch(
        codes_kernel,
        _grid(m, n),
        num_warps=8,
        row_codes=row_codes,
        row_scale=scales[n:],
        column_codes=column_codes,
        column_scale=scales[:n],
        row_pitch=0 if row_codes is None else row_codes.stride(0),
        column_pitch=column_codes.stride(0),
        **shared,
        **CODES,
    )
    return None if row_codes is None else Codes(row_codes, scales[n:]), Codes(column_codes, scales[:n])


def columns_of(x: Tensor) -> Codes:
    """Return the codes (N, M) of the columns of x (M, N) alone; see `quantize`."""
    return quantize(x, rows=False)[1]


def add_product(a: Codes, b: Codes, into: Tensor) -> None:
    """into (M, N) float32 += the product of a (M, K) and b (N, K) along K.

    For dW, a and b are the codes of the columns of dy and x, and K counts tokens.
    """
    if capability_of(into) < (8, 9):
        raise ValueError("fp8 products need compute capability 8.9 (Ada, Hopper); use the 16-bit backward")
    m, k = a.codes.shape
    n = b.codes.shape[0]
    if into.shape != (m, n) or into.dtype != torch.float32 or into.stride(1) != 1 or b.codes.shape[1] != k:
        raise ValueError(
            f"the FP8 backward adds {m} x {n} products over {k} and {b.codes.shape[1]} tokens to {into.dtype} "
            f"{tuple(into.shape)} of strides {into.stride()}; it takes a float32 matrix of that shape"
        )
    if k == 0:
        return
    tma = supports_tma(a.codes) and supports_tma(b.codes)
    tile = _weight_tile(m, n, into)
    launch(
        add_product_kernel,
        (cdiv(m, tile.block_m) * cdiv(n, tile.block_n),),
        num_warps=tile.warps,
        num_stages=tile.stages,
        a=tma_descriptor(a.codes, (tile.block_m, tile.block_k)) if tma else a.codes,
        b=tma_descriptor(b.codes, (tile.block_n, tile.block_k)) if tma else b.codes,
        into=into,
        s_a=a.scale,
        s_b=b.scale,
        M=m,
        N=n,
        K=a.codes.stride(0),  # padding included: one compiled kernel for all token counts
        stride_a=a.codes.stride(0),
        stride_b=b.codes.stride(0),
        stride_into=into.stride(0),
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        TMA=tma,
    )


def _weight_tile(m: int, n: int, into: Tensor) -> Tile:
    if capability_of(into) < (9, 0):
        return BEFORE_HOPPER
    for tile in WEIGHT_TILES[:-1]:
        vectors = tile.block_n < 256 or into.stride(0) % 16 == 0  # else each value needs its own address register
        if vectors and cdiv(m, tile.block_m) * cdiv(n, tile.block_n) >= multiprocessors(into):
            return tile
    return WEIGHT_TILES[-1]
