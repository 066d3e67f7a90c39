"""The two products of a linear layer's backward: 16-bit operands, float32 sums.

    dx = dy @ W        rounded once to dy's dtype
    dW = dy^T @ x      float32, optionally added to an existing gradient

Both are ordinary library GEMMs: nothing compares a gradient's bits across batches, so they need no row invariance. The
CPU multiplies in float32, as the forward does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

# Whether torch has a GEMM that adds 16-bit products to a float32 matrix (beta = 1).
_FUSED_ADD = "dtype_out" in torch.ops.aten.addmm.overloads()


def input_grad(dy: Tensor, weight: Tensor) -> Tensor:
    """Return dx = dy @ weight, (M, K) of dy's dtype. dy: (M, N) float; weight: (N, K) of dy's dtype or float32."""
    if dy.device.type == "cpu":
        return (dy.float() @ weight.float()).to(dy.dtype)
    return (dy.to(weight.dtype) @ weight).to(dy.dtype)


def weight_grad(dy: Tensor, x: Tensor, into: Tensor | None = None) -> Tensor | None:
    """Compute dW = dy^T @ x with float32 accumulation.

    Args:
        dy: (M, N).
        x: (M, K) of dy's dtype.
        into: (N, K) float32, contiguous, to which dW is added; None: return dW instead.

    Returns:
        dW, float32 (N, K), or None if it was added to `into`.
    """
    if into is not None and _FUSED_ADD and dy.device.type != "cpu" and dy.dtype != torch.float32:
        # One pass over the gradient, without a second matrix of its size.
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


def output_grad(rows: Tensor, states: Tensor, weight: Tensor, into: Tensor | None) -> Tensor:
    """Return the gradient of the states of an output layer, and add that of its weight to `into`.

    Args:
        rows: (R, V) float32, gradient of the logits.
        states: (R, H).
        weight: (V, H) bf16 for products of bf16 operands, as on a GPU; otherwise float32.
        into: (V, H) float32, or None.

    Returns:
        (R, H) of the states' dtype.
    """
    if weight.dtype == torch.bfloat16:
        rows = rows.bfloat16()
        if into is not None:
            weight_grad(rows, states, into=into)
        return rows @ weight
    if into is not None:
        into.addmm_(rows.t(), states.float())
    return (rows @ weight).to(states.dtype)


SumOf: TypeAlias = Callable[[Tensor], Tensor | None]
"""Returns the float32 buffer to which the gradient of a master is added; None: leave it to autograd."""


def weight_grad_buffer(
    master: Tensor | None, sum_of: SumOf | None, weight: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Return the buffer to which the gradient of the weight (V, H) is added, and what to return to autograd.

    The second is the buffer itself, or None if the buffer comes from `sum_of`.
    """
    if master is None or not master.requires_grad:
        return None, None
    into = None if sum_of is None else sum_of(master)
    if into is not None:
        return into, None
    made = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
    return made, made
