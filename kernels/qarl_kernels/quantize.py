"""Quantization by Triton kernels: master weights to stored tensors, activations to codes and scales, each read once.

Weights are bit-equal to `qarl_formats.weight.quantize_weight`, activations to `qarl_kernels.activation`: IEEE
divisions, by scales that are rounded to their stored dtype first.

- int4: a thread loads eight adjacent values, 16 bytes twice, and packs their codes in registers; the threads of a group
  exchange its range by shuffles. Zero points are combined by an atomic OR, because eight rows, possibly of eight
  programs, share a word; the result does not depend on the order.
- int8, e4m3: a program holds all values that share a scale (a row, or a 128 x 128 block) in registers.

`bad` counts NaN and infinite values without a synchronization: the caller reads it when it next waits for the device.
Unless it is 0, codes and scales are meaningless.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qarl_kernels.integers import cdiv, next_power_of_2
from qarl_kernels.launch import launch
from qarl_kernels.quantize_kernels import activation_kernel, byte_kernel, int4_kernel
from qarl_kernels.reference import FP8_BLOCK
from qarl_kernels.rows import Activation, empty_codes

MAX_ROW = 32_768  # values of a row that one program's registers hold: 32 in each of 1,024 threads
TILE = 2048  # values per program where it is free to choose: 8 in each of 256 threads


def _check_matrix(name: str, x: Tensor, dtypes: tuple[torch.dtype, ...], longest_row: int | None) -> None:
    if x.ndim != 2 or x.dtype not in dtypes or x.shape[1] < 1 or x.stride(1) != 1:
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(
            f"{name} must be a {wanted} matrix with contiguous rows, not {x.dtype} {tuple(x.shape)} of strides "
            f"{x.stride()}; use {name}.to(...).contiguous()"
        )
    if longest_row is not None and x.shape[1] > longest_row:
        raise ValueError(
            f"{name} has rows of {x.shape[1]} values; one scale covers at most {longest_row}; use a group size"
        )


def _tile(columns: int, size: int | None) -> tuple[int, int, int, int]:
    """(rows, scales per row, values per scale, warps) of a program. size: values per scale; None: the whole row."""
    if size is None:
        width = max(next_power_of_2(columns), 8)
        return 1, 1, width, max(1, width // 1024)
    scales = min(TILE // size, next_power_of_2(cdiv(columns, size)))
    return TILE // (scales * size), scales, size, 8


@torch.no_grad()
def quantize_int4(
    weight: Tensor,
    group: int | None,
    *,
    symmetric: bool,
    divisor: float,
    lowest: float,
    highest: float,
    scale_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Quantize a master weight to packed int4.

    Args:
        weight: float32 [N, K], rows contiguous.
        group: Input features per scale, 32, 64 or 128; None: the whole row, of at most 32,768.
        symmetric: False computes a zero point per group, and the scale from the range instead of absmax / divisor.
        divisor: absmax / divisor is the scale: 7.5, or 7.0 for the grid symmetric7.
        lowest, highest: Range of the codes: -8 and 7, or -7 and 7.
        scale_dtype: Stored dtype of the scale, bfloat16, float16 or float32.

    Returns:
        packed: int32 [N, ceil(K / 8)]. scale: [N, groups]. zero_point: int32 [ceil(N / 8), groups], None if symmetric.
        bad: int32 [], on the device, the number of NaN and infinite values.

    Raises:
        ValueError: weight is not such a matrix, or group does not divide K.
    """
    _check_matrix("weight", weight, (torch.float32,), MAX_ROW if group is None else None)
    n, k = weight.shape
    if group is not None and (group not in (32, 64, 128) or k % group):
        raise ValueError(f"group {group} does not fit {k} input features; use 32, 64 or 128 that divides them, or None")
    groups = 1 if group is None else k // group
    words = cdiv(k, 8)
    packed = torch.empty(n, words, dtype=torch.int32, device=weight.device)
    scale = torch.empty(n, groups, dtype=scale_dtype, device=weight.device)
    zero_point = None
    if not symmetric:
        zero_point = torch.zeros(cdiv(n, 8), groups, dtype=torch.int32, device=weight.device)
    bad = torch.zeros((), dtype=torch.int32, device=weight.device)
    tile_rows, tile_groups, size, warps = _tile(k, group)
    limits = torch.finfo(scale_dtype)
    launch(
        int4_kernel,
        (cdiv(groups, tile_groups) * cdiv(n, tile_rows),),
        num_warps=warps,
        weight=weight,
        packed=packed,
        scale=scale,
        zero_point=bad if zero_point is None else zero_point,
        bad=bad,
        rows=n,
        columns=k,
        words=words,
        groups=groups,
        stride=weight.stride(0),
        DIVISOR=float(divisor),
        LOWEST=float(lowest),
        HIGHEST=float(highest),
        SCALE_MAX=limits.max,
        SCALE_EPS=limits.eps,
        SYMMETRIC=symmetric,
        RAGGED=k % 8 != 0,
        ROWS=tile_rows,
        GROUPS=tile_groups,
        WORDS=size // 8,
    )
    return packed, scale, zero_point, bad


