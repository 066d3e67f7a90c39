"""w4a16: packed int4 weights, symmetric or with zero points; 16-bit activations (compressed-tensors W4A16)."""

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
class W4A16(PackedInt4):
    """y = x @ W^T with W = (codes - zero point) * scale rounded to x's dtype.

    Operands in plain torch: the stored tensors and `weight_values`, float32 (N, K) on the CPU.
    With Triton: the stored tensors, and if the scales have the compute dtype also `weight_tiled` and `weight_meta`
    (`qarl_kernels.tile`), which are faster for few rows. Otherwise, and for many rows, the weight is dequantized first.
    With tiles, `weight_packed` may be left out; it is then restored from them.
    """

    name = "w4a16"
    description = "int4 weights, a scale (and optionally a zero point) per group or row; 16-bit activations"
    zero_points = True
    tolerance = 0.1

    def operands(self, tensors: Tensors, shape: Shape, dtype: torch.dtype, kernels: bool) -> dict[str, Tensor]:
        if not kernels:
            return super().operands(tensors, shape, dtype, kernels)
        stored = {name: tensor for name, tensor in tensors.items() if name != "weight_shape"}
        scale, zero_point = stored["weight_scale"], stored.get("weight_zero_point")
        if scale.dtype != dtype:
            return stored
        from qarl_kernels import tile

        meta = tile.meta_w4a16(scale, zero_point, *shape, self.group_size, dtype)
        return stored | {"weight_tiled": tile.tile_int4(stored["weight_packed"], shape[1]), "weight_meta": meta}

    def kernel_product(
        self, x: Tensor | Codes, operands: Tensors, n: int, bias: Tensor | None, groups: Groups | None, gathered: bool
    ) -> Tensor:
        assert not isinstance(x, Codes), "w4a16 multiplies 16-bit activations"
        packed, zero_point = operands.get("weight_packed"), operands.get("weight_zero_point")
        tiles = operands.get("weight_tiled"), operands.get("weight_meta")
        from qarl_kernels.w4a16 import w4a16

        scale = operands["weight_scale"]
        return w4a16(x, packed, scale, zero_point, *tiles, bias, groups=groups, gathered=gathered)
