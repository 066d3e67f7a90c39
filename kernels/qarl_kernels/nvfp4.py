"""NVFP4 weights and the product nvfp4a16 in plain torch: the reference of the kernels.

A weight is code * scale / global scale: an e2m1 code, one e4m3 scale per 16 input features, one float32 divisor per
tensor. code * scale has at most six significant bits between 2^-10 and 2688, so bf16 and fp16 hold it exactly. The
product multiplies these exact values, sums in float32 and divides by the global scale once, at the end, as vLLM's
Marlin kernel does: no weight is rounded. (One difference: Marlin treats e4m3 scales below 2^-6 as 0.)
"""

from __future__ import annotations

import torch
from torch import Tensor

from qarl_kernels.reference import epilogue, matmul

GROUP = 16
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # magnitudes


def e2m1_values(packed: Tensor) -> Tensor:
    """uint8 [N, K / 2], two codes per byte, the first in the low nibble -> float32 [N, K]; code 8 is -0.0."""
    table = torch.tensor(E2M1 + tuple(-value for value in E2M1), dtype=torch.float32, device=packed.device)
    codes = torch.stack((packed & 15, packed >> 4), dim=-1)
    return table[codes.flatten(1).int()]


def scaled_codes(packed: Tensor, scale: Tensor) -> Tensor:
    """code * scale, exact, float32 [N, K]: the weight without the global scale. scale: float8_e4m3fn [N, K / 16]."""
    n, groups = scale.shape
    return e2m1_values(packed).view(n, groups, GROUP).mul_(scale.float()[..., None]).view(n, groups * GROUP)


def dequantized_nvfp4(packed: Tensor, scale: Tensor, global_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """code * (scale / global scale), each step in float32, rounded once to `dtype`, as compressed-tensors does.

    packed: uint8 [N, K / 2]; scale: float8_e4m3fn [N, K / 16]; global_scale: float32 [1]. Returns [N, K].
    """
    n, groups = scale.shape
    step = (scale.float() / global_scale)[..., None]
    return e2m1_values(packed).view(n, groups, GROUP).mul_(step).view(n, groups * GROUP).to(dtype)


def nvfp4a16(x: Tensor, weight: Tensor, global_scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """y = (x @ weight^T in float32) * (1 / global scale) + bias, rounded once to x's dtype.

    x: (M, K) bf16/fp16/fp32; weight: (N, K) float32, `scaled_codes`; global_scale: float32 (1,); bias: (N,) or None.
    Returns (M, N) of x's dtype. On a CPU a row's bits do not depend on the other rows.
    """
    return epilogue(matmul(x.float(), weight.float()) * global_scale.reciprocal(), bias, x.dtype)
