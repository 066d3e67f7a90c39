"""bf16: nothing quantized; weights and activations in the compute dtype (which may be float16 or float32)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from qarl_formats.registry import register
from qarl_formats.scheme import Scheme, TensorSpec

if TYPE_CHECKING:
    import torch
    from qarl_kernels.moe.groups import Groups
    from torch import Tensor

    from qarl_formats.prepared import PreparedWeight
    from qarl_formats.quantize import QuantizedWeight


@register
class BF16(Scheme):
    """What an unquantized layer of any scheme is. A weight is a plain tensor [N, K] of the compute dtype.

    Operands: `weight`, in float32 on the CPU, whose products run in it, and as it is on a GPU.
    """

    name = "bf16"
    description = "nothing quantized"
    tolerance = 0.1

    def tensor_specs(self, out_features: int, in_features: int, unpacked: bool = False) -> dict[str, TensorSpec]:
        raise AssertionError("scheme bf16 stores the plain weight")

    def quantize(
        self, weight: Tensor, kernels: bool = False, shared: Tensor | None = None
    ) -> tuple[dict[str, Tensor], Tensor]:
        raise AssertionError("scheme bf16 quantizes nothing")

    def dequantize(self, weight: QuantizedWeight, dtype: torch.dtype, kernels: bool = False) -> Tensor:
        raise AssertionError("scheme bf16 has no codes")

    def codes(self, weight: QuantizedWeight) -> Tensor:
        raise AssertionError("scheme bf16 has no codes")

    @property
    def text(self) -> str:
        return "none"

    def operands(self, weight: Tensor, dtype: torch.dtype, kernels: bool) -> dict[str, Tensor]:
        return {"weight": weight.float() if weight.device.type == "cpu" and not kernels else weight}

    def stored(
        self, operands: Mapping[str, Tensor], shape: tuple[int, int], dtype: torch.dtype, kernels: bool
    ) -> dict[str, Tensor]:
        return {"weight": operands["weight"].to(dtype)}

    @classmethod
    def multiply(
        cls, x: Tensor, operands: Mapping[str, Tensor], out_features: int, bias: Tensor | None, kernels: bool
    ) -> Tensor:
        if kernels:
            from qarl_kernels.gemm import dense

            return dense(x.contiguous(), operands["weight"], bias)
        from qarl_kernels import reference

        return reference.dense(x, operands["weight"], bias)

    @classmethod
    def grouped_by_kernel(
        cls, x: Tensor, operands: Mapping[str, Tensor], out_features: int, groups: Groups, gathered: bool
    ) -> Tensor:
        from qarl_kernels.moe.dense import grouped_dense

        return grouped_dense(x, operands["weight"], groups, gathered)

    def dequantized(self, prepared: PreparedWeight, dtype: torch.dtype) -> Tensor:
        return prepared.operands["weight"]
