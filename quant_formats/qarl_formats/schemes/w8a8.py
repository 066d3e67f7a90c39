"""w8a8: int8 weights, a scale a row; activations int8 per token, dynamic (compressed-tensors W8A8)."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from qarl_formats.registry import register
from qarl_formats.schemes.bytes import ByteActivations, CodesProduct, GroupedProduct, QuantizeInput, Reference

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@register
class W8A8(ByteActivations):
    """y = ((qx @ codes^T in int32) * s_w) * s_x, exact up to the scales."""

    name = "w8a8"
    description = "int8 weights, a scale a row; int8 activations, a scale a token"
    weight_type = "int"
    activation = "int8"
    input_codes = "int8"
    file_format = "int-quantized"
    tolerance = 0.3

    def _by_torch(self, weight: Tensor, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        from qarl_formats import rounding

        scaled, scale, bad = rounding.symmetric(weight, rounding.INT8, scale_dtype)
        return rounding.integers(scaled, rounding.INT8), scale, bad

    def _by_kernel(self, weight: Tensor, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        from qarl_kernels.quantize import quantize_int8

        return quantize_int8(weight, scale_dtype)

    @classmethod
    def _reference(cls) -> Reference:
        from qarl_kernels import reference

        return reference.w8a8

    @classmethod
    @cache
    def _kernels(cls) -> tuple[QuantizeInput, CodesProduct]:
        from qarl_kernels import gemm, quantize

        return quantize.activation_int8, gemm.w8a8

    @classmethod
    def _grouped_kernel(cls) -> GroupedProduct:
        from qarl_kernels.moe import codes

        return codes.grouped_w8a8
