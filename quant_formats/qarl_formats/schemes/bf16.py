"""bf16: nothing quantized; weights and activations in the compute dtype (which may be float16 or float32)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from qarl_formats.registry import register
from qarl_formats.scheme import Codes, Scheme, Shape, Tensors

if TYPE_CHECKING:
    import torch
    from qarl_kernels.groups import Groups
    from torch import Tensor


@register
class BF16(Scheme):
    """The scheme of every unquantized layer. Its stored tensor is `weight`, values (N, K) in the compute dtype.

    The operand has the same name: float32 on the CPU, which multiplies in float32, otherwise the stored values.
    """

    name = "bf16"
    description = "nothing quantized"
    tolerance = 0.1
    plain_operands = ("weight",)

    def dequantize(self, tensors: Tensors, shape: Shape, dtype: torch.dtype, kernels: bool = False) -> Tensor:
        return tensors["weight"].to(dtype)

    @property
    def text(self) -> str:
        return "none"

    def operands(self, tensors: Tensors, shape: Shape, dtype: torch.dtype, kernels: bool) -> dict[str, Tensor]:
        weight = tensors["weight"]
        return {"weight": weight.float() if weight.device.type == "cpu" and not kernels else weight}

    def stored(self, operands: Tensors, shape: Shape, dtype: torch.dtype) -> dict[str, Tensor]:
        return {"weight": operands["weight"].to(dtype)}


@dataclass(frozen=True)
class OrdinaryProduct(BF16):
    """torch's own GEMM, whose bits may depend on the batch, for learners that are not aligned. Not registered.

    imitated: For QAT, the scheme by which activations are quantized and dequantized before the product; None: none.
    """

    imitated: Scheme | None = None

    def rounded_input(self, x: Tensor) -> Tensor:
        return x if self.imitated is None else self.imitated.rounded_input(x)

    def plain_product(self, x: Tensor, operands: Tensors, bias: Tensor | None) -> Tensor:
        from torch.nn.functional import linear

        weight = operands["weight"]
        wide = self.rounded_input(x).to(weight.dtype)
        return linear(wide, weight, None if bias is None else bias.to(wide.dtype)).to(x.dtype)

    def kernel_product(
        self, x: Tensor | Codes, operands: Tensors, n: int, bias: Tensor | None, groups: Groups | None, gathered: bool
    ) -> Tensor:
        """Dense products use torch's GEMM; only grouped products have a kernel."""
        assert not isinstance(x, Codes), "an ordinary product multiplies values"
        if groups is None:
            return self.plain_product(x, operands, bias)
        operands = {"weight": operands["weight"].to(x.dtype)}
        return super().kernel_product(self.rounded_input(x), operands, n, bias, groups, gathered)
