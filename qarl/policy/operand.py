"""What a linear layer multiplies with, in plain torch: the published codes and scales, or what other learners use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from qarl_formats.quantize import QuantizedWeight, dequantize_weight, unpack_codes
from qarl_kernels import reference
from qarl_kernels.activation import quantize_activation_fp8, quantize_activation_int8
from torch import Tensor, nn

from qarl.policy.stored import same_bits

if TYPE_CHECKING:
    from qarl.policy.kernel_operand import KernelOperand

Product = Literal["dense", "plain", "w8a8", "fp8", "w4a8"]


@dataclass(frozen=True)
class Operand:
    """The weight side of one product in plain torch, as the product reads it. Its twin on a GPU is `KernelOperand`.

    product: `dense` is the batch-invariant product of model.dtype operands; `plain` the framework's ordinary GEMM;
    the others the low-bit products of `qarl_kernels.reference`.
    weight: (N, K), values or codes, float32 on the CPU. scale: (N, 1) or (N, groups), None for dense and plain.
    activation: activation quantization that `plain` imitates (quantize, dequantize), for QAT.
    source: the published tensors that `weight` was made from; None for a full-precision learner.
    """

    product: Product
    weight: Tensor
    scale: Tensor | None = None
    activation: Literal["int8", "fp8"] | None = None
    source: QuantizedWeight | Tensor | None = None

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x: (M, K) of the compute dtype; bias: (N,) or None. Returns (M, N) of x's dtype."""
        if self.product == "dense":
            return reference.dense(x, self.weight, bias)
        if self.product == "plain":
            wide = dequantized_input(x, self.activation).to(self.weight.dtype)
            return nn.functional.linear(wide, self.weight, None if bias is None else bias.to(wide.dtype)).to(x.dtype)
        return getattr(reference, self.product)(x, self.weight, self.scale, bias)

    def held(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """The published tensors that this operand multiplies with, by compressed-tensors suffix.

        The codes (or values) of the source are among them only where `weight` is, bit for bit, what they are prepared
        to. dtype: the compute dtype.
        """
        source = self.source
        assert source is not None, "a full-precision learner's weight was not published"
        found = {"weight": source} if isinstance(source, Tensor) else dict(source.tensors)
        if self.scale is not None:
            found["weight_scale"] = self.scale
        if not same_bits(self.weight, source, lambda rows: _prepared(rows, dtype)):
            del found["weight_packed" if "weight_packed" in found else "weight"]
        return found

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """W_deq (N, K): code * scale rounded to `dtype`, held in the operand's own storage dtype."""
        if self.scale is None:
            return self.weight
        groups = self.scale.shape[1]
        n, k = self.weight.shape
        wide = self.weight.view(n, groups, k // groups) * self.scale.float()[..., None]
        return wide.view(n, k).to(dtype).to(self.weight.dtype)


def dequantized_input(x: Tensor, activation: Literal["int8", "fp8"] | None) -> Tensor:
    """x after its per-token quantization and back, in x's dtype; x itself where activations are not quantized."""
    if activation is None:
        return x
    codes, scale = (quantize_activation_int8 if activation == "int8" else quantize_activation_fp8)(x)
    return (codes.float() * scale).to(x.dtype)


def operand_of(weight: QuantizedWeight | Tensor, dtype: torch.dtype, kernels: bool = False) -> Operand | KernelOperand:
    """The aligned operand: the product the sampler runs on these tensors.

    weight: codes and scales, or (N, K); kernels: multiply with Triton (`qarl.policy.kernels.use_kernels`).
    """
    if kernels:
        from qarl.policy.kernel_operand import kernel_operand  # imports Triton, which the CPU does not need

        return kernel_operand(weight, dtype)
    values = _prepared(weight, dtype)
    if isinstance(weight, Tensor) or weight.scheme.activation is None:
        return Operand("dense", values, source=weight)
    scheme = weight.scheme
    return Operand(scheme.name, values, weight.tensors["weight_scale"], scheme.activation, weight)  # type: ignore[arg-type]


def _prepared(weight: QuantizedWeight | Tensor, dtype: torch.dtype) -> Tensor:
    """What an aligned product reads of published tensors (N, K): dequantized values, or codes where those multiply."""
    if isinstance(weight, Tensor):
        return storage(weight)
    if weight.scheme.activation is None:
        return storage(dequantize_weight(weight, dtype))
    return unpack_codes(weight).float()


def fake_quant_operand(weight: QuantizedWeight, dtype: torch.dtype) -> Operand:
    """QAT: weights and activations quantized and dequantized, the product an ordinary full-precision GEMM."""
    return Operand("plain", storage(dequantize_weight(weight, dtype)), None, weight.scheme.activation, weight)


def full_precision_operand(master: Tensor, dtype: torch.dtype) -> Operand:
    """The learner of quantized-rollout training: the master rounded to the compute dtype, an ordinary GEMM."""
    return Operand("plain", storage(master.detach().to(dtype, copy=True)))


def storage(weight: Tensor) -> Tensor:
    """CPUs multiply in float32 (see `qarl_kernels.reference`); GPUs in the compute dtype."""
    return weight.float() if weight.device.type == "cpu" else weight
