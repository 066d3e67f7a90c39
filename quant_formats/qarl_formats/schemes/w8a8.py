"""w8a8: int8 weights with a scale per row; activations int8 per token, dynamic (compressed-tensors W8A8)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qarl_formats.registry import register
from qarl_formats.scheme import CodeGrid, Shape, Tensors
from qarl_formats.schemes.bytes import ByteActivations

if TYPE_CHECKING:
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
    chooses_codes = True
    tolerance = 0.3

    def code_grid(self, tensors: Tensors, shape: Shape) -> CodeGrid:
        import torch

        from qarl_formats.rounding import INT8

        step = tensors["weight_scale"].float()
        levels = torch.arange(INT8.lowest, INT8.highest + 1, device=step.device)
        return CodeGrid(levels, step, torch.zeros_like(step))

    def with_codes(self, tensors: Tensors, codes: Tensor) -> dict[str, Tensor]:
        return {**tensors, "weight": codes.to(tensors["weight"].dtype)}
