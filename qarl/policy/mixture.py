"""A mixture of experts in plain torch, on autograd: its meaning, a CPU's path, and what Triton layers must agree with.

The router's logits, probabilities and weights are float32. A token's experts stand in ascending order, and what they
give is added up in that order in float32, so that a row's bits depend on that row alone.
"""

from __future__ import annotations

from typing import Any

import torch
from qarl_kernels import invariant
from qarl_kernels.moe.groups import Groups
from torch import Tensor

from qarl.policy.layer import LayerModules
from qarl.policy.routes import Balance, ExpertLayer, Routes
from qarl.policy.trace import Note


class _Logits(torch.autograd.Function):
    """x (T, H) @ value (E, H)^T in float32, with the gradient of the rounded weight straight through to the master."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, master: Tensor, value: Tensor) -> Tensor:
        ctx.save_for_backward(x, value)
        return logits_of_router(x, value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, value = ctx.saved_tensors
        return (grad @ value.float()).to(x.dtype), grad.t() @ x.float(), None


def logits_of_router(x: Tensor, value: Tensor) -> Tensor:
    """(T, E) float32."""
    wide = x.float(), value.float()
    return invariant.matmul(*wide) if x.device.type == "cpu" else wide[0] @ wide[1].t()


class _Balanced(torch.autograd.Function):
    """The logits as they are; backward adds the gradient of the routers' own losses."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, experts: Tensor, balance: Balance) -> Tensor:
        ctx.save_for_backward(logits, experts)
        ctx.balance = balance
        return logits.view_as(logits)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, experts = ctx.saved_tensors
        return grad + balance_grad(logits, experts, ctx.balance), None, None


def balance_grad(logits: Tensor, experts: Tensor, balance: Balance) -> Tensor:
    """The gradient of the losses of `Balance` in the logits (T, E), float32. experts: (T, k)."""
    rows, (count, k) = balance.tokens, (logits.shape[1], experts.shape[1])
    real, grad = logits[:rows], torch.zeros_like(logits)
    probabilities = real.softmax(-1)
    share = torch.bincount(experts[:rows].reshape(-1), minlength=count).float() / (rows * k)
    inner = probabilities * (share - (probabilities * share).sum(-1, keepdim=True))
    grad[:rows] = balance.aux * count / rows * inner
    grad[:rows] += balance.z * 2 / rows * real.logsumexp(-1, keepdim=True) * probabilities
    return grad


def choose(logits: Tensor, experts: ExpertLayer, replay: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """(chosen experts (T, k) int64, ascending; their weights (T, k) float32; those that the logits choose themselves).

    Of equal logits the lower expert wins. replay: (T, k), see `Routes`.
    """
    probabilities = logits.softmax(-1)
    order = probabilities.detach().sort(dim=-1, descending=True, stable=True).indices
    own = order[:, : experts.per_token].sort(dim=-1).values
    chosen = own
    if replay is not None:
        given = replay.long().sort(dim=-1).values
        chosen = torch.where(given[:, :1] < 0, own, given)
    weights = probabilities.gather(1, chosen)
    if experts.normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return chosen, weights, own


def grouped(experts: Tensor, count: int) -> Groups:
    """The pairs of (token, slot) by expert, of experts (T, k)."""
    flat = experts.reshape(-1)
    order = flat.sort(stable=True).indices
    place = torch.empty_like(order)
    place[order] = torch.arange(order.numel(), device=order.device)
    starts = torch.searchsorted(flat[order], torch.arange(count + 1, device=order.device))
    return Groups(count, experts.shape[1], order.int(), place.int(), starts.int())


def combined(rows: Tensor, weights: Tensor, groups: Groups) -> Tensor:
    """What the experts of each token give, weighted: rows (R, H) in sorted order, weights (T, k). Returns (T, H)."""
    found = rows[groups.place.long()].unflatten(0, weights.shape).float()
    total = found[:, 0] * weights[:, :1]
    for slot in range(1, groups.slots):
        total = total + found[:, slot] * weights[:, slot : slot + 1]
    return total.to(rows.dtype)


def mixture(modules: LayerModules, experts: ExpertLayer, x: Tensor, routes: Routes, note: Note) -> Tensor:
    """The experts of a layer in the place of its MLP. x: (T, H), normed. Returns (T, H)."""
    index, block = modules.index, getattr(modules.module, experts.names.block)
    value = block.gate.role.view.values[experts.router]
    logits = _Logits.apply(x, block.gate.weight, value)
    chosen, weights, own = choose(logits, experts, routes.of_layer(experts.number))
    routes.tell(experts.number, own.int())
    routes.measure(experts.number, logits, chosen)
    if routes.balance is not None and torch.is_grad_enabled():
        logits = _Balanced.apply(logits, chosen, routes.balance)
        weights = choose(logits, experts, chosen)[1]
    note(index, "router", logits, chosen.int())
    groups = grouped(chosen, experts.count)
    starts, tokens = groups.starts.tolist(), groups.order.long() // groups.slots
    gates, products, outputs = [], [], []
    names = experts.names
    for number, expert in enumerate(block.experts):
        rows = x[tokens[starts[number] : starts[number + 1]]]
        gate, up = getattr(expert, names.gate)(rows), getattr(expert, names.up)(rows)
        product = block.act_fn(gate) * up
        gates.append(torch.cat((gate, up), -1))
        products.append(product)
        outputs.append(getattr(expert, names.down)(product))
    for operation, found in (("gate_up", gates), ("activation", products)):
        note(index, operation, torch.cat(found)[groups.place.long()].unflatten(0, weights.shape))
    total = combined(torch.cat(outputs), weights, groups)
    note(index, "down", total)
    return total
