"""Muon on a GPU: `torch.optim.Muon`'s update with the Newton-Schulz iterations of equal shapes in one batch.

torch runs them matrix by matrix, 15 products each, of which the small ones leave most of a GPU idle. A stack of
matrices of one shape takes the same products batched. On a CPU nothing is gained, and torch's own step runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

# Of bf16 stacks and products alive at a time. The largest matrices of an 8B model come 3 at a time, its k_proj 40.
BATCH_BYTES = 2**30


class BatchedMuon(torch.optim.Muon):
    """`torch.optim.Muon` with its options, state and checkpoints; the same step up to the rounding of bf16 products."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        assert closure is None, "gradients are there before a step"
        for group in self.param_groups:
            if any(not parameter.is_cuda for parameter in group["params"]):
                super().step()
                return
        for group in self.param_groups:
            members = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parameter in members:
                if "momentum_buffer" not in self.state[parameter]:
                    self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter.grad)
            momenta = [self.state[parameter]["momentum_buffer"] for parameter in members]
            batched_step(members, momenta, group)


@torch.no_grad()
def batched_step(
    parameters: Sequence[Parameter], momenta: Sequence[Tensor], options: dict[str, Any], budget: int = BATCH_BYTES
) -> None:
    """One step of Muon. parameters: matrices (N, K) with gradients. momenta: float32, of their shapes, updated too.

    options: as `torch.optim.Muon` names them. budget: bytes of `BATCH_BYTES`.
    """
    if not parameters:
        return
    momentum, lr = options["momentum"], options["lr"]
    gradients = [_gradient(parameter) for parameter in parameters]
    torch._foreach_lerp_(list(momenta), gradients, 1 - momentum)
    torch._foreach_mul_(list(parameters), 1 - lr * options["weight_decay"])
    for batch in batches([parameter.shape for parameter in parameters], budget):
        shape = parameters[batch[0]].shape
        stack = torch.empty(len(batch), *shape, dtype=torch.bfloat16, device=parameters[0].device)
        for row, place in enumerate(batch):
            gradient, buffer = gradients[place], momenta[place]
            stack[row].copy_(gradient.lerp(buffer, momentum) if options["nesterov"] else buffer)
        updates = orthogonalized(stack, options["ns_coefficients"], options["ns_steps"], options["eps"])
        for row, place in enumerate(batch):
            parameters[place].add_(updates[row], alpha=-adjusted(lr, options["adjust_lr_fn"], shape))


def orthogonalized(stack: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Newton-Schulz on every matrix: singular values to about 1. stack: (B, N, K) bf16, overwritten; of that shape."""
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
    """Places of matrices of one shape, as many at a time as the budget holds. of: their shapes."""
    shapes: dict[torch.Size, list[int]] = {}
    for place, shape in enumerate(of):
        shapes.setdefault(shape, []).append(place)
    for shape, places in shapes.items():
        count = at_once(shape, budget)
        yield from (places[first : first + count] for first in range(0, len(places), count))


def at_once(shape: torch.Size, budget: int) -> int:
    """How many matrices of a shape the budget holds, at least one."""
    least = min(shape)
    each = 2 * (3 * shape.numel() + 2 * least * least)  # the stack, x and the next x; gram and polynomial
    return max(1, budget // each)


def _gradient(parameter: Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def adjusted(lr: float, kind: str | None, shape: torch.Size) -> float:
    """The learning rate for a matrix of this shape."""
    n, k = shape
    if kind == "match_rms_adamw":
        return lr * 0.2 * math.sqrt(max(n, k))
    assert kind in (None, "original"), f"unknown adjustment {kind!r}"
    return lr * math.sqrt(max(1, n / k))
