"""A layer's router, in plain torch and on Triton kernels: its own choice, what is replayed, its gradient."""

from __future__ import annotations

import torch
from qarl_kernels.moe.balance import balance_grad
from qarl_kernels.moe.routed import Routed
from qarl_kernels.moe.routing import route, route_backward
from torch import Tensor

from qarl.policy.routes import ExpertLayer, Routes


def route_tokens(x: Tensor, value: Tensor, experts: ExpertLayer, routes: Routes, kernels: bool) -> Routed:
    """The experts of the rows of x (T, H). value: (E, H), the router's weight in x's dtype.

    `routes` is told the router's own choice, and says what is replayed in its place.
    """
    how = x, value, experts.per_token, experts.normalize
    found = route(*how, kernels=kernels)
    routes.tell(experts.number, found.experts)
    given = routes.of_layer(experts.number)
    if given is not None:
        chosen = torch.where(given[:, :1] < 0, found.experts, given.to(torch.int32)).contiguous()
        found = route(*how, chosen=chosen, kernels=kernels)
    routes.measure(experts.number, found.logits, found.experts)
    if routes.balance is not None:
        routes.balance.count(experts.number, found.experts, experts.count)
    return found


def logits_grad(grad_weights: Tensor, routed: Routed, experts: ExpertLayer, routes: Routes, kernels: bool) -> Tensor:
    """(T, E) float32, from the gradient (T, k) of the experts' weights, and of the routers' own losses."""
    grad = route_backward(grad_weights, routed, experts.normalize, kernels=kernels)
    if routes.balance is not None:
        losses = routes.balance
        found = balance_grad(routed, losses.tokens, losses.aux, losses.z, losses.mean_slots, losses.layers)
        grad = grad + found.grad_logits
    return grad
