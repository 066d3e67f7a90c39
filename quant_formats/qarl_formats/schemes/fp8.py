"""fp8: float8_e4m3fn weights with a scale per row; activations float8_e4m3fn per token, dynamic (FP8_DYNAMIC)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from qarl_formats.registry import register
from qarl_formats.scheme import Codes
from qarl_formats.schemes.bytes import ByteActivations

if TYPE_CHECKING:
    from qarl_kernels.moe.groups import Groups
    from torch import Tensor


@register
class FP8(ByteActivations):
    """y = ((qx @ codes^T in fp32) * s_w) * s_x."""

    name = "fp8"
    description = "float8_e4m3fn weights, a scale per row; float8_e4m3fn activations, a scale per token"
    weight_type = "float"
    activation = "fp8"
    input_codes = "fp8"
    capability = (8, 9)
    file_format = "float-quantized"
    tolerance = 0.3

    def fp8_codes(self, operands: Mapping[str, Tensor]) -> tuple[Tensor, Tensor] | None:
        return operands["weight"], operands["weight_scale"]

    @staticmethod
    def plain(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        from qarl_kernels import reference

        return reference.fp8(x, codes, scale, bias)

    @staticmethod
    def kernel(
        x: Codes, codes: Tensor, scale: Tensor, bias: Tensor | None, groups: Groups | None, gathered: bool
    ) -> Tensor:
        from qarl_kernels.gemm import fp8

        return fp8(x.codes, x.scale, codes, scale, bias, x.dtype, groups=groups, gathered=gathered)
