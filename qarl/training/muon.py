"""Muon on a GPU: `torch.optim.Muon`'s update with the Newton-Schulz iterations of equal shapes in one batch.

torch runs them matrix by matrix, 15 products each, of which the small ones leave most of a GPU idle. A stack of
matrices of one shape takes the same products batched. On a CPU nothing is gained, and torch's own step runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim._muon import _zeropower_via_newtonschulz

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
            batched_step(members, [momentum_of(parameter, self.state) for parameter in members], group)


def momentum_of(parameter: Parameter, states: dict[Any, Any]) -> Tensor:
    """Of a parameter with a gradient; zero where it had none yet. states: of the optimizer, by parameter."""
    state = states[parameter]
    if "momentum_buffer" not in state:
        state["momentum_buffer"] = torch.zeros_like(_gradient(parameter))
    return state["momentum_buffer"]


@torch.no_grad()
def batched_step(
    parameters: Sequence[Parameter], momenta: Sequence[Tensor], options: dict[str, Any], budget: int = BATCH_BYTES
) -> None:
    """One step of Muon. parameters: matrices (N, K) with gradients. momenta: float32, of their shapes, updated too.

    options: as `torch.optim.Muon` names them. budget: bytes of `BATCH_BYTES`.
    """
    gradients = [_gradient(parameter) for parameter in parameters]
    for batch in batches([parameter.shape for parameter in parameters], budget):
        masters, own, moving = ([of[place] for place in batch] for of in (parameters, gradients, momenta))
        update_batch(masters, own, moving, options, orthogonalized)


def newton_schulz(stack: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """`orthogonalized` where that is faster, on a GPU, and on a CPU torch's own; the result is contiguous."""
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
    """One step of Muon on matrices of one shape (N, K), float32: masters and momenta are updated.

    options: as `torch.optim.Muon` names them. iterate: as `orthogonalized`.
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
