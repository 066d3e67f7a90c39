"""Mixture of experts that replaces a layer's MLP: forward on CPU and GPU, backward on a GPU.

    forward     p = softmax(n Wr^T) in float32; each token takes the k experts with the largest p, with weights w; for
                each (token, expert): g, u = n Wgu_e^T; d = (silu(g) * u) Wd_e^T; y = sum of w * d over the token's
                experts, plus sigmoid(n Ws^T) * s if there is a shared expert, an MLP that gives s for all tokens
    backward    grad d = w * grad y, grad w = <grad y, d>; then as an MLP's, with each expert's rows together; the
                router learns through w and through its own losses

The results of a token's experts are added in float32 in ascending order of the experts, then the shared expert's, so a
row's bits depend on that row alone. Rows are sorted by expert between the first product and the sum. The host never
waits for the GPU, and launch sizes depend only on the number of tokens, so a CUDA graph can capture a forward.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from qarl_formats.scheme import Codes
from qarl_kernels.backward import input_grad, weight_grad
from qarl_kernels.fused_norm import Normed
from qarl_kernels.groups import Groups, Routed, Shared
from qarl_kernels.moe import reference
from qarl_kernels.moe.balance import balance_grad
from qarl_kernels.moe.combine import combine, combine_backward, shared_backward, sum_over_slots
from qarl_kernels.moe.dispatch import groups_of
from qarl_kernels.moe.routing import route, route_backward
from qarl_kernels.moe.shared import shared_gate
from qarl_kernels.swiglu import swiglu, swiglu_backward
from torch import Tensor, nn

from qarl.policy.linear import OutputGradient, PackedLinear, activations, gradient_of
from qarl.policy.mlp import activate, mlp, mlp_backward, silu_product
from qarl.policy.routes import ExpertLayer, Routes
from qarl.policy.run import Recompute, Run
from qarl.policy.trace import unnoted


class MixtureLayer(Protocol):
    """The part of `DecoderLayer` that this module reads; it avoids an import cycle."""

    @property
    def index(self) -> int: ...

    @property
    def gate_up(self) -> PackedLinear: ...

    @property
    def down(self) -> PackedLinear: ...

    @property
    def shared(self) -> tuple[PackedLinear, ...]: ...

    @property
    def gates(self) -> Mapping[str, nn.Parameter]: ...


@dataclass
class KeptShared:
    """Intermediates of the shared expert, kept for the backward. gate_up: (T, 2 I). shared: its output and gate."""

    gate_up: Tensor
    shared: Shared


@dataclass
class KeptExperts:
    """Intermediates of a forward over T tokens with k experts each (R = T k rows), kept for the backward.

    Attributes:
        routed, groups: Always kept, so that a recomputation chooses the same experts.
        gate_up: (R, 2 I), output of gate and up. None: recomputed.
        down: (R, H), outputs of the experts. None: recomputed.
        shared: Intermediates of the shared expert. None: recomputed, or there is none.
    """

    routed: Routed
    groups: Groups
    gate_up: Tensor | None = None
    down: Tensor | None = None
    shared: KeptShared | None = None

    def drop(self, recompute: Recompute) -> KeptExperts:
        """Return the intermediates to keep until the backward, see `Decoder`. The experts' products are k times as
        large as an MLP's.
        """
        return self if recompute == "elementwise" else KeptExperts(self.routed, self.groups)


def mixture(layer: MixtureLayer, experts: ExpertLayer, normed: Normed, run: Run) -> tuple[Tensor, KeptExperts]:
    """Return the experts' output (T, H) and intermediates for the backward. normed: (T, H), with codes if `gate_up`
    reads codes.
    """
    x, weights = normed.normed, run.weights
    assert x is not None, "a router reads values"
    routed = _route(layer, experts, x, run)
    groups = groups_of(routed.experts, experts.count, kernels=weights.fused)
    gate_up = layer.gate_up.grouped(activations(x, normed.codes, normed.scale, x.dtype), weights, groups, True)
    _note(layer, routed, groups, gate_up, run)
    down = _into_down(layer, gate_up, groups, run)
    kept = None if experts.shared_gate is None else _shared(layer, experts.shared_gate, normed, run)
    shared = None if kept is None else kept.shared
    y = (combine if weights.fused else reference.combine)(down, routed.weights, groups, shared)
    return run.noted(layer.index, "down", y), KeptExperts(routed, groups, gate_up, down, kept)


def _route(layer: MixtureLayer, experts: ExpertLayer, x: Tensor, run: Run) -> Routed:
    value = run.weights.values[experts.router]
    if run.weights.fused:
        return route_tokens(x, value, experts, run.routes, kernels=True)
    weights, chosen, logits = _Route.apply(x, layer.gates[experts.router], value, experts, run.routes)
    return Routed(logits, chosen, weights)


def _into_down(layer: MixtureLayer, gate_up: Tensor, groups: Groups, run: Run) -> Tensor:
    """Return the output of each row's expert, (R, H)."""
    if run.weights.fused:
        gated = activate(gate_up, layer.down, run)
        read = activations(gated.product, gated.codes, gated.scale, gate_up.dtype)
    else:  # per expert, because the bits of torch's silu backward depend on where a tensor ends
        each = gate_up.split(groups.starts.diff().tolist())
        read = torch.cat([silu_product(rows) for rows in each])
    return layer.down.grouped(read, run.weights, groups, False)


