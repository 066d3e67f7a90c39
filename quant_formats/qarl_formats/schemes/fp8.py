"""fp8: float8_e4m3fn weights, a scale a row; activations float8_e4m3fn per token, dynamic (FP8_DYNAMIC)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING

from qarl_formats.registry import register
from qarl_formats.schemes.bytes import ByteActivations, CodesProduct, GroupedProduct, QuantizeInput, Reference

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@register
class FP8(ByteActivations):
    """y = ((qx @ codes^T in fp32) * s_w) * s_x."""

    name = "fp8"
    description = "float8_e4m3fn weights, a scale a row; float8_e4m3fn activations, a scale a token"
    weight_type = "float"
    activation = "fp8"
    input_codes = "fp8"
    capability = (8, 9)
    file_format = "float-quantized"
    tolerance = 0.3

    def _by_torch(self, weight: Tensor, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        from qarl_formats import rounding

        scaled, scale, bad = rounding.symmetric(weight, rounding.FP8, scale_dtype)
        return rounding.e4m3(scaled), scale, bad

    def _by_kernel(self, weight: Tensor, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        from qarl_kernels.quantize import quantize_fp8

        return quantize_fp8(weight, scale_dtype)

    def fp8_codes(self, operands: Mapping[str, Tensor]) -> tuple[Tensor, Tensor] | None:
        return operands["weight"], operands["weight_scale"]

    @classmethod
    def _reference(cls) -> Reference:
        from qarl_kernels import reference

        return reference.fp8

    @classmethod
    @cache
    def _kernels(cls) -> tuple[QuantizeInput, CodesProduct]:
        from qarl_kernels import gemm, quantize

        return quantize.activation_fp8, gemm.fp8

    @classmethod
    def _grouped_kernel(cls) -> GroupedProduct:
        from qarl_kernels.moe import codes

        return codes.grouped_fp8
