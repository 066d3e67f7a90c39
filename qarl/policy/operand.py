"""What a linear layer multiplies with, in plain torch: the published codes and scales, or what other learners use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from qarl_formats.quantize import QuantizedWeight, dequantize_weight, unpack_codes
from qarl_kernels import reference
from qarl_kernels.activation import quantize_activation_fp8, quantize_activation_int8
from torch import Tensor, nn

from qarl.policy.stored import narrowed, packed, stands_for

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
        """The published tensors that `weight` and `scale` give back, by compressed-tensors suffix.

        Values that codes were dequantized into do not give codes back: there the codes are those of the source, where
        they dequantize to exactly these values. What the storage does not give back is left out. dtype: the compute
        dtype, which dequantized values were rounded to.
        """
        source = self.source
        assert source is not None, "a full-precision learner's weight was not published"
        if isinstance(source, Tensor):
            found = {"weight": narrowed(self.weight, source.dtype)}
        elif self.scale is None:
            same = stands_for(source, self.weight, dtype)
            found = source.tensors | ({} if same else {"weight_packed" if source.scheme.packed else "weight": None})
        elif source.scheme.packed:
            found = source.tensors | {"weight_packed": packed(self.weight), "weight_scale": self.scale}
        else:
            codes = narrowed(self.weight, source.tensors["weight"].dtype)
            found = source.tensors | {"weight": codes, "weight_scale": self.scale}
        return {suffix: tensor for suffix, tensor in found.items() if tensor is not None}

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
    if isinstance(weight, Tensor):
        return Operand("dense", _storage(weight), source=weight)
    scheme = weight.scheme
    if scheme.activation is None:
        return Operand("dense", _storage(dequantize_weight(weight, dtype)), source=weight)
    codes, scale = unpack_codes(weight).float(), weight.tensors["weight_scale"]
    return Operand(scheme.name, codes, scale, scheme.activation, weight)  # type: ignore[arg-type]


def fake_quant_operand(weight: QuantizedWeight, dtype: torch.dtype) -> Operand:
    """QAT: weights and activations quantized and dequantized, the product an ordinary full-precision GEMM."""
    return Operand("plain", _storage(dequantize_weight(weight, dtype)), None, weight.scheme.activation, weight)


def full_precision_operand(master: Tensor, dtype: torch.dtype) -> Operand:
    """The learner of quantized-rollout training: the master rounded to the compute dtype, an ordinary GEMM."""
    return Operand("plain", _storage(master.detach().to(dtype, copy=True)))


def _storage(weight: Tensor) -> Tensor:
    """CPUs multiply in float32 (see `qarl_kernels.reference`); GPUs in the compute dtype."""
    return weight.float() if weight.device.type == "cpu" else weight