def _note(layer: MixtureLayer, routed: Routed, groups: Groups, gate_up: Tensor, run: Run) -> None:
    """Trace the experts' results, with the rows of a token concatenated."""
    if run.note is unnoted:
        return
    run.note(layer.index, "router", routed.logits, routed.experts)
    place = groups.place.long()
    product = swiglu(gate_up).product if run.weights.fused else silu_product(gate_up)
    for operation, rows in (("gate_up", gate_up), ("activation", product)):
        assert rows is not None, "swiglu without codes returns values"
        run.note(layer.index, operation, rows[place].unflatten(0, (-1, groups.slots)))


def _shared(layer: MixtureLayer, gate_name: str, normed: Normed, run: Run) -> KeptShared:
    """Compute the shared expert's output for all tokens, and its gate."""
    (gate_up, down), x, value = layer.shared, normed.normed, run.weights.values[gate_name]
    assert x is not None, "a gate reads values"
    fused = run.weights.fused
    gate = shared_gate(x, value, kernels=True) if fused else _Gate.apply(x, layer.gates[gate_name], value)
    read: Tensor | Codes = x
    if gate_up.input_codes(run.weights) == layer.gate_up.input_codes(run.weights):
        read = activations(x, normed.codes, normed.scale, x.dtype)
    run.note(layer.index, "shared_gate", gate)
    product = run.noted(layer.index, "shared_gate_up", gate_up(read, run.weights))
    return KeptShared(product, Shared(mlp(product, down, layer.index, run, "shared_"), gate))


def mixture_backward(
    layer: MixtureLayer, experts: ExpertLayer, grad: Tensor, normed: Tensor, kept: KeptExperts, run: Run
) -> Tensor:
    """Return the gradient (T, H) of the forward's input. Adds to `.grad` of the masters, and frees `kept`.

    grad: (T, H), output gradient. normed: (T, H), the forward's input.
    """
    routed, groups, weights = kept.routed, kept.groups, run.weights
    gate_up = layer.gate_up.grouped(normed, weights, groups, True) if kept.gate_up is None else kept.gate_up
    down = _into_down(layer, gate_up, groups, run) if kept.down is None else kept.down
    kept.gate_up = kept.down = None
    grad_down, grad_weights = combine_backward(grad, down, routed.weights, groups, into=down)
    del down
    gradient = OutputGradient(layer.down, weights, grad_down, run.backward, groups)
    gradient.add_to_masters(swiglu_backward(gradient.of_input(), gate_up))  # gate_up is its gradient from here on
    del gradient, grad_down
    gradient = OutputGradient(layer.gate_up, weights, gate_up, run.backward, groups)
    gradient.add_to_masters(normed, gathered=True)
    grad_rows = gradient.of_input()  # (R, H), per (token, expert)
    del gradient, gate_up
    grad_logits = logits_grad(grad_weights, routed, experts, run.routes, kernels=True)
    weight_grad(grad_logits, normed.float(), into=gradient_of([layer.gates[experts.router]]))
    others = input_grad(grad_logits, weights.values[experts.router].float())
    if experts.shared_gate is not None:
        shared, kept.shared = kept.shared, None
        others += _shared_backward(layer, experts.shared_gate, grad, normed, shared, run)
    return sum_over_slots(grad_rows, groups, others.to(normed.dtype))


def _shared_backward(
    layer: MixtureLayer, gate_name: str, grad: Tensor, normed: Tensor, kept: KeptShared | None, run: Run
) -> Tensor:
    """Return the gradient (T, H) float32 of the shared expert's input. kept: overwritten; None: recomputed."""
    gate_up, down = layer.shared
    kept = kept or _shared(layer, gate_name, Normed(normed, normed, normed, None, None), run)
    grad_output, grad_logit = shared_backward(grad, kept.shared, into=kept.shared.output)
    logit = grad_logit[:, None]
    weight_grad(logit, normed.float(), into=gradient_of([layer.gates[gate_name]]))
    grad_input = mlp_backward(grad_output, kept.gate_up, lambda: normed, gate_up, down, run)
    return grad_input.float().addcmul_(logit, run.weights.values[gate_name].float())


# --- the router ------------------------------------------------------------------------------------------------


def route_tokens(x: Tensor, value: Tensor, experts: ExpertLayer, routes: Routes, kernels: bool) -> Routed:
    """Choose experts for the rows of x (T, H). value: (E, H), the router's weight in x's dtype.

    `routes` records the router's own choice, and may replace it by a replayed one.
    """
    how = x, value, experts.per_token, experts.normalize
    found = route(*how, kernels=kernels)
    routes.record_choice(experts.number, found.experts)
    given = routes.of_layer(experts.number)
    if given is not None:
        chosen = torch.where(given[:, :1] < 0, found.experts, given.to(torch.int32)).contiguous()
        found = route(*how, chosen=chosen, kernels=kernels)
    routes.measure(experts.number, found.logits, found.experts)
    if routes.scores is not None:
        routes.scores.add(experts.number, found.logits, found.experts)
    if routes.balance is not None:
        routes.balance.count(experts.number, found.experts, experts.count)
    return found


def logits_grad(grad_weights: Tensor, routed: Routed, experts: ExpertLayer, routes: Routes, kernels: bool) -> Tensor:
    """Return the logits' gradient (T, E) float32, from that of the experts' weights (T, k) and from router losses."""
    grad = route_backward(grad_weights, routed, experts.normalize, kernels=kernels)
    if routes.balance is not None:
        losses = routes.balance
        grad = grad + balance_grad(routed, losses.tokens, losses.aux, losses.z, losses.mean_slots, losses.layers)
    return grad


class _Route(torch.autograd.Function):
    """Return weights (T, k), experts (T, k) and logits (T, E). The backward passes the gradient of the router's rounded
    weight straight through to its master.
    """

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
    """The shared expert's gate (T,). The gradient of its rounded weight goes straight through to the master."""

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
