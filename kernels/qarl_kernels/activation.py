"""Dynamic per-token quantization of activations in plain torch, by the rules of vLLM's CUDA kernels.

Every row (token) has its own scale, so its codes do not depend on the rest of the batch. Divisors are tensors, because
torch on CUDA turns a division by a Python number into a multiplication by its reciprocal, and computes
`number / tensor` as a reciprocal and a multiplication on every device.
"""

from __future__ import annotations

import torch
from torch import Tensor

INT8_MAX = 127.0
FP8_MAX = torch.finfo(torch.float8_e4m3fn).max  # 448
FP8_MIN_SCALE = 1.0 / (FP8_MAX * 512.0)


def _absmax(x: Tensor) -> Tensor:
    """Return the largest magnitude per row, float32 (*, 1); NaN if the row has one."""
    return torch.maximum(x.amax(dim=-1, keepdim=True), -x.amin(dim=-1, keepdim=True)).float()


@torch.no_grad()
def quantize_activation_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize each row to int8: scale = absmax / 127, codes = round-half-even(x * (127 / absmax)), all in float32.

    The rule of vLLM's `dynamic_scaled_int8_quant_kernel` (csrc/quantization/w8a8/int8/scaled_quant.cu), which
    multiplies by 127 / absmax; it neither multiplies by the reciprocal of the scale nor divides by it. One difference:
    the multiplier is kept finite, so rows with absmax under 3.8e-37 have codes near 0 instead of +-127 and NaN.

    Args:
        x: (*, K) float.

    Returns:
        codes: (*, K) int8 in [-127, 127]; zeros for a zero row.
        scale: (*, 1) float32; 0 for a zero row, not finite for a row with NaN or infinity.
    """
    absmax = _absmax(x)
    limit = torch.full_like(absmax, INT8_MAX)
    multiplier = (limit / absmax).clamp_(max=torch.finfo(torch.float32).max)
    # No clamp needed: the two roundings leave |x * multiplier| <= 127 * (1 + 2^-22), which rounds to 127.
    codes = (x.float() * multiplier).round_().to(torch.int8)
    return codes, absmax / limit


@torch.no_grad()
def quantize_activation_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize each row to e4m3fn: scale = max(absmax / 448, 1 / (448 * 512)), codes = e4m3fn(x / scale).

    The rule of vLLM's `dynamic_per_token_scaled_fp8_quant` (csrc/quantization/w8a8/fp8/common.cu). vLLM's torch
    fallback (`QuantFP8.forward_native`, used on CPUs and under torch.compile) multiplies by 1 / scale instead, which
    rounds a few values near a rounding boundary differently.

    Args:
        x: (*, K) float.

    Returns:
        codes: (*, K) float8_e4m3fn, saturated to +-448; zeros for a zero row.
        scale: (*, 1) float32, at least 1 / (448 * 512); not finite for a row with NaN or infinity.
    """
    absmax = _absmax(x)
    scale = (absmax / torch.full_like(absmax, FP8_MAX)).clamp_(min=FP8_MIN_SCALE)
    codes = (x.float() / scale).clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return codes, scale
