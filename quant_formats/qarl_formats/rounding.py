"""Quantization arithmetic that schemes share: scales, zero points and codes of float32 groups, in plain torch.

The oracle is `calculate_qparams` with `QuantizationArgs.scale_dtype` set to the stored dtype, followed by the
format's compressor, on the CPU (compressed-tensors 0.17). Its rules:

- scale = absmax / (code range / 2): 7.5 for int4, 127.5 for int8, 448 for e4m3fn. So +absmax of an int4 group sits
  on 7.5, and rounds and clamps to 7, while -absmax becomes -8.
- The scale is clamped to the finite range of its stored dtype and rounded to it. If it is zero after that (zero
  group, or underflow), it becomes the dtype's eps. Codes are round-half-even(weight / stored scale), in FP32.
- Asymmetric: scale = (max - min) / 15 over a range that includes 0; the zero point comes from the scale *before*
  it is rounded. The zero point of a zero group is 0 (in the library an int8 cast of NaN, which is 0 on x86).
- e4m3fn: adding the library's zero point of +0 turns a weight of -0.0 into code +0.

On CUDA the library multiplies with the reciprocal of a Python number, at times one FP32 ulp off. Here divisions are
true divisions everywhere, so that a master gives the same codes on every device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from qarl_kernels.activation import FP8_MAX
from torch import Tensor


@dataclass(frozen=True)
class Grid:
    """Range of codes. lowest, highest: smallest and largest code. divisor: the scale is absmax / divisor."""

    lowest: float
    highest: float
    divisor: float


INT4 = Grid(-8.0, 7.0, 7.5)
INT4_SYMMETRIC7 = Grid(-7.0, 7.0, 7.0)
INT8 = Grid(-128.0, 127.0, 127.5)
FP8 = Grid(-FP8_MAX, FP8_MAX, FP8_MAX)


def stored_scale(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Round a nonnegative FP32 scale to `dtype`, finite and nonzero."""
    limits = torch.finfo(dtype)
    stored = scale.clamp(max=limits.max).to(dtype)
    return stored.masked_fill_(stored == 0, limits.eps)


def symmetric(groups: Tensor, grid: Grid, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Scale groups float32 [..., size] by their largest magnitudes.

    Returns values / stored scale, float32 and not yet rounded to codes; the scale [..., 1] of scale_dtype; the number
    of groups with a NaN or an infinity.
    """
    absmax = torch.maximum(groups.amax(-1, keepdim=True), -groups.amin(-1, keepdim=True))
    scale = stored_scale(absmax / torch.full_like(absmax, grid.divisor), scale_dtype)
    return groups / scale.float(), scale, absmax.isfinite().logical_not_().sum()


def asymmetric(groups: Tensor, grid: Grid, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Like `symmetric`, over the range of each group. The third result is the zero point [..., 1], an integer in
    float32.
    """
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    bad = torch.maximum(high, -low).isfinite().logical_not_().sum()
    low.clamp_(max=0)
    exact = (high.clamp_(min=0) - low) / torch.full_like(low, grid.highest - grid.lowest)
    zero_point = (grid.lowest - low / exact).clamp_(grid.lowest, grid.highest).nan_to_num_(nan=0.0).round_()
    scale = stored_scale(exact, scale_dtype)
    return (groups / scale.float()).add_(zero_point), scale, zero_point, bad


def integers(scaled: Tensor, grid: Grid) -> Tensor:
    """Round scaled values, float32 of any shape, to int8 codes. Overwrites its input."""
    return scaled.clamp_(grid.lowest, grid.highest).round_().to(torch.int8)


def e4m3(scaled: Tensor) -> Tensor:
    """Round scaled values, float32 of any shape, to float8_e4m3fn codes. Overwrites its input."""
    return scaled.add_(0.0).clamp_(FP8.lowest, FP8.highest).to(torch.float8_e4m3fn)
