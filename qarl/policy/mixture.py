"""A mixture of experts in plain torch, on autograd: its meaning, a CPU's path, and what Triton layers must agree with.

The router's logits, probabilities and weights are float32. A token's experts stand in ascending order, and what they
give is added up in that order in float32, and then what the shared expert gives, so that a row's bits depend on that
row alone.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from qarl_kernels.moe.reference import combine, groups_of
from qarl_kernels.moe.routed import Routed, Shared
from qarl_kernels.moe.shared import shared_gate
from torch import Tensor

from qarl.policy.layer import LayerModules
from qarl.policy.router import logits_grad, route_tokens
from qarl.policy.routes import ExpertLayer, Routes
from qarl.policy.trace import Note


class _Route(torch.autograd.Function):
    """Weights (T, k) of a token's experts, the experts, and the logits, with the gradient of the weights straight
    through the rounding of the router's weight to its master."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, master: Tensor, value: Tensor, experts: ExpertLayer, routes: Routes
    ) -> tuple[Tensor, Tensor, Tensor]:
        found = route_tokens(x, value, experts, routes, kernels=False)
        ctx.save_for_backward(x, value, found.logits, found.experts, found.weights)
        ctx.experts, ctx.routes = experts, routes
        ctx.mark_non_differentiable(found.experts, found.logits)
        return found.weights, found.experts, found.logits

    @staticmethod
    def backward(ctx: Any, grad_weights: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        x, value, *routed = ctx.saved_tensors
        grad = logits_grad(grad_weights, Routed(*routed), ctx.experts, ctx.routes, kernels=False)
        return (grad @ value.float()).to(x.dtype), grad.t() @ x.float(), None, None, None


class _Gate(torch.autograd.Function):
    """The shared expert's gate (T,), with the gradient straight through the rounding of its weight to its master."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, master: Tensor, value: Tensor) -> Tensor:
        gate = shared_gate(x, value)
        ctx.save_for_backward(x, value, gate)
        return gate

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, value, gate = ctx.saved_tensors
        logit = (grad * (gate * (1.0 - gate)))[:, None]
        return (logit * value.float()).to(x.dtype), logit.t() @ x.float(), None


def mixture(modules: LayerModules, experts: ExpertLayer, x: Tensor, routes: Routes, note: Note) -> Tensor:
    """The experts of a layer in the place of its MLP. x: (T, H), normed. Returns (T, H)."""
    index, block = modules.index, getattr(modules.module, experts.names.block)
    value = block.gate.role.view.values[experts.router]
    weights, chosen, logits = _Route.apply(x, block.gate.weight, value, experts, routes)
    note(index, "router", logits, chosen)
    groups = groups_of(chosen, experts.count)
    tokens, starts = groups.order.long() // groups.slots, groups.starts.tolist()
    gates, products, outputs = [], [], []
    names = experts.names
    for expert, (first, end) in zip(block.experts, pairwise(starts), strict=True):
        rows = x[tokens[first:end]]
        gate, up = getattr(expert, names.gate)(rows), getattr(expert, names.up)(rows)
        product = block.act_fn(gate) * up
        gates.append(torch.cat((gate, up), -1))
        products.append(product)
        outputs.append(getattr(expert, names.down)(product))
    for operation, found in (("gate_up", gates), ("activation", products)):
        note(index, operation, torch.cat(found)[groups.place.long()].unflatten(0, weights.shape))
    shared = None if experts.shared_gate is None else _shared(modules, experts, block, x, note)
    total = combine(torch.cat(outputs), weights, groups, shared)
    note(index, "down", total)
    return total


def _shared(modules: LayerModules, experts: ExpertLayer, block: Any, x: Tensor, note: Note) -> Shared:
    """What the shared expert gives for x (T, H), and its gate."""
    index, names = modules.index, experts.names
    assert names.shared is not None and experts.shared_gate is not None
    expert, router = getattr(block, names.shared), getattr(block, f"{names.shared}_gate")
    gate = _Gate.apply(x, router.weight, router.role.view.values[experts.shared_gate])
    note(index, "shared_gate", gate)
    both = getattr(expert, names.gate)(x), getattr(expert, names.up)(x)
    note(index, "shared_gate_up", *both)
    product = block.act_fn(both[0]) * both[1]
    note(index, "shared_activation", product)
    output = getattr(expert, names.down)(product)
    note(index, "shared_down", output)
    return Shared(output, gate)
