"""Base class of schemes with one code per byte: `weight` [N, K] int8 or float8_e4m3fn, `weight_scale` [N, 1].

The operands have the same names; on the CPU the codes are float32 of the same values. A subclass that quantizes
activations as well (`ByteActivations`) multiplies codes; any other one multiplies dequantized values by default.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from qarl_formats.scheme import Codes, Quantized, Scheme, Shape, Tensors, TensorSpec

if TYPE_CHECKING:
    import torch
    from qarl_kernels.groups import Groups
    from torch import Tensor


class ByteCodes(Scheme):
    weight_bits = 8

    @property
    def code_dtype(self) -> str:
        """torch's name of the dtype of a code."""
        return "int8" if self.weight_type == "int" else "float8_e4m3fn"

    def tensor_specs(self, out_features: int, in_features: int, unpacked: bool = False) -> dict[str, TensorSpec]:
        scales = -(-out_features // self.row_block), self.num_groups(in_features)
        return {
            "weight": TensorSpec((out_features, in_features), self.code_dtype),
            "weight_scale": TensorSpec(scales, self.scale_dtype),
        }

    def quantize(self, weight: Tensor, kernels: bool = False, shared: Tensor | None = None) -> Quantized:
        import torch

        dtype, code_dtype = getattr(torch, self.scale_dtype), getattr(torch, self.code_dtype)
        if kernels:
            from qarl_kernels.quantize import quantize_bytes

            codes, scale, bad = quantize_bytes(weight, dtype, code_dtype, self.row_block > 1)
        else:
            codes, scale, bad = self._by_torch(weight, dtype)
        return {"weight": codes, "weight_scale": scale}, bad

    def _by_torch(self, weight: Tensor, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """(codes, scale, number of rows that are not finite)."""
        from qarl_formats import rounding

        integers = self.weight_type == "int"
        scaled, scale, bad = rounding.symmetric(weight, rounding.INT8 if integers else rounding.FP8, scale_dtype)
        return (rounding.integers(scaled, rounding.INT8) if integers else rounding.e4m3(scaled)), scale, bad

    def codes(self, tensors: Tensors, shape: Shape) -> Tensor:
        return tensors["weight"]

    def preimage(self, tensors: Tensors, shape: Shape) -> tuple[Tensor, Tensor]:
        from qarl_formats import preimage, rounding

        grid = rounding.INT8 if self.weight_type == "int" else rounding.FP8
        master, exact = preimage.symmetric(tensors["weight"].float(), tensors["weight_scale"], grid)
        return master, (~exact).sum()

    def dequantize(self, tensors: Tensors, shape: Shape, dtype: torch.dtype, kernels: bool = False) -> Tensor:
        codes, scale = tensors["weight"], tensors["weight_scale"]
        if kernels:
            from qarl_kernels.dequantize import dequantize_bytes

            return dequantize_bytes(codes, scale, dtype, self.row_block > 1)
        return (codes.float() * scale.float()).to(dtype)


class ByteActivations(ByteCodes):
    """Base class of schemes that quantize activations to bytes as well.

    `qarl_kernels.reference` has a product under the scheme's name.
    """

    plain_operands = ("weight", "weight_scale")

    def operands(self, tensors: Tensors, shape: Shape, dtype: torch.dtype, kernels: bool) -> dict[str, Tensor]:
        codes = tensors["weight"]
        return {"weight": codes if kernels else codes.float(), "weight_scale": tensors["weight_scale"]}

    def stored(self, operands: Tensors, shape: Shape, dtype: torch.dtype) -> dict[str, Tensor]:
        import torch

        codes = operands["weight"].to(getattr(torch, self.code_dtype))
        return {"weight": codes, "weight_scale": operands["weight_scale"]}

    def plain_product(self, x: Tensor, operands: Tensors, bias: Tensor | None) -> Tensor:
        from qarl_kernels import reference

        return getattr(reference, self.name)(x, operands["weight"], operands["weight_scale"], bias)

    def kernel_product(
        self, x: Tensor | Codes, operands: Tensors, n: int, bias: Tensor | None, groups: Groups | None, gathered: bool
    ) -> Tensor:
        assert isinstance(x, Codes), f"scheme {self.name} multiplies codes"
        product, weight = self._kernel(), (operands["weight"], operands["weight_scale"])
        return product(x.codes, x.scale, *weight, bias, x.dtype, groups=groups, gathered=gathered)

    def _kernel(self) -> Callable[..., Tensor]:
        from qarl_kernels import gemm

        return gemm.scaled
