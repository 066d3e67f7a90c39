"""Quantization by Triton kernels: master weights to stored tensors, activations to codes and scales, one read of each.

Weights are bit for bit what `qarl_formats.weight.quantize_weight` computes, activations what
`qarl_kernels.activation` does: IEEE divisions, scales rounded to their stored dtype before they divide.

- int4: a thread holds eight neighbouring values, in two 16-byte loads, and packs their codes in registers; threads of
  a group share its range by shuffles. Zero points go through an atomic OR: eight rows, which may be eight programs,
  share a word, and the result does not depend on the order.
- int8, e4m3: a program holds everything that shares a scale (a row, or a 128 x 128 block) in registers.

`bad`, the count of NaN and infinite values, costs no synchronization: the caller looks at it when it next waits for
the device anyway. Where it is not 0, codes and scales mean nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qarl_kernels.integers import cdiv, next_power_of_2
from qarl_kernels.launch import launch
from qarl_kernels.plans import planned
from qarl_kernels.quantize_kernels import activation_kernel, byte_kernel, int4_kernel

MAX_ROW = 32_768  # values of a row that the registers of one program hold: 32 in each of 1,024 threads
TILE = 2048  # values of a program that is free to choose: 8 in each of 256 threads
FP8_BLOCK = 128


def _check_matrix(name: str, x: Tensor, dtypes: tuple[torch.dtype, ...], longest_row: int | None) -> None:
    if x.ndim != 2 or x.dtype not in dtypes or x.shape[1] < 1 or x.stride(1) != 1:
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(
            f"{name} must be a {wanted} matrix with contiguous rows, not {x.dtype} {tuple(x.shape)} of strides "
            f"{x.stride()}; use {name}.to(...).contiguous()"
        )
    if longest_row is not None and x.shape[1] > longest_row:
        raise ValueError(
            f"{name} has rows of {x.shape[1]} values, more than the {longest_row} that one scale can be computed for; "
            "use a group size"
        )


def _tile(columns: int, size: int | None) -> tuple[int, int, int, int]:
    """(rows, scales, values a scale) of a program's tile, and its warps. size: values a scale, None = the row."""
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
        group: input features that share a scale, 32, 64 or 128; None = the whole row, of at most 32,768.
        symmetric: False computes a zero point per group, and the scale from the range instead of absmax / divisor.
        divisor: absmax / divisor is the scale: 7.5, or 7.0 for the grid symmetric7.
        lowest, highest: the codes' range: -8 and 7, or -7 and 7.
        scale_dtype: bfloat16, float16 or float32, the stored dtype, which the codes are computed from.

    Returns:
        packed: int32 [N, ceil(K / 8)]. scale: [N, groups]. zero_point: int32 [ceil(N / 8), groups], None if symmetric.
        bad: int32 [], on the device, how many values are NaN or infinite; unless it is 0 the rest means nothing.

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
def quantize_int8(weight: Tensor, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize a master weight to int8, one scale a row.

    Args:
        weight: float32 [N, K], rows contiguous, K at most 32,768.
        scale_dtype: bfloat16, float16 or float32, the stored dtype, which the codes are computed from.

    Returns:
        codes: int8 [N, K]. scale: [N, 1]. bad: as `quantize_int4` returns it.

    Raises:
        ValueError: weight is not such a matrix.
    """
    return _quantize_bytes(weight, torch.int8, scale_dtype, None)


@torch.no_grad()
def quantize_fp8(weight: Tensor, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize a master weight to float8_e4m3fn, one scale a row; otherwise as `quantize_int8`."""
    return _quantize_bytes(weight, torch.float8_e4m3fn, scale_dtype, None)


@torch.no_grad()
def quantize_fp8_block(weight: Tensor, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize a master weight to float8_e4m3fn, one scale for each block of 128 x 128.

    The rule is that of `quantize_fp8`, with the largest magnitude of a block in place of a row's. K has no limit.

    Returns:
        codes: float8_e4m3fn [N, K]. scale: [ceil(N / 128), ceil(K / 128)]. bad: as `quantize_int4` returns it.
    """
    return _quantize_bytes(weight, torch.float8_e4m3fn, scale_dtype, FP8_BLOCK)


def _quantize_bytes(
    weight: Tensor, dtype: torch.dtype, scale_dtype: torch.dtype, block: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    _check_matrix("weight", weight, (torch.float32,), MAX_ROW if block is None else None)
    n, k = weight.shape
    rows, columns, warps = (1, *_tile(k, None)[2:]) if block is None else (block, block, 16)
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


def activation_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """`qarl_kernels.activation.quantize_activation_int8`, bit for bit, in one kernel.

    Args:
        x: bf16, fp16 or fp32 [M, K], rows contiguous, any distance apart; K at most 32,768.

    Returns:
        codes: int8 [M, K]. scale: float32 [M, 1].

    Raises:
        ValueError: x is not such a matrix.
    """
    return _quantize_activation(x, torch.int8, None)


def activation_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """`qarl_kernels.activation.quantize_activation_fp8`, bit for bit but for the sign of NaN; else as above."""
    return _quantize_activation(x, torch.float8_e4m3fn, None)


def activation_fp8_group(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize each group of 128 neighbouring values of a row to e4m3 by the rule of `activation_fp8`.

    Args:
        x: bf16, fp16 or fp32 [M, K], rows contiguous, any distance apart; the last group of a row may be shorter.

    Returns:
        codes: float8_e4m3fn [M, K]. scale: float32 [M, ceil(K / 128)].

    Raises:
        ValueError: x is not such a matrix.
    """
    return _quantize_activation(x, torch.float8_e4m3fn, FP8_BLOCK)


@planned
def _quantize_activation(x: Tensor, dtype: torch.dtype, group: int | None) -> tuple[Tensor, Tensor]:
    _check_matrix("x", x, (torch.bfloat16, torch.float16, torch.float32), MAX_ROW if group is None else None)
    m, k = x.shape
    groups = 1 if group is None else cdiv(k, group)
    rows, tile_groups, size, warps = _tile(k, group)
    if group is None and warps < 8:  # a short row is a matter of latency: 16 values a thread
        warps = max(1, min(8, size // 512))
    vector = 16 // x.element_size()
    codes = torch.empty(m, k, dtype=dtype, device=x.device)
    scale = torch.empty(m, groups, dtype=torch.float32, device=x.device)
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
