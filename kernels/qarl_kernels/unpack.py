"""Stored codes -> values in plain torch: what the operators run on the CPU, and the meaning of the kernels.

The layout is that of compressed-tensors `pack_to_int32`: code + 8 is a nibble, eight nibbles make an int32 word, the
first in its lowest bits. Weights are packed along K, zero points along N.
"""

from __future__ import annotations

import torch
from torch import Tensor

FP8_BLOCK = 128  # side of the square that shares a scale


def int4_codes(packed: Tensor, in_features: int) -> Tensor:
    """int32 [N, ceil(K / 8)] -> int8 [N, K] in [-8, 7]. in_features: K."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=packed.device)
    nibbles = (packed[..., None] >> shifts) & 0xF
    return (nibbles.flatten(1)[:, :in_features] - 8).to(torch.int8)


def int4_zero_points(packed: Tensor, out_features: int) -> Tensor:
    """int32 [ceil(N / 8), groups] -> int8 [N, groups] in [-8, 7]. out_features: N."""
    return int4_codes(packed.t(), out_features).t()


def dequantized_int4(
    packed: Tensor, scale: Tensor, zero_point: Tensor | None, in_features: int, dtype: torch.dtype
) -> Tensor:
    """(code - zero point) * scale in float32, rounded once. [N, K] of `dtype`.

    packed: int32 [N, ceil(K / 8)]; scale: [N, groups]; zero_point: int32 [ceil(N / 8), groups] or None (symmetric).
    """
    n, groups = scale.shape
    values = int4_codes(packed, in_features).float().view(n, groups, -1)
    if zero_point is not None:
        values -= int4_zero_points(zero_point, n)[..., None]
    return values.mul_(scale.float()[..., None]).view(n, in_features).to(dtype)


def dequantized_channel(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """code * scale in float32, rounded once. codes: int8 or float8_e4m3fn [N, K]; scale: [N, 1]."""
    return (codes.float() * scale.float()).to(dtype)


def dequantized_fp8_block(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """code * scale in float32, rounded once. codes: float8_e4m3fn [N, K]; scale: [ceil(N / 128), ceil(K / 128)]."""
    n, k = codes.shape
    wide = scale.float().repeat_interleave(FP8_BLOCK, 0)[:n].repeat_interleave(FP8_BLOCK, 1)[:, :k]
    return (codes.float() * wide).to(dtype)