@torch.no_grad()
def quantize_bytes(
    weight: Tensor, scale_dtype: torch.dtype, dtype: torch.dtype, in_blocks: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize a master weight, float32 [N, K], to int8 or float8_e4m3fn codes [N, K], K at most 32,768.

    The scale is [N, 1], or if in_blocks (e4m3 only) one per 128 x 128 block, and K has no limit. scale_dtype, bad and
    errors: as in `quantize_int4`. Returns (codes, scale, bad).
    """
    _check_matrix("weight", weight, (torch.float32,), None if in_blocks else MAX_ROW)
    n, k = weight.shape
    rows, columns, warps = (FP8_BLOCK, FP8_BLOCK, 16) if in_blocks else (1, *_tile(k, None)[2:])
    codes = torch.empty(n, k, dtype=dtype, device=weight.device)
    scale = torch.empty(cdiv(n, rows), cdiv(k, columns), dtype=scale_dtype, device=weight.device)
    bad = torch.zeros((), dtype=torch.int32, device=weight.device)
    limits = torch.finfo(scale_dtype)
    launch(
        byte_kernel,
        (scale.numel(),),
        num_warps=warps,
        weight=weight,
        codes=codes,
        scale=scale,
        bad=bad,
        rows=n,
        columns=k,
        stride=weight.stride(0),
        SCALE_MAX=limits.max,
        SCALE_EPS=limits.eps,
        RAGGED=k % 8 != 0,
        ROWS=rows,
        EIGHTS=columns // 8,
    )
    return codes, scale, bad


def activation_codes(x: Tensor, kind: Activation) -> tuple[Tensor, Tensor]:
    """Quantize activations in one kernel, bit-equal to `qarl_kernels.activation` except for the sign of an FP8 NaN.

    Args:
        x: bf16, fp16 or fp32 [M, K], last dimension contiguous, arbitrary row stride.
        kind: "int8" or "fp8", one scale per row of at most 32,768 values; "fp8_group", one per 128 features.

    Returns:
        codes int8 or float8_e4m3fn [M, K] and scales fp32 [M, 1], or [M, ceil(K / 128)].

    Raises:
        ValueError: x is not such a matrix.
    """
    group = FP8_BLOCK if kind == "fp8_group" else None
    _check_matrix("x", x, (torch.bfloat16, torch.float16, torch.float32), MAX_ROW if group is None else None)
    m, k = x.shape
    rows, tile_groups, size, warps = _tile(k, group)
    if group is None and warps < 8:  # short rows are bound by latency: 16 values per thread
        warps = max(1, min(8, size // 512))
    vector = 16 // x.element_size()
    codes, scale = empty_codes(m, k, kind, x.device)
    groups = scale.shape[1]
    launch(
        activation_kernel,
        (cdiv(groups, tile_groups) * cdiv(m, rows),),
        num_warps=warps,
        x=x,
        codes=codes,
        scale=scale,
        rows=m,
        columns=k,
        groups=groups,
        stride=x.stride(0),
        RAGGED=k % vector != 0,
        ROWS=rows,
        GROUPS=tile_groups,
        VECTORS=size // vector,
        VECTOR=vector,
    )
    return codes, scale
