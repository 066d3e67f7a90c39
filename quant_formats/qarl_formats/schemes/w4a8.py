"""w4a8: packed symmetric int4 weights; activations int8 per token, dynamic (compressed-tensors W4A8)."""

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
class W4A8(PackedInt4):
    """y = sum over groups of (qx_g @ codes_g^T) * s_g, in order, times the token's scale.

    Operands: `weight_scale`, and of the CPU `weight_codes` float32 (N, K); of a GPU `weight_tiled` and `weight_meta`.
    """

    name = "w4a8"
    description = "int4 weights, a scale a group or row; int8 activations, a scale a token"
    activation = "int8"
    input_codes = "int8"
    tolerance = 0.4

    def operands(self, weight: QuantizedWeight, dtype: torch.dtype, kernels: bool) -> dict[str, Tensor]:
        packed, scale = weight.tensors["weight_packed"], weight.tensors["weight_scale"]
        if not kernels:
            return {"weight_scale": scale, "weight_codes": self.codes(weight).float()}
        from qarl_kernels import tile

        (n, k), group = weight.shape, self.group_size
        tiled, meta = tile.tile_int4(packed, k), tile.meta_w4a8(scale, n, k, group)
        return {"weight_scale": scale, "weight_tiled": tiled, "weight_meta": meta}

    @classmethod
    def multiply(
        cls, x: Tensor, operands: Mapping[str, Tensor], out_features: int, bias: Tensor | None, kernels: bool
    ) -> Tensor:
        scale = operands["weight_scale"]
        if not kernels:
            from qarl_kernels import reference

            return reference.w4a8(x, operands["weight_codes"], scale, bias)
        from qarl_kernels import quantize

        return cls.multiply_codes(*quantize.activation_int8(x.contiguous()), operands, out_features, bias, x.dtype)

    @classmethod
    def multiply_codes(
        cls,
        codes: Tensor,
        scale: Tensor,
        operands: Mapping[str, Tensor],
        out_features: int,
        bias: Tensor | None,
        dtype: torch.dtype,
    ) -> Tensor:
        from qarl_kernels.w4a8 import w4a8

        channel = operands["weight_scale"].shape[1] == 1
        tiled, meta = operands["weight_tiled"], operands["weight_meta"]
        return w4a8(codes, scale, tiled, meta, codes.shape[1], out_features, bias, dtype, channel)

    @classmethod
    def grouped_by_kernel(
        cls, x: Tensor, operands: Mapping[str, Tensor], out_features: int, groups: Groups, gathered: bool
    ) -> Tensor:
        from qarl_kernels import quantize

        codes, scale = quantize.activation_int8(x)
        return cls.multiply_codes_grouped(codes, scale, operands, out_features, groups, gathered, x.dtype)

    @classmethod
    def multiply_codes_grouped(
        cls,
        codes: Tensor,
        scale: Tensor,
        operands: Mapping[str, Tensor],
        out_features: int,
        groups: Groups,
        gathered: bool,
        dtype: torch.dtype,
    ) -> Tensor:
        from qarl_kernels.w4a8 import w4a8

        channel = operands["weight_scale"].shape[1] == 1
        weight = operands["weight_tiled"], operands["weight_meta"], codes.shape[1], out_features
        return w4a8(codes, scale, *weight, None, dtype, channel, groups=groups, gathered=gathered)

    def stored(
        self, operands: Mapping[str, Tensor], shape: tuple[int, int], dtype: torch.dtype, kernels: bool
    ) -> dict[str, Tensor]:
        if kernels:
            return self._stored_with(self._packed_of(operands, shape), operands, shape)
        import torch

        from qarl_formats.packing import pack_int4

        return self._stored_with(pack_int4(operands["weight_codes"].to(torch.int8)), operands, shape)

    def dequantized(self, prepared: PreparedWeight, dtype: torch.dtype) -> Tensor:
        if prepared.kernels:
            return self.dequantize(prepared.source, dtype, kernels=True)
        codes, scale = prepared.operands["weight_codes"], prepared.operands["weight_scale"]
        n, k = codes.shape
        wide = codes.view(n, scale.shape[1], -1) * scale.float()[..., None]
        return wide.view(n, k).to(dtype).to(codes.dtype)
