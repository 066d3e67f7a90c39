"""FP32 master weight -> codes and scales, bit for bit as compressed-tensors computes them, and back.

What is common to all schemes; what one does is in its file in `qarl_formats.schemes`, and the arithmetic that they
share in `qarl_formats.rounding`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qarl_formats.scheme import Scheme, check_shape


@dataclass
class QuantizedWeight:
    """The stored form of one Linear weight.

    Args:
        scheme: how it is stored.
        tensors: by compressed-tensors suffix, as `scheme.tensor_specs` has them. int4: `weight_packed` int32
            [N, ceil(K/8)], `weight_scale` [N, groups], `weight_shape` int64 [2] (on the CPU), and if asymmetric
            `weight_zero_point` int32 [ceil(N/8), groups]. A code to a byte: `weight` int8 or float8_e4m3fn [N, K] and
            `weight_scale` [N, 1].
        shape: (N, K) = (out_features, in_features).
    """

    scheme: Scheme
    tensors: dict[str, Tensor]
    shape: tuple[int, int]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


@torch.no_grad()
def quantize_weight(
    weight: Tensor, scheme: Scheme, name: str, kernels: bool = False, shared: Tensor | None = None
) -> QuantizedWeight:
    """Quantize one master weight.

    Args:
        weight: float32 [N, K] = [out_features, in_features]; not changed.
        scheme: a quantized scheme (not bf16).
        name: what errors call the tensor.
        kernels: with Triton, in one pass over a weight on a GPU with contiguous rows; the tensors are the same.
        shared: what `scheme.shared` gave for it and the weights that are multiplied with it; None: it stands alone.

    Raises:
        ValueError: the scheme does not fit the shape, or a value is NaN or infinite.
    """
    assert scheme.quantized, f"{name}: scheme {scheme.name} does not quantize weights"
    assert weight.dtype == torch.float32 and weight.ndim == 2, f"{name}: need a float32 matrix, got {weight.dtype}"
    out_features, in_features = weight.shape
    check_shape(scheme, name, out_features, in_features)
    tensors, bad = scheme.quantize(weight.contiguous(), kernels, shared)
    if bad.item():
        count = weight.isfinite().logical_not_().sum().item()
        raise ValueError(
            f"{name}: {count} of {weight.numel()} values are NaN or infinite and cannot be quantized; "
            "go back to an earlier checkpoint or lower the learning rate"
        )
    return QuantizedWeight(scheme, tensors, (out_features, in_features))


def unpack_codes(quantized: QuantizedWeight) -> Tensor:
    """The codes as one element each, [N, K]: int8 for int4 and int8, float8_e4m3fn for fp8 (the stored tensor)."""
    return quantized.scheme.codes(quantized)


@torch.no_grad()
def dequantize_weight(quantized: QuantizedWeight, dtype: torch.dtype, kernels: bool = False) -> Tensor:
    """The weight that the codes stand for: (code - zero point) * scale in FP32, rounded once to `dtype`. [N, K]."""
    return quantized.scheme.dequantize(quantized, dtype, kernels)


def codes_changed(
    before: QuantizedWeight, after: QuantizedWeight, widths: Sequence[int] | None = None
) -> tuple[Tensor, int]:
    """Count the codes that differ between two versions of one weight; scales and zero points do not count.

    The fp8 codes +0 and -0 are different codes.

    Args:
        widths: where it is a stack of weights, the output features of each.

    Returns:
        (changed, total): counts of codes; changed an int64 tensor on their device, a scalar, or of each weight of the
        stack [len(widths)]; total = N * K.

    Raises:
        ValueError: the two have different schemes or shapes.
    """
    if before.scheme != after.scheme or before.shape != after.shape:
        raise ValueError(
            f"codes of {before.scheme.name} {before.shape} and {after.scheme.name} {after.shape} cannot be compared"
        )
    changed = before.scheme.changed(before.tensors, after.tensors, widths or before.shape[:1])
    return changed if widths else changed[0], before.shape[0] * before.shape[1]
