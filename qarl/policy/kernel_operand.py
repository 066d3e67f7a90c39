"""The aligned operand on a GPU: the published tensors themselves, multiplied by the Triton kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from qarl_formats.quantize import QuantizedWeight
from qarl_kernels import dequantize, gemm, quantize, tile, w4a8, w4a16
from torch import Tensor

from qarl.policy.stored import scale_and_zero_point_of_columns, scale_of_columns


@dataclass(frozen=True)
class KernelOperand:
    """The weight side of one row-invariant product of 16-bit activations.

    product: `dense` for an unquantized layer, otherwise the scheme's name.
    source: the published tensors, which the product and the backward read; no copy of them is kept.
    tiled, meta: an int4 weight in the order in which its kernel reads it (`qarl_kernels.tile`); None for the others,
    and for w4a16 whose scales are not of the compute dtype (dequantized before the product, in every forward).
    activation: activation quantization of the scheme.
    """

    product: Literal["dense", "w4a16", "w8a8", "fp8", "w4a8"]
    source: QuantizedWeight | Tensor
    tiled: Tensor | None = None
    meta: Tensor | None = None
    activation: Literal["int8", "fp8"] | None = None

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x: (M, K) of the compute dtype; bias: (N,) or None. Returns (M, N) of x's dtype."""
        x = x.contiguous()
        if isinstance(self.source, Tensor):
            return gemm.dense(x, self.source, bias)
        tensors = self.source.tensors
        scale = tensors["weight_scale"]
        if self.product == "w4a16":
            zero_point = tensors.get("weight_zero_point")
            return w4a16.w4a16(x, tensors["weight_packed"], scale, zero_point, self.tiled, self.meta, bias)
        if self.product == "w4a8":
            (n, k), channel = self.source.shape, scale.shape[1] == 1
            return w4a8.w4a8(*quantize.activation_int8(x), self.tiled, self.meta, k, n, bias, x.dtype, channel)
        if self.product == "w8a8":
            return gemm.w8a8(*quantize.activation_int8(x), tensors["weight"], scale, bias, x.dtype)
        return gemm.fp8(*quantize.activation_fp8(x), tensors["weight"], scale, bias, x.dtype)

    def held(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """The published tensors as they stand in what the product reads, by suffix: codes out of their tiles, scales
        and zero points out of their columns. dtype: the compute dtype, which needs no undoing here."""
        if isinstance(self.source, Tensor):
            return {"weight": self.source}
        tensors = self.source.tensors
        if self.tiled is None or self.meta is None:
            return tensors
        scale, one_group = tensors["weight_scale"], self.source.scheme.group_size is None
        found = tensors | {"weight_packed": tile.untile_int4(self.tiled, *self.source.shape)}
        if self.product == "w4a8":
            return found | {"weight_scale": scale_of_columns(self.meta, scale.shape, one_group, scale.dtype)}
        symmetric = "weight_zero_point" not in tensors
        found["weight_scale"], zero_point = scale_and_zero_point_of_columns(
            self.meta, scale.shape, one_group, symmetric, scale.dtype
        )
        return found if zero_point is None else found | {"weight_zero_point": zero_point}

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """W_deq (N, K): (code - zero point) * scale rounded to `dtype`; made anew in every call."""
        if isinstance(self.source, Tensor):
            return self.source
        tensors = self.source.tensors
        scale = tensors["weight_scale"]
        if self.source.scheme.packed:
            zero_point, k = tensors.get("weight_zero_point"), self.source.shape[1]
            return dequantize.dequantize_int4(tensors["weight_packed"], scale, zero_point, k, dtype)
        return dequantize.dequantize_channel(tensors["weight"], scale, dtype)


def kernel_operand(weight: QuantizedWeight | Tensor, dtype: torch.dtype) -> KernelOperand:
    """The operand of published tensors. weight: codes and scales, or (N, K) of `dtype`; dtype: bf16 or fp16."""
    if isinstance(weight, Tensor):
        return KernelOperand("dense", weight)
    scheme = weight.scheme
    tiled, meta = _tiled(weight, dtype) if scheme.packed else (None, None)
    return KernelOperand(scheme.name, weight, tiled, meta, scheme.activation)  # type: ignore[arg-type]


def _tiled(weight: QuantizedWeight, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    packed, scale = weight.tensors["weight_packed"], weight.tensors["weight_scale"]
    (n, k), group = weight.shape, weight.scheme.group_size
    if weight.scheme.name == "w4a8":
        return tile.tile_int4(packed, k), tile.meta_w4a8(scale, n, k, group)
    if scale.dtype != dtype:
        return None, None
    zero_point = weight.tensors.get("weight_zero_point")
    return tile.tile_int4(packed, k), tile.meta_w4a16(scale, zero_point, n, k, group, dtype)
