"""fp8: float8_e4m3fn weights with a scale per row; activations float8_e4m3fn per token, dynamic (FP8_DYNAMIC)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qarl_formats.registry import register
from qarl_formats.scheme import Tensors
from qarl_formats.schemes.bytes import ByteActivations

if TYPE_CHECKING:
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

    def fp8_codes(self, operands: Tensors) -> tuple[Tensor, Tensor] | None:
        return operands["weight"], operands["weight_scale"]
