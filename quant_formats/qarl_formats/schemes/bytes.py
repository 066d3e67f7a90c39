"""What the schemes with one code a byte share: `weight` [N, K] int8 or float8_e4m3fn, `weight_scale` [N, 1].

Operands: both, on the CPU with the codes as float32 of the same values, which its products read.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeAlias

from qarl_formats.scheme import Scheme, TensorSpec

if TYPE_CHECKING:
    import torch
    from qarl_kernels.moe.groups import Groups
    from torch import Tensor

    from qarl_formats.prepared import PreparedWeight
    from qarl_formats.quantize import QuantizedWeight

Reference: TypeAlias = "Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]"
"""x, codes, scales, bias -> y, in plain torch."""
QuantizeInput: TypeAlias = "Callable[[Tensor], tuple[Tensor, Tensor]]"
"""x -> codes and scales, by Triton."""
CodesProduct: TypeAlias = "Callable[..., Tensor]"
"""Codes and scales of x, codes and scales of the weight, bias, dtype -> y, by Triton."""

GroupedProduct: TypeAlias = "Callable[..., Tensor]"
"""Codes and scales of x, of the experts' weights, output features of one, groups, gathered, dtype -> y, by Triton."""


class ByteCodes(Scheme):
    weight_bits = 8

    @property
    def code_dtype(self) -> str:
        """torch's name of a code's dtype."""
        return "int8" if self.weight_type == "int" else "float8_e4m3fn"

    def scale_shape(self, out_features: int, in_features: int) -> tuple[int, int]:
        return out_features, 1

    def tensor_specs(self, out_features: int, in_features: int, unpacked: bool = False) -> dict[str, TensorSpec]:
        scales = self.scale_shape(out_features, in_features)
        return {
            "weight": TensorSpec((out_features, in_features), self.code_dtype),
            "weight_scale": TensorSpec(scales, self.scale_dtype),
        }

    def quantize(
        self, weight: Tensor, kernels: bool = False, shared: Tensor | None = None
    ) -> tuple[dict[str, Tensor], Tensor]:
        import torch

        dtype = getattr(torch, self.scale_dtype)
        codes, scale, bad = (self._by_kernel if kernels else self._by_torch)(weight, dtype)
        return {"weight": codes, "weight_scale": scale}, bad

    @abstractmethod
    def _by_torch(self, weight: Tensor, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """(codes, scale, how many values or groups are not finite)."""

    @abstractmethod
    def _by_kernel(self, weight: Tensor, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """The same by Triton."""

    def codes(self, weight: QuantizedWeight) -> Tensor:
        return weight.tensors["weight"]

    def dequantize(self, weight: QuantizedWeight, dtype: torch.dtype, kernels: bool = False) -> Tensor:
        codes, scale = weight.tensors["weight"], weight.tensors["weight_scale"]
        if kernels:
            from qarl_kernels.dequantize import dequantize_channel

            return dequantize_channel(codes, scale, dtype)
        return (codes.float() * self.spread(scale, weight.shape)).to(dtype)

    def spread(self, scale: Tensor, shape: tuple[int, int]) -> Tensor:
        """The stored scale in float32, of a shape that multiplies codes (N, K)."""
        return scale.float()

    def operands(self, weight: QuantizedWeight, dtype: torch.dtype, kernels: bool) -> dict[str, Tensor]:
        codes, scale = weight.tensors["weight"], weight.tensors["weight_scale"]
        return {"weight": codes if kernels else codes.float(), "weight_scale": scale}

    def stored(
        self, operands: Mapping[str, Tensor], shape: tuple[int, int], dtype: torch.dtype, kernels: bool
    ) -> dict[str, Tensor]:
        import torch

        codes = operands["weight"].to(getattr(torch, self.code_dtype))
        return {"weight": codes, "weight_scale": operands["weight_scale"]}

    def dequantized(self, prepared: PreparedWeight, dtype: torch.dtype) -> Tensor:
        if prepared.kernels:
            return self.dequantize(prepared.source, dtype, kernels=True)
        codes, scale = prepared.operands["weight"], prepared.operands["weight_scale"]
        return (codes * self.spread(scale, prepared.shape)).to(dtype).to(codes.dtype)


class ByteActivations(ByteCodes):
    """Those that quantize activations to a byte as well, and multiply codes."""

    @classmethod
    @abstractmethod
    def _reference(cls) -> Reference: ...

    @classmethod
    @abstractmethod
    def _kernels(cls) -> tuple[QuantizeInput, CodesProduct]: ...

    @classmethod
    @abstractmethod
    def _grouped_kernel(cls) -> GroupedProduct: ...

    @classmethod
    def multiply(
        cls, x: Tensor, operands: Mapping[str, Tensor], out_features: int, bias: Tensor | None, kernels: bool
    ) -> Tensor:
        if not kernels:
            return cls._reference()(x, operands["weight"], operands["weight_scale"], bias)
        quantize, _ = cls._kernels()
        return cls.multiply_codes(*quantize(x.contiguous()), operands, out_features, bias, x.dtype)

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
        _, product = cls._kernels()
        return product(codes, scale, operands["weight"], operands["weight_scale"], bias, dtype)

    @classmethod
    def grouped_by_kernel(
        cls, x: Tensor, operands: Mapping[str, Tensor], out_features: int, groups: Groups, gathered: bool
    ) -> Tensor:
        quantize, _ = cls._kernels()
        codes, scale = quantize(x)
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
        cls.check_grouped(operands, out_features, groups.experts)
        weight = operands["weight"], operands["weight_scale"]
        return cls._grouped_kernel()(codes, scale, *weight, out_features, groups, gathered, dtype)
