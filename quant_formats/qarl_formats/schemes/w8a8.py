"""w8a8: int8 weights with a scale per row; activations int8 per token, dynamic (compressed-tensors W8A8)."""

from __future__ import annotations

from qarl_formats.registry import register
from qarl_formats.schemes.bytes import ByteActivations


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
