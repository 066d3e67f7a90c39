"""A mixture of experts on a GPU, in the place of a layer's MLP: `qarl.policy.mixture` on Triton kernels, both ways.

    forward     p = softmax(n @ Wr^T), and of each token the k largest with their weights w; for each (token, expert):
                g, u = n @ Wgu_e^T; d = (silu(g) * u) @ Wd_e^T; y = sum of w * d over the token's experts, and at last
                of sigmoid(n @ Ws^T) * s, where there is a shared expert: an MLP, which gives s for all tokens
    backward    written out: grad d = w * grad y, grad w = <grad y, d>; then as of an MLP, an expert's rows together;
                the router learns through w alone, and through its own losses where there are some

Rows stand sorted by expert between the first product and the sum. Nothing here waits for the device, and the sizes of
all launches depend on the number of tokens alone, so that a CUDA graph holds a forward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from qarl_kernels.backward import input_grad, weight_grad
from qarl_kernels.fused_norm import Normed
from qarl_kernels.moe.backward import grouped_input_grad, grouped_weight_grad
from qarl_kernels.moe.combine import combine, combine_backward, sum_over_slots
from qarl_kernels.moe.dispatch import groups_of
from qarl_kernels.moe.groups import Groups
from qarl_kernels.moe.routed import Routed
from qarl_kernels.swiglu import swiglu, swiglu_backward
from torch import Tensor

from qarl.policy.fused_shared import FusedShared, KeptShared
from qarl.policy.layer import LayerModules
from qarl.policy.projection import Projection, gradient_of
from qarl.policy.router import logits_grad, route_tokens
from qarl.policy.routes import ExpertLayer, Routes
from qarl.policy.trace import unnoted
from qarl.policy.view import View

if TYPE_CHECKING:
    from qarl.policy.decoder import Decoder, Recompute


@dataclass
class KeptExperts:
    """What a backward finds of its forward over T tokens, of which each has k experts, R = T k rows in all.

    routed, groups: always, so that nothing computed again chooses other experts. gate_up: (R, 2 I). down: (R, H), what
    the experts gave. shared: of the shared expert. None is computed again.
    """

    routed: Routed
    groups: Groups
    gate_up: Tensor | None = None
    down: Tensor | None = None
    shared: KeptShared | None = None

    def drop(self, recompute: Recompute) -> KeptExperts:
        """What is kept until the backward: see `Decoder`. The experts' products are k times an MLP's."""
        return self if recompute == "elementwise" else KeptExperts(self.routed, self.groups)


class FusedMixture:
    """The experts of one layer of one view."""

    def __init__(self, modules: LayerModules, experts: ExpertLayer, view: View, decoder: Decoder) -> None:
        self.modules, self.experts, self.decoder = modules, experts, decoder
        self.router = view.values[experts.router]
        self.gate_up, self.down = (view.projections[stack.names] for stack in modules.stacks[2:4])
        self.shared = None
        if experts.shared_gate is not None:
            self.shared = FusedShared(modules, experts.shared_gate, view, decoder, self.gate_up.input_codes)

    def forward(self, normed: Normed, routes: Routes) -> tuple[Tensor, KeptExperts]:
        """normed: (T, H), with its codes where `gate_up` reads them. Returns (T, H), and what a backward may keep."""
        x = normed.normed
        assert x is not None, "a router reads values"
        routed = route_tokens(x, self.router, self.experts, routes, kernels=True)
        groups = groups_of(routed.experts, self.experts.count, kernels=True)
        gate_up = _product(self.gate_up, x, normed.codes, normed.scale, groups, True, x.dtype)
        self._note(routed, groups, gate_up)
        down = self._into_down(gate_up, groups)
        shared = None if self.shared is None else self.shared.forward(normed)
        y = combine(down, routed.weights, groups, None if shared is None else shared.shared)
        self.decoder.note(self.modules.index, "down", y)
        return y, KeptExperts(routed, groups, gate_up, down, shared)

    def _into_down(self, gate_up: Tensor, groups: Groups) -> Tensor:
        """(R, H), what each row's expert gives."""
        codes = self.down.input_codes
        gated = swiglu(gate_up, codes, want_product=codes is None)
        return _product(self.down, gated.product, gated.codes, gated.scale, groups, False, gate_up.dtype)

    def _note(self, routed: Routed, groups: Groups, gate_up: Tensor) -> None:
        """Say what the experts computed, a token's rows side by side."""
        note, index = self.decoder.note, self.modules.index
        if note is unnoted:
            return
        note(index, "router", routed.logits, routed.experts)
        place = groups.place.long()
        gated = swiglu(gate_up)
        for operation, rows in (("gate_up", gate_up), ("activation", gated.product)):
            assert rows is not None, "it was asked for"
            note(index, operation, rows[place].unflatten(0, (-1, groups.slots)))

    def backward(self, grad: Tensor, normed: Tensor, kept: KeptExperts, routes: Routes) -> Tensor:
        """grad: (T, H), of what `forward` returned; normed: (T, H), what it read. Returns the gradient of that; masters
        get theirs."""
        routed, groups = kept.routed, kept.groups
        gate_up = self.gate_up.grouped(normed, groups, True) if kept.gate_up is None else kept.gate_up
        down = self._into_down(gate_up, groups) if kept.down is None else kept.down
        kept.gate_up = kept.down = None
        grad_down, grad_weights = combine_backward(grad, down, routed.weights, groups, into=down)
        del down
        arriving = self._of_input(self.down, grad_down, groups)
        grad_gate_up, product = swiglu_backward(arriving, gate_up, True, into=gate_up)
        assert product is not None, "it was asked for"
        self._add(self.down, grad_down, product, groups, False)
        del arriving, grad_down, product
        self._add(self.gate_up, grad_gate_up, normed, groups, True)
        arriving = self._of_input(self.gate_up, grad_gate_up, groups)
        del grad_gate_up, gate_up
        others = self._router_backward(grad_weights, normed, routed, routes)
        if self.shared is not None:
            shared, kept.shared = kept.shared, None
            others += self.shared.backward(grad, normed, shared)
        return sum_over_slots(arriving, groups, others.to(normed.dtype))

    def _router_backward(self, grad_weights: Tensor, normed: Tensor, routed: Routed, routes: Routes) -> Tensor:
        """What reaches the router's input, (T, H) float32; its master gets its gradient. grad_weights: (T, k)."""
        grad = logits_grad(grad_weights, routed, self.experts, routes, kernels=True)
        sums = gradient_of([self.modules.masters[self.experts.router]])
        weight_grad(grad, normed.float(), into=sums)
        return input_grad(grad, self.router.float())

    def _of_input(self, projection: Projection, dy: Tensor, groups: Groups) -> Tensor:
        """dx (R, K) of a grouped product, from dy (R, N)."""
        weight = projection.dequantized(dy.dtype).to(dy.dtype)
        return grouped_input_grad(dy, weight, groups)

    def _add(self, projection: Projection, dy: Tensor, x: Tensor, groups: Groups, gathered: bool) -> None:
        """Add dW of a grouped product to the masters' gradients. x: what it read, (T, K) if gathered, else (R, K)."""
        (read,) = (x for _, x in projection.inputs(x, self.decoder.dequantize_input))
        into = gradient_of(projection.stack.masters)
        grouped_weight_grad(dy, read, groups, gathered, into)


def _product(
    projection: Projection,
    x: Tensor | None,
    codes: Tensor | None,
    scale: Tensor | None,
    groups: Groups,
    gathered: bool,
    dtype: torch.dtype,
) -> Tensor:
    """Of activations that come as values, or as codes where the product reads them."""
    if codes is None or scale is None:
        assert x is not None, "activations come as values or as codes"
        return projection.grouped(x, groups, gathered)
    return projection.of_codes_grouped(codes, scale, groups, gathered, dtype)
