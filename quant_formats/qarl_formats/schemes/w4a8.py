"""w4a8: packed symmetric int4 weights; activations int8 per token, dynamic (compressed-tensors W4A8)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qarl_formats.registry import register
from qarl_formats.scheme import Codes, Shape, Tensors
from qarl_formats.schemes.int4 import PackedInt4

if TYPE_CHECKING:
    import torch
    from qarl_kernels.groups import Groups
    from torch import Tensor


@register
class W4A8(PackedInt4):
    """y = sum over groups of (qx_g @ codes_g^T) * s_g, in order, times the token's scale.

    Operands: `weight_scale`, and in plain torch `weight_codes` float32 (N, K); with Triton `weight_tiled` and
    `weight_meta`.
    """

    name = "w4a8"
    description = "int4 weights, a scale per group or row; int8 activations, a scale per token"
    activation = "int8"
    input_codes = "int8"
    tolerance = 0.4
    plain_operands = ("weight_codes", "weight_scale")

    def operands(self, tensors: Tensors, shape: Shape, dtype: torch.dtype, kernels: bool) -> dict[str, Tensor]:
        scale = tensors["weight_scale"]
        if not kernels:
            return {"weight_scale": scale, "weight_codes": self.codes(tensors, shape).float()}
        from qarl_kernels import tile

        meta = tile.meta_w4a8(scale, *shape, self.group_size)
        tiled = tile.tile_int4(tensors["weight_packed"], shape[1])
        return {"weight_scale": scale, "weight_tiled": tiled, "weight_meta": meta}

    def stored(self, operands: Tensors, shape: Shape, dtype: torch.dtype) -> dict[str, Tensor]:
        if (codes := operands.get("weight_codes")) is not None:
            import torch

            from qarl_formats.packing import pack_int4

            operands = {**operands, "weight_packed": pack_int4(codes.to(torch.int8))}
        return super().stored(operands, shape, dtype)

    def plain_product(self, x: Tensor, operands: Tensors, bias: Tensor | None) -> Tensor:
        from qarl_kernels import reference

        return reference.w4a8(x, operands["weight_codes"], operands["weight_scale"], bias)

    def kernel_product(
        self, x: Tensor | Codes, operands: Tensors, n: int, bias: Tensor | None, groups: Groups | None, gathered: bool
    ) -> Tensor:
        assert isinstance(x, Codes), "w4a8 multiplies codes"
        from qarl_kernels.w4a8 import w4a8

        per_row = operands["weight_scale"].shape[1] == 1
        weight = operands["weight_tiled"], operands["weight_meta"], x.codes.shape[1], n
        return w4a8(x.codes, x.scale, *weight, bias, x.dtype, per_row, groups=groups, gathered=gathered)
