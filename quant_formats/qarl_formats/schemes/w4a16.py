"""w4a16: packed int4 weights, symmetric or with zero points; activations as they are (compressed-tensors W4A16)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from qarl_formats.registry import register
from qarl_formats.schemes.int4 import PackedInt4

if TYPE_CHECKING:
    import torch
    from qarl_kernels.moe.groups import Groups
    from torch import Tensor

    from qarl_formats.prepared import PreparedWeight
    from qarl_formats.quantize import QuantizedWeight


@register
class W4A16(PackedInt4):
    """y = x @ W^T with W = (codes - zero point) * scale rounded to x's dtype.

    Operands: the stored tensors, and of the CPU `weight_values` float32 (N, K), which it multiplies; of a GPU
    `weight_tiled` and `weight_meta` (`qarl_kernels.tile`), which few rows are multiplied with, where the scales are of
    the compute dtype. Without them, and for many rows, the weight is dequantized first. A GPU's `weight_packed` may be
    left out: it is then put back in order from the tiles.
    """

    name = "w4a16"
    description = "int4 weights, a scale (and on request a zero point) a group or row; activations in 16 bits"
    zero_points = True
    tolerance = 0.1

    def operands(self, weight: QuantizedWeight, dtype: torch.dtype, kernels: bool) -> dict[str, Tensor]:
        stored = {name: tensor for name, tensor in weight.tensors.items() if name != "weight_shape"}
        if not kernels:
            values = self.dequantize(weight, dtype)
            return stored | {"weight_values": values.float() if values.device.type == "cpu" else values}
        scale, zero_point = stored["weight_scale"], stored.get("weight_zero_point")
        if scale.dtype != dtype:
            return stored
        from qarl_kernels import tile

        (n, k), group = weight.shape, self.group_size
        meta = tile.meta_w4a16(scale, zero_point, n, k, group, dtype)
        return stored | {"weight_tiled": tile.tile_int4(stored["weight_packed"], k), "weight_meta": meta}

    @classmethod
    def multiply(
        cls, x: Tensor, operands: Mapping[str, Tensor], out_features: int, bias: Tensor | None, kernels: bool
    ) -> Tensor:
        if not kernels:
            from qarl_kernels import reference

            return reference.dense(x, operands["weight_values"], bias)
        from qarl_kernels.w4a16 import w4a16

        return w4a16(
            x.contiguous(),
            operands.get("weight_packed"),
            operands["weight_scale"],
            operands.get("weight_zero_point"),
            operands.get("weight_tiled"),
            operands.get("weight_meta"),
            bias,
        )

    @classmethod
    def grouped_by_kernel(
        cls, x: Tensor, operands: Mapping[str, Tensor], out_features: int, groups: Groups, gathered: bool
    ) -> Tensor:
        from qarl_kernels.w4a16 import w4a16

        return w4a16(
            x,
            operands.get("weight_packed"),
            operands["weight_scale"],
            operands.get("weight_zero_point"),
            operands.get("weight_tiled"),
            operands.get("weight_meta"),
            groups=groups,
            gathered=gathered,
        )

    @classmethod
    def parts(cls, operands: Mapping[str, Tensor], widths: list[int]) -> list[dict[str, Tensor]]:
        return super().parts({"weight_values": operands["weight_values"]}, widths)  # what the CPU reads

    def stored(
        self, operands: Mapping[str, Tensor], shape: tuple[int, int], dtype: torch.dtype, kernels: bool
    ) -> dict[str, Tensor]:
        tiled = "weight_tiled" in operands
        packed = self._packed_of(operands, shape) if tiled else operands["weight_packed"]
        return self._stored_with(packed, operands, shape)

    def dequantized(self, prepared: PreparedWeight, dtype: torch.dtype) -> Tensor:
        if prepared.kernels:
            return self.dequantize(prepared.source, dtype, kernels=True)
        return prepared.operands["weight_values"]
