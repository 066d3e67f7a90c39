"""The two products of a linear layer's backward in FP8: operands e4m3 with a scale a row of either side.

    dx = dy @ W        dy with a scale a token, W with one a column (input feature), over output features
    dW = dy^T @ x      dy and x with a scale a column (feature), over tokens; added to a float32 gradient

Tensor cores want the summed dimension contiguous on both sides, so dy and x are needed transposed. dy is read twice,
once for the largest magnitudes of rows and columns and once for both forms of its codes, which serve both products.

Why e4m3 and one scale over all tokens: e4m3 errs by 2.6 % of each value over a range of 2^15, and underflow by at most
2^-10 / 448 of a column's largest value, which for 16,384 tokens is 3e-4 of the column's norm whatever its tails. So the
relative error of a product of random operands is 3.7 %, its cosine to the exact one 0.9993 (e5m2 for dy: 0.998). Scales
a block of 128 tokens would gain nothing of that and need a float32 sum a block, which costs a third of the product's
speed. Sums are chains with the tensor cores' fast accumulation; over 16,384 tokens its 14 bits add 0.3 % (random
signs) to 1.6 % (one sign) to the error.

A row of dx depends on that row of dy alone. Everything is deterministic: the only atomics are maxima of integers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qarl_kernels import gemm
from qarl_kernels.direct import Descriptor
from qarl_kernels.fp8_backward_kernels import add_product_kernel, codes_kernel, extents_kernel, transpose_kernel
from qarl_kernels.integers import cdiv
from qarl_kernels.launch import capability_of, launch, multiprocessors, supports_tma
from qarl_kernels.tuning import Tile

E4M3 = torch.float8_e4m3fn
LINE = 128  # bytes; rows of codes are multiples of it apart
EXTENTS = {"STRIP": 128, "BLOCK_R": 16, "BLOCK_C": 256}  # and 4 warps
CODES = {"BLOCK_R": 128, "BLOCK_C": 64}  # and 8 warps; LINE is a multiple of BLOCK_R

# Of dW: the first that gives every multiprocessor a tile. All are wgmma's, whose chains agree whatever the tile.
WEIGHT_TILES = (
    Tile("x_first", 128, 256, 128, warps=8, stages=4),
    Tile("x_first", 128, 128, 128, warps=8, stages=4),
    Tile("x_first", 64, 128, 128, warps=4, stages=4),
)
BEFORE_HOPPER = Tile("x_first", 64, 128, 64, warps=4, stages=3)


@dataclass(frozen=True)
class Codes:
    """A matrix as e4m3 codes (R, C), rows as `_lines` lays them out, and a scale a row, float32 (R, 1)."""

    codes: Tensor
    scale: Tensor


@dataclass(frozen=True)
class Transposed:
    """A weight (N, K) as dx needs it: codes (K, N) with a scale a row, and what dy's columns are to be multiplied with.

    factor: float32 (N,), or None. It holds the scales of a weight that is FP8 already, whose codes stay what they are.
    """

    codes: Codes
    factor: Tensor | None


def input_grad_fp8(dy: Tensor, weight: Tensor | Transposed, scale: Tensor | None = None) -> Tensor:
    """dx = dy @ weight from FP8 operands, rounded once to dy's dtype.

    dy: (M, N) bf16 or fp16; weight: (N, K) of 16 bits; or e4m3 codes with scale (N, 1), their scales, then only dy is
    rounded; or what `transpose` made of these, which saves its passes over the weight. Returns (M, K).
    """
    weight = _transposed(weight, scale)
    rows, _ = quantize(dy, weight.factor, columns=False)
    return input_grad_of(rows, weight, dy.dtype)


def input_grad_of(rows: Codes, weight: Transposed, dtype: torch.dtype) -> Tensor:
    """dx (M, K) of `dtype`. rows: codes of dy, (M, N), as `quantize(dy, weight.factor)` makes them."""
    return gemm.fp8(rows.codes, rows.scale, weight.codes.codes, weight.codes.scale, None, dtype)


def weight_grad_fp8(dy: Tensor, x: Tensor, into: Tensor) -> None:
    """into += dy^T @ x from FP8 operands.

    dy: (M, N), x: (M, K), bf16 or fp16; into: float32 (N, K), rows contiguous.
    """
    add_weight_grad_of(quantize(dy, rows=False)[1], x, into)


def add_weight_grad_of(columns: Codes, x: Tensor, into: Tensor) -> None:
    """`weight_grad_fp8` of codes of dy transposed, (N, M), as `quantize(dy)` makes them: one quantization of dy serves
    both products."""
    _add_product(columns, quantize(x, rows=False)[1], into)


def transpose(weight: Tensor, scale: Tensor | None = None) -> Transposed:
    """weight: (N, K) bf16 or fp16, quantized a column; or e4m3 codes, whose scale, (N, 1), becomes the factor of dy."""
    if (weight.dtype == E4M3) != (scale is not None):
        raise ValueError(
            f"a weight of {weight.dtype} {'without' if scale is None else 'with'} scale; e4m3 alone has one"
        )
    if scale is None:
        return Transposed(quantize(weight, rows=False)[1], None)
    n, k = weight.shape
    if scale.numel() != n:
        raise ValueError(f"scales {tuple(scale.shape)} for {n} rows of codes; input_grad_fp8 takes one a row")
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


def _transposed(weight: Tensor | Transposed, scale: Tensor | None) -> Transposed:
    return weight if isinstance(weight, Transposed) else transpose(weight, scale)


def _lines(rows: int, columns: int, device: torch.device) -> Tensor:
    """Room for codes (rows, columns), rows a multiple of LINE apart; transposing kernels put zeros between."""
    return torch.empty(rows, cdiv(columns, LINE) * LINE, dtype=E4M3, device=device)[:, :columns]


def _grid(rows: int, columns: int) -> tuple[int, int]:
    """Programs of a kernel that transposes (rows, columns): to the end of the lines."""
    return cdiv(columns, CODES["BLOCK_C"]), cdiv(rows, LINE) * (LINE // CODES["BLOCK_R"])


def quantize(
    x: Tensor, factor: Tensor | None = None, *, rows: bool = True, columns: bool = True
) -> tuple[Codes | None, Codes | None]:
    """Codes of x * factor with a scale a row, (M, N), and of x transposed with a scale a column, (N, M), as asked for.

    x: (M, N) bf16 or fp16; factor: float32 (N,), or None. Scales are largest magnitude / 448, at least 2^-120.
    """
    if x.ndim != 2 or x.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"the FP8 backward quantizes bf16 and fp16 matrices, not {x.dtype} {tuple(x.shape)}")
    x = x if x.stride(1) == 1 else x.contiguous()
    m, n = x.shape
    bits = torch.zeros(m + n, dtype=torch.int32, device=x.device)
    scales = torch.empty(m + n, 1, dtype=torch.float32, device=x.device)
    row_codes = _lines(m, n, x.device) if rows else None
    column_codes = _lines(n, m, x.device) if columns else None
    shared = {
        "x": x,
        "factor": factor,
        "row_bits": bits[n:],
        "column_bits": bits[:n],
        "rows": m,
        "columns": n,
        "stride": x.stride(0),
        "ROW": rows,
        "COLUMN": columns,
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
        column_pitch=0 if column_codes is None else column_codes.stride(0),
        **shared,
        **CODES,
    )
    return (
        None if row_codes is None else Codes(row_codes, scales[n:]),
        None if column_codes is None else Codes(column_codes, scales[:n]),
    )


def _add_product(a: Codes, b: Codes, into: Tensor, tile: Tile | None = None) -> None:
    """into (M, N) float32 += the product of a (M, K) and b (N, K) along K."""
    if capability_of(into) < (8, 9):
        raise ValueError("fp8 products need compute capability 8.9 (Ada, Hopper); use the 16-bit backward")
    m, k = a.codes.shape
    n = b.codes.shape[0]
    if into.shape != (m, n) or into.dtype != torch.float32 or into.stride(1) != 1 or b.codes.shape[1] != k:
        raise ValueError(
            f"weight_grad_fp8 adds {m} x {n} products over {k} and {b.codes.shape[1]} tokens to {into.dtype} "
            f"{tuple(into.shape)} of strides {into.stride()}; it takes a float32 matrix of that shape"
        )
    if k == 0:
        return
    tma = supports_tma(a.codes) and supports_tma(b.codes)
    tile = tile or _weight_tile(m, n, into)
    launch(
        add_product_kernel,
        (cdiv(m, tile.block_m) * cdiv(n, tile.block_n),),
        num_warps=tile.warps,
        num_stages=tile.stages,
        a=Descriptor(a.codes, (tile.block_m, tile.block_k)) if tma else a.codes,
        b=Descriptor(b.codes, (tile.block_n, tile.block_k)) if tma else b.codes,
        into=into,
        s_a=a.scale,
        s_b=b.scale,
        M=m,
        N=n,
        K=a.codes.stride(0),  # to the end of the lines, where zeros are: one kernel for all counts of tokens
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
        vectors = tile.block_n < 256 or into.stride(0) % 16 == 0  # addresses of single values take many registers
        if vectors and cdiv(m, tile.block_m) * cdiv(n, tile.block_n) >= multiprocessors(into):
            return tile
    return WEIGHT_TILES[-1]
