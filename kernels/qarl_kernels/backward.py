"""The two products of a linear layer's backward: 16-bit operands, sums in float32.

    dx = dy @ W        rounded once to dy's dtype
    dW = dy^T @ x      float32, on request added to a gradient that is there already

Both are the library's ordinary GEMMs: nothing compares a gradient's bits across batches, so they need no row
invariance. The CPU multiplies in float32, as the forward does.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

# A GEMM that adds 16-bit products to a float32 matrix (beta = 1). Where torch has none, the product is made first.
_FUSED_ADD = "dtype_out" in torch.ops.aten.addmm.overloads()


def input_grad(dy: Tensor, weight: Tensor) -> Tensor:
    """dx = dy @ weight. dy: (M, N) bf16/fp16/fp32; weight: (N, K) of dy's dtype, or float32. Returns (M, K), dy's."""
    if dy.device.type == "cpu":
        return (dy.float() @ weight.float()).to(dy.dtype)
    return (dy.to(weight.dtype) @ weight).to(dy.dtype)


def weight_grad(dy: Tensor, x: Tensor, into: Tensor | None = None) -> Tensor | None:
    """dW = dy^T @ x in float32, accumulated in float32.

    dy: (M, N); x: (M, K) of dy's dtype; into: float32 (N, K), contiguous, that dW is added to in place, or None.
    Returns dW, or None when it went into `into`.
    """
    if into is not None and _FUSED_ADD and dy.device.type != "cpu" and dy.dtype != torch.float32:
        # One pass over the gradient, and no second matrix of its size.
        torch.addmm(into, dy.t(), x, out_dtype=torch.float32, out=into)
        return None
    if dy.device.type == "cpu":
        product = dy.float().t() @ x.float()
    elif dy.dtype == torch.float32:
        product = dy.t() @ x
    else:
        product = torch.mm(dy.t(), x, out_dtype=torch.float32)
    if into is None:
        return product
    into.add_(product)
    return None


class Sums(Protocol):
    """Where gradients of masters add up over backwards."""

    def sum_of(self, master: Tensor) -> Tensor | None:
        """The float32 tensor that the gradient of `master` is to be added to, zeros at first; None: autograd's task."""


def weight_sum(master: Tensor | None, sums: Sums | None, weight: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """What the gradient of the weight (V, H) is added to, and what of it autograd is given: None if `sums` has it."""
    if master is None or not master.requires_grad:
        return None, None
    into = None if sums is None else sums.sum_of(master)
    if into is not None:
        return into, None
    made = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
    return made, made
