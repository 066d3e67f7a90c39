"""What a linear layer multiplies with where its learner is not aligned: an ordinary GEMM on rounded weights.

An aligned learner and the sampler multiply with the published codes and scales (`qarl_formats.prepared.prepare`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
from qarl_formats.prepared import PreparedWeight
from qarl_formats.quantize import QuantizedWeight, dequantize_weight
from qarl_formats.scheme import Scheme
from qarl_kernels.moe.groups import Groups
from torch import Tensor, nn


@dataclass(frozen=True)
class PlainWeight:
    """The weight side of the framework's own product, of whatever bits it has.

    weight: (N, K), values of the compute dtype, in float32 on the CPU. scheme: whose activation quantization the
    product imitates (quantize, dequantize), for QAT; None: none.
    """

    weight: Tensor
    scheme: Scheme | None = None

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x: (M, K) of the compute dtype; bias: (N,) or None. Returns (M, N) of x's dtype."""
        wide = self.rounded_input(x).to(self.weight.dtype)
        return nn.functional.linear(wide, self.weight, None if bias is None else bias.to(wide.dtype)).to(x.dtype)

    def grouped(self, x: Tensor, groups: Groups, gathered: bool) -> Tensor:
        """Where this is the weights of all experts, by Triton: see `PreparedWeight.grouped`."""
        from qarl_kernels.moe.dense import grouped_dense  # imports Triton, which the CPU does not need

        return grouped_dense(self.rounded_input(x), self.weight.to(x.dtype), groups, gathered)

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        n, k = self.weight.shape
        return n, k

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The weight itself."""
        return self.weight

    def rounded_input(self, x: Tensor) -> Tensor:
        """x after the imitated quantization and back, in x's dtype."""
        return x if self.scheme is None else self.scheme.rounded_input(x)


Operand: TypeAlias = PreparedWeight | PlainWeight


def fake_quant_operand(weight: QuantizedWeight, dtype: torch.dtype) -> PlainWeight:
    """QAT: weights and activations quantized and dequantized, the product an ordinary full-precision GEMM."""
    return PlainWeight(_storage(dequantize_weight(weight, dtype)), weight.scheme)


def full_precision_operand(master: Tensor, dtype: torch.dtype) -> PlainWeight:
    """The learner of quantized-rollout training: the master rounded to the compute dtype, an ordinary GEMM."""
    return PlainWeight(_storage(master.detach().to(dtype, copy=True)))


def _storage(weight: Tensor) -> Tensor:
    """CPUs multiply in float32 (see `qarl_kernels.reference`); GPUs in the compute dtype."""
    return weight.float() if weight.device.type == "cpu" else weight
