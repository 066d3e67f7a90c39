"""A decoder layer on a GPU: its products, and one kernel for whatever stands between two of them; forward and backward.

    forward     h = x + residual; n = norm(h); q, k, v = n @ Wqkv^T; q, k = rotary(q, k); o = attention(q, k, v);
                m = h + o @ Wo^T; n = norm(m); g, u = n @ Wgu^T; x' = (silu(g) * u) @ Wd^T; residual' = m
    roundings   where `qarl.policy.plain_layer` has them, which is the same layer in plain torch

The residual addition belongs to the norm that follows it, and activations are quantized by the kernel that makes them.
In a mixture of experts x' is what `qarl.policy.fused_mixture` makes of n.
The backward is written out: it recomputes what is cheap, and adds each weight's gradient to the masters' at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from qarl_kernels.fused_norm import Normed, add_rms_norm, add_rms_norm_backward, rms_norm_again
from qarl_kernels.rotary import Rotation
from qarl_kernels.rotary_backward import rotary_backward
from torch import Tensor

from qarl.policy.fused_attention import FusedAttention, PackedAttention
from qarl.policy.fused_mixture import FusedMixture, KeptExperts
from qarl.policy.fused_mlp import FusedMLP, add_gradients
from qarl.policy.layer import LayerModules
from qarl.policy.projection import ArrivingGradient, Projection, gradient_of
from qarl.policy.routes import NO_ROUTES, Routes
from qarl.policy.trace import unnoted
from qarl.policy.view import View

if TYPE_CHECKING:
    from qarl.policy.decoder import Decoder, Recompute


@dataclass
class Kept:
    """What a layer's backward finds of its forward; None is computed again.

    hidden: (T, H), the residual stream before the layer. inverse: (T,), of the norm there. qkv: (T, (H + 2 H_kv) D).
    out: (T, H, D), lse: (H, T), of the attention. middle, middle_inverse: the stream and norm before the MLP.
    gate_up: (T, 2 I), of an MLP. experts: of a mixture.
    """

    hidden: Tensor
    inverse: Tensor | None = None
    qkv: Tensor | None = None
    out: Tensor | None = None
    lse: Tensor | None = None
    middle: Tensor | None = None
    middle_inverse: Tensor | None = None
    gate_up: Tensor | None = None
    experts: KeptExperts | None = None

    def drop(self, recompute: Recompute) -> Kept:
        """What is kept until the backward, where it computes again what `recompute` says.

        elementwise: norms, rotation, activation. mlp: gate and up too. products: all products but down. layer: all.
        """
        if recompute == "elementwise":
            return self
        experts = None if self.experts is None else self.experts.drop(recompute)
        if recompute == "mlp":
            return replace(self, gate_up=None, experts=experts)
        if recompute == "products":
            return Kept(self.hidden, out=self.out, lse=self.lse, experts=experts)
        return Kept(self.hidden, experts=experts)


class FusedLayer:
    """One layer of one view, on one packed batch.

    cos, sin: rotary tables (positions, D) of the compute dtype. positions: (T,) int64. decoder: says how the backward
    is computed.
    """

    def __init__(
        self, modules: LayerModules, view: View, cos: Tensor, sin: Tensor, positions: Tensor, decoder: Decoder
    ) -> None:
        self.modules, self.view, self.decoder = modules, view, decoder
        norms = () if modules.whole_norms else (modules.q_norm, modules.k_norm)
        q_norm, k_norm = (view.values[name] if name else None for name in norms or (None, None))
        sizes = modules.heads, modules.kv_heads, modules.head_dim
        self.rotation = Rotation(*sizes, cos, sin, positions, q_norm, k_norm, modules.eps, view.kv_fp8)
        self.qkv, self.o, self.gate_up, down = (view.projections[stack.names] for stack in modules.stacks[:4])
        self.mlp = FusedMLP(modules.index, self.gate_up, down, decoder)  # where there are no experts
        self.mixture = None if modules.experts is None else FusedMixture(modules, modules.experts, view, decoder)

    def forward(
        self, x: Tensor, residual: Tensor | None, attention: FusedAttention, routes: Routes = NO_ROUTES
    ) -> tuple[Tensor, Tensor, Kept]:
        """x: (T, H), what the layer before adds to `residual`. Returns the same of this layer, and the rest."""
        hidden, inverse, qkv = self._into_qkv(x, residual)
        out, lse = self._attend(qkv, attention)
        if self.mixture is not None:
            normed = self._into_experts(self._noted("o", self.o(out.flatten(1))), hidden)
            y, experts = self.mixture.forward(normed, routes)
            kept = Kept(hidden, inverse, qkv, out, lse, normed.hidden, normed.inverse, experts=experts)
            return y, normed.hidden, kept
        middle, middle_inverse, gate_up = self._into_gate_up(self._noted("o", self.o(out.flatten(1))), hidden)
        kept = Kept(hidden, inverse, qkv, out, lse, middle, middle_inverse, gate_up)
        return self.mlp.forward(gate_up), middle, kept

    def _into_qkv(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        return self._normed(x, residual, self.modules.input_norm, self.qkv, ("stream", "input_norm", "qkv"))

    def _into_gate_up(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self._normed(x, residual, self.modules.mlp_norm, self.gate_up, ("mlp_stream", "mlp_norm", "gate_up"))

    def _into_experts(self, x: Tensor, residual: Tensor) -> Normed:
        """The stream and norm before the experts; their router reads values where they read codes."""
        codes = self.gate_up.input_codes
        normed = add_rms_norm(x, residual, self.view.values[self.modules.mlp_norm], self.modules.eps, codes)
        self._note("mlp_stream", normed.hidden)
        self._note("mlp_norm", normed.normed, normed.codes, normed.scale)
        return normed

    def _normed(
        self, x: Tensor, residual: Tensor | None, norm: str, projection: Projection, names: tuple[str, str, str]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(stream, inverse, product of the normed stream). names: of stream, normed and product in a trace."""
        codes = projection.input_codes
        normed = add_rms_norm(x, residual, self.view.values[norm], self.modules.eps, codes, want_normed=codes is None)
        self._note(names[0], normed.hidden)
        self._note(names[1], normed.normed, normed.codes, normed.scale)
        y = projection.of(normed.normed, normed.codes, normed.scale, x.dtype)
        return normed.hidden, normed.inverse, self._noted(names[2], y)

    def _attend(self, qkv: Tensor, attention: FusedAttention) -> tuple[Tensor, Tensor | None]:
        m = self.modules
        qkv = self._with_whole_norms(qkv)
        out, lse = attention.forward(qkv, self.rotation, m.index, m.scale, m.window)
        if self.decoder.note is not unnoted:
            self._note("rotary", *attention.keys_and_values(qkv, self.rotation, m.index))
        return self._noted("attention", out), lse

    def _with_whole_norms(self, qkv: Tensor) -> Tensor:
        """The product of q, k and v after norms over all heads at once (OLMoE), where the layer has them."""
        if not self.modules.whole_norms:
            return qkv
        normed = torch.empty_like(qkv)
        for columns, part, _, _ in self._whole_norms(qkv):
            assert part.normed is not None, "it was asked for"
            normed[:, columns] = part.normed
        values = self.rotation.values
        values(normed).copy_(values(qkv))
        return normed

    def _whole_norms(self, qkv: Tensor) -> Iterator[tuple[slice, Normed, Tensor, str]]:
        """Of q and of k: the columns, what the norm makes of them, its weight and that one's name."""
        m, start = self.modules, 0
        for name, heads in ((m.q_norm, m.heads), (m.k_norm, m.kv_heads)):
            assert name is not None, "both have a norm"
            columns, weight = slice(start, start + heads * m.head_dim), self.view.values[name]
            yield columns, add_rms_norm(qkv[:, columns], None, weight, m.eps), weight, name
            start = columns.stop

    def _note(self, operation: str, *tensors: Tensor | None) -> None:
        self.decoder.note(self.modules.index, operation, *tensors)

    def _noted(self, operation: str, tensor: Tensor) -> Tensor:
        self._note(operation, tensor)
        return tensor

    # --- backward ----------------------------------------------------------------------------------------------

    def backward(self, grad: Tensor, kept: Kept, attention: PackedAttention, routes: Routes = NO_ROUTES) -> Tensor:
        """grad: (T, H), of the stream after the layer. Returns that of the stream before it; masters get theirs."""
        m, view = self.modules, self.view
        self._complete(kept, attention)
        assert kept.middle is not None and kept.middle_inverse is not None
        weight = view.values[m.mlp_norm]
        if self.mixture is None:
            assert kept.gate_up is not None
            normed_again = partial(rms_norm_again, kept.middle, kept.middle_inverse, weight)
            grad_normed = self.mlp.backward(grad, kept.gate_up, normed_again)
            kept.gate_up = None
            del normed_again
        else:
            assert kept.experts is not None, "which experts there were is always kept"
            normed = rms_norm_again(kept.middle, kept.middle_inverse, weight)
            grad_normed = self.mixture.backward(grad, normed, kept.experts, routes)
            del normed
        sums = gradient_of([m.masters[m.mlp_norm]])
        grad = add_rms_norm_backward(grad_normed, grad, kept.middle, kept.middle_inverse, weight, sums)
        kept.middle = kept.middle_inverse = None

        assert kept.out is not None and kept.lse is not None and kept.qkv is not None and kept.inverse is not None
        arriving = self._arriving(self.o, grad)
        add_gradients(arriving, kept.out.flatten(1), self.decoder)
        grad_qkv = self._attention_backward(arriving.of_input().view_as(kept.out), kept, attention)
        weight = view.values[m.input_norm]
        arriving = self._arriving(self.qkv, grad_qkv)
        add_gradients(arriving, rms_norm_again(kept.hidden, kept.inverse, weight), self.decoder)
        grad_normed = arriving.of_input()
        sums = gradient_of([m.masters[m.input_norm]])
        return add_rms_norm_backward(grad_normed, grad, kept.hidden, kept.inverse, weight, sums)

    def _attention_backward(self, grad: Tensor, kept: Kept, attention: PackedAttention) -> Tensor:
        """The gradient of `qkv`, from that of the attention's output (T, H, D)."""
        m, rotation = self.modules, self.rotation
        qkv, out, lse = kept.qkv, kept.out, kept.lse
        assert qkv is not None and out is not None and lse is not None
        turned = self._with_whole_norms(qkv)
        grad_qkv = torch.empty_like(qkv)
        dv = rotation.values(grad_qkv)
        dq, dk = attention.backward(grad, turned, rotation, out, lse, m.scale, m.window, dv)
        names = () if m.whole_norms else (m.q_norm, m.k_norm)
        q_sums, k_sums = (gradient_of([m.masters[name]]) if name else None for name in names or (None, None))
        rotary_backward(dq, dk, turned, rotation, grad_qkv, q_sums, k_sums)
        if m.whole_norms:
            for columns, normed, weight, name in self._whole_norms(qkv):
                arriving, sums = grad_qkv[:, columns], gradient_of([m.masters[name]])
                arriving.copy_(add_rms_norm_backward(arriving, None, normed.hidden, normed.inverse, weight, sums))
        return grad_qkv

    def _complete(self, kept: Kept, attention: PackedAttention) -> None:
        """Compute again what was not kept, with the bits that it had."""
        if kept.qkv is None or kept.inverse is None:
            _, kept.inverse, kept.qkv = self._into_qkv(kept.hidden, None)
        if kept.out is None or kept.lse is None:
            kept.out, kept.lse = self._attend(kept.qkv, attention)
        if kept.middle is None or kept.middle_inverse is None:
            x = self.o(kept.out.flatten(1))
            if self.mixture is not None:
                before = self._into_experts(x, kept.hidden)
                kept.middle, kept.middle_inverse = before.hidden, before.inverse
                return
            kept.middle, kept.middle_inverse, kept.gate_up = self._into_gate_up(x, kept.hidden)
        elif kept.gate_up is None and self.mixture is None:
            normed = rms_norm_again(kept.middle, kept.middle_inverse, self.view.values[self.modules.mlp_norm])
            kept.gate_up = self.gate_up(normed)

    def _arriving(self, projection: Projection, dy: Tensor) -> ArrivingGradient:
        return projection.arriving(dy, self.decoder.backward)
