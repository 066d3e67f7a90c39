"""w8a8: int8 weights with a scale per row; activations int8 per token, dynamic (compressed-tensors W8A8)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qarl_formats.registry import register
from qarl_formats.scheme import Codes
from qarl_formats.schemes.bytes import ByteActivations

if TYPE_CHECKING:
    from qarl_kernels.moe.groups import Groups
    from torch import Tensor


@register
class W8A8(ByteActivations):
    """y = ((qx @ codes^T in int32) * s_w) * s_x, exact up to the scales."""

    name = "w8a8"
    description = "int8 weights, a scale per row; int8 activations, a scale per token"
    weight_type = "int"
    activation = "int8"
    input_codes = "int8"
    file_format = "int-quantized"
    tolerance = 0.3

    @staticmethod
    def plain(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        from qarl_kernels import reference

        return reference.w8a8(x, codes, scale, bias)

    @staticmethod
    def kernel(
        x: Codes, codes: Tensor, scale: Tensor, bias: Tensor | None, groups: Groups | None, gathered: bool
    ) -> Tensor:
        from qarl_kernels.gemm import w8a8

        return w8a8(x.codes, x.scale, codes, scale, bias, x.dtype, groups=groups, gathered=gathered)
