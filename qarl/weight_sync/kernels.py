"""Quantization of masters on a GPU: the tensors of `qarl_formats.quantize.quantize_weight`, in one pass over each."""

from __future__ import annotations

import torch
from qarl_formats.quantize import QuantizedWeight, grid_of, quantize_weight
from qarl_formats.scheme import Scheme, check_shape
from qarl_kernels import quantize
from torch import Tensor


@torch.no_grad()
def quantize_with_kernels(weight: Tensor, scheme: Scheme, name: str) -> QuantizedWeight:
    """`quantize_weight` with Triton kernels, bit for bit.

    weight: float32 [N, K], contiguous. Raises ValueError as `quantize_weight` does.
    """
    n, k = weight.shape
    check_shape(scheme, name, n, k)
    tensors, bad = (_int4 if scheme.packed else _channel)(weight, scheme)
    if bad.item():
        return quantize_weight(weight, scheme, name)  # raises: it says how many values are not finite
    return QuantizedWeight(scheme, tensors, (n, k))


def _int4(weight: Tensor, scheme: Scheme) -> tuple[dict[str, Tensor], Tensor]:
    lowest, highest, divisor = grid_of(scheme)
    packed, scale, zero_point, bad = quantize.quantize_int4(
        weight,
        scheme.group_size,
        symmetric=scheme.symmetric,
        divisor=divisor,
        lowest=lowest,
        highest=highest,
        scale_dtype=getattr(torch, scheme.scale_dtype),
    )
    tensors = {"weight_packed": packed, "weight_scale": scale}
    if zero_point is not None:
        tensors["weight_zero_point"] = zero_point
    return tensors | {"weight_shape": torch.tensor(weight.shape)}, bad


def _channel(weight: Tensor, scheme: Scheme) -> tuple[dict[str, Tensor], Tensor]:
    kernel = quantize.quantize_fp8 if scheme.weight_type == "float" else quantize.quantize_int8
    codes, scale, bad = kernel(weight, getattr(torch, scheme.scale_dtype))
    return {"weight": codes, "weight_scale": scale}, bad
