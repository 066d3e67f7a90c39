"""A published weight as a product reads it: one thing for every scheme, in plain torch or for Triton kernels."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from qarl_kernels.moe.groups import Groups
from torch import Tensor

from qarl_formats.bits import Proof
from qarl_formats.quantize import QuantizedWeight
from qarl_formats.registry import make_scheme
from qarl_formats.scheme import Scheme

UNQUANTIZED = make_scheme("bf16")


@dataclass(frozen=True)
class PreparedWeight:
    """The weight side of one row-invariant product. Made by `prepare`.

    source: the published tensors that it was made from: codes and scales, or the values of an unquantized layer.
    operands: what the product reads, by name; published tensors among them are the published objects.
    dtype: of the activations. kernels: Triton multiplies, not plain torch.
    """

    scheme: Scheme
    source: QuantizedWeight | Tensor
    operands: dict[str, Tensor]
    dtype: torch.dtype
    kernels: bool

    @cached_property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        n, k = self.source.shape
        return n, k

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x: (M, K) of `dtype`; bias: (N,) or None. Returns (M, N) of x's dtype; a row's bits are its own.

        Raises ValueError where x does not fit.
        """
        if x.ndim != 2 or x.shape[1] != self.shape[1]:
            raise ValueError(f"x is {list(x.shape)}, but the weight takes (rows, {self.shape[1]}); reshape x")
        return self.scheme.multiply(x, self.operands, self.shape[0], bias, self.kernels)

    def of_codes(self, codes: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """The product of activations that are quantized already; see `Scheme.multiply_codes`."""
        return self.scheme.multiply_codes(codes, scale, self.operands, self.shape[0], bias, dtype)

    def grouped(self, x: Tensor, groups: Groups, gathered: bool) -> Tensor:
        """Where this is the stack of all experts (E * N, K): rows times the weights of their experts.

        x: (T, K) of `dtype`, the tokens, if gathered, else (R, K) in sorted order. Returns (R, N) of x's dtype, in
        sorted order; each row has the bits of the product with its expert's own weight.

        Raises ValueError where x or the number of experts does not fit, or the scheme cannot hold the stack.
        """
        rows = groups.rows // groups.slots if gathered else groups.rows
        if x.shape != (rows, self.shape[1]):
            raise ValueError(f"x is {list(x.shape)}, but the experts take ({rows}, {self.shape[1]}); reshape x")
        return self.scheme.multiply_grouped(
            x.contiguous(), self.operands, self._width(groups), groups, gathered, self.kernels
        )

    def of_codes_grouped(
        self, codes: Tensor, scale: Tensor, groups: Groups, gathered: bool, dtype: torch.dtype
    ) -> Tensor:
        """`grouped` of activations that are quantized already; see `Scheme.multiply_codes_grouped`."""
        return self.scheme.multiply_codes_grouped(
            codes, scale, self.operands, self._width(groups), groups, gathered, dtype
        )

    def _width(self, groups: Groups) -> int:
        """N, the output features of one expert."""
        if self.shape[0] % groups.experts:
            raise ValueError(f"{self.shape[0]} rows are not the weights of {groups.experts} experts; stack them all")
        return self.shape[0] // groups.experts

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """W_deq (N, K) of the backward: (code - zero point) * scale rounded to `dtype`; held in float32 on the CPU."""
        return self.scheme.dequantized(self, dtype)

    def rounded_input(self, x: Tensor) -> Tensor:
        """x after the scheme's activation quantization and back, in x's dtype."""
        return self.scheme.rounded_input(x)

    def held(self, proof: Proof | None = None) -> dict[str, Tensor]:
        """The published tensors by suffix, read back from what the product reads.

        Each operand is then what these tensors make, to the bit. Raises ValueError that names one that is not; where
        there is a proof, its `settle` does.
        """
        return held(self.scheme, self.operands, self.shape, self.dtype, self.kernels, proof)


def prepare(weight: QuantizedWeight | Tensor, dtype: torch.dtype, kernels: bool = False) -> PreparedWeight:
    """The product that the sampler runs on these published tensors.

    weight: codes and scales, or values (N, K) of `dtype`. kernels: multiply with Triton, for tensors on a GPU and a
    16-bit dtype.
    """
    scheme = UNQUANTIZED if isinstance(weight, Tensor) else weight.scheme
    return PreparedWeight(scheme, weight, scheme.operands(weight, dtype, kernels), dtype, kernels)


def held(
    scheme: Scheme,
    operands: dict[str, Tensor],
    shape: tuple[int, int],
    dtype: torch.dtype,
    kernels: bool,
    proof: Proof | None = None,
) -> dict[str, Tensor]:
    """See `PreparedWeight.held`."""
    tensors = scheme.stored(operands, shape, dtype, kernels)
    weight = QuantizedWeight(scheme, tensors, shape) if scheme.quantized else tensors["weight"]
    again = scheme.operands(weight, dtype, kernels)
    added = Proof() if proof is None else proof
    for name, operand in operands.items():
        added.add(f"{name} of the product is not what its codes and scales make", operand, again[name])
    if proof is None:
        added.settle()
    return tensors
