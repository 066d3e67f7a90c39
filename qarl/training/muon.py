"""Muon on a GPU: `torch.optim.Muon`'s update with batched Newton-Schulz iterations.

torch iterates matrix by matrix, with 15 products per matrix, and small products leave most of a GPU idle. This module
stacks matrices of equal shape and runs the same products batched. Batching gains nothing on a CPU, so torch's own step
runs there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim._muon import _zeropower_via_newtonschulz

# Memory limit of one batch, for its bf16 stack and products: 3 of the largest matrices of an 8B model, or 40 k_proj.
BATCH_BYTES = 2**30


class BatchedMuon(torch.optim.Muon):
    """`torch.optim.Muon` with the same options, state and checkpoints; steps differ only by bf16 product rounding."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        assert closure is None, "step takes no closure: compute the gradients before the step"
        for group in self.param_groups:
            if any(not parameter.is_cuda for parameter in group["params"]):
                super().step()
                return
        for group in self.param_groups:
            members = [parameter for parameter in group["params"] if parameter.grad is not None]
            batched_step(members, [momentum_of(parameter, self.state) for parameter in members], group)


def momentum_of(parameter: Parameter, states: dict[Any, Any]) -> Tensor:
    """Return the momentum buffer of a parameter with a gradient; create it with zeros if it is missing."""
    state = states[parameter]
    if "momentum_buffer" not in state:
        state["momentum_buffer"] = torch.zeros_like(_gradient(parameter))
    return state["momentum_buffer"]


@torch.no_grad()
def batched_step(
    parameters: Sequence[Parameter], momenta: Sequence[Tensor], options: dict[str, Any], budget: int = BATCH_BYTES
) -> None:
    """Run one Muon step in place.

    Args:
        parameters: Matrices (N, K) with gradients; shapes may differ.
        momenta: float32 momentum buffer per parameter, updated in place.
        options: Options of `torch.optim.Muon`, by its names.
        budget: Limit in bytes, see `BATCH_BYTES`.
    """
    gradients = [_gradient(parameter) for parameter in parameters]
    for batch in batches([parameter.shape for parameter in parameters], budget):
        masters, own, moving = ([tensors[i] for i in batch] for tensors in (parameters, gradients, momenta))
        update_batch(masters, own, moving, options, orthogonalized)


def newton_schulz(stack: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Run `orthogonalized` on a GPU, or torch's own iterations on a CPU. Returns (B, N, K) bf16, contiguous."""
    if not len(stack):
        return stack
    if stack.is_cuda:
        return orthogonalized(stack, coefficients, steps, eps).contiguous()
    return torch.stack([_zeropower_via_newtonschulz(matrix, coefficients, steps, eps) for matrix in stack])


def update_batch(
    masters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    momenta: Sequence[Tensor],
    options: dict[str, Any],
    iterate: Callable[..., Tensor] = newton_schulz,
) -> None:
    """Run one Muon step in place on matrices of equal shape.

    Args:
        masters: (N, K) float32 each, updated in place.
        gradients: (N, K) float32 each.
        momenta: (N, K) float32 each, updated in place.
        options: Options of `torch.optim.Muon`, by its names.
        iterate: Newton-Schulz function with the signature of `orthogonalized`.
    """
    momentum, lr, shape = options["momentum"], options["lr"], masters[0].shape
    torch._foreach_lerp_(list(momenta), list(gradients), 1 - momentum)
    torch._foreach_mul_(list(masters), 1 - lr * options["weight_decay"])
    stack = torch.empty(len(masters), *shape, dtype=torch.bfloat16, device=masters[0].device)
    for row, gradient, buffer in zip(stack, gradients, momenta, strict=True):
        row.copy_(gradient.lerp(buffer, momentum) if options["nesterov"] else buffer)
    updates = iterate(stack, options["ns_coefficients"], options["ns_steps"], options["eps"])
    for master, update in zip(masters, updates, strict=True):
        master.add_(update, alpha=-adjusted(lr, options["adjust_lr_fn"], shape))


def orthogonalized(stack: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Bring the singular values of every matrix to about 1 with Newton-Schulz iterations.

    Args:
        stack: (B, N, K) bf16, overwritten.
        coefficients: Coefficients (a, b, c) of the quintic polynomial.
        steps: Number of iterations.
        eps: Lower bound for the norm by which a matrix is divided first.

    Returns:
        (B, N, K) bf16, not contiguous if N > K.
    """
    a, b, c = coefficients
    tall = stack.shape[1] > stack.shape[2]
    x = stack.mT if tall else stack
    x.div_(torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=eps))
    for _ in range(steps):
        gram = torch.bmm(x, x.mT)
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x.mT if tall else x


def batches(of: Sequence[torch.Size], budget: int) -> Iterator[list[int]]:
    """Yield indices of matrices of equal shape, as many per batch as fit in `budget` bytes.

    Args:
        of: Shape of each matrix.
        budget: Limit in bytes, see `BATCH_BYTES`.
    """
    shapes: dict[torch.Size, list[int]] = {}
    for index, shape in enumerate(of):
        shapes.setdefault(shape, []).append(index)
    for shape, indices in shapes.items():
        count = at_once(shape, budget)
        yield from (indices[first : first + count] for first in range(0, len(indices), count))


def at_once(shape: torch.Size, budget: int) -> int:
    """Return how many matrices of a shape fit in `budget` bytes, at least 1."""
    least = min(shape)
    each = 2 * (3 * shape.numel() + 2 * least * least)  # stack, x and next x; gram and polynomial
    return max(1, budget // each)


def _gradient(parameter: Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def adjusted(lr: float, kind: str | None, shape: torch.Size) -> float:
    """Return the learning rate for a matrix of this shape; `kind` is torch's `adjust_lr_fn`."""
    n, k = shape
    if kind == "match_rms_adamw":
        return lr * 0.2 * math.sqrt(max(n, k))
    assert kind in (None, "original"), f"unknown adjustment {kind!r}"
    return lr * math.sqrt(max(1, n / k))
