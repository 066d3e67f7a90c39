"""A decoder layer: its forward on CPU and GPU, and its backward on a GPU.

    forward     h = x + residual; n = norm(h); q, k, v = n Wqkv^T; q, k = rotary(q, k); o = attention(q, k, v);
                m = h + o Wo^T; n = norm(m); g, u = n Wgu^T; x' = (silu(g) * u) Wd^T; residual' = m
    roundings   to the compute dtype after each product, norm, rotation and addition, as in Hugging Face's layers

In a mixture of experts x' comes from `qarl.policy.mixture`.

If a weight set is fused, each operation is a Triton kernel: the norm adds the residual, and the kernel that makes
activations quantizes them. The backward is then written out: it recomputes cheap intermediates, and adds each weight's
gradient to the masters at once. Otherwise each operation is the kernel's plain-torch twin, and autograd runs the
backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from qarl_kernels import pointwise
from qarl_kernels.fused_norm import Normed, add_rms_norm, add_rms_norm_backward, rms_norm_again
from qarl_kernels.rotary import Rotation
from qarl_kernels.rotary_backward import rotary_backward
from torch import Tensor, nn

from qarl.policy.attention import PlainAttention
from qarl.policy.fused_attention import PackedAttention
from qarl.policy.linear import OutputGradient, PackedLinear, activations, gradient_of
from qarl.policy.mixture import KeptExperts, mixture, mixture_backward
from qarl.policy.mlp import mlp, mlp_backward
from qarl.policy.routes import ExpertLayer
from qarl.policy.run import Recompute, Run
from qarl.policy.trace import unnoted


@dataclass
class Norm:
    """An RMSNorm. name: name of its weight. master: (H,) float32. eps: added to the mean square."""

    name: str
    master: nn.Parameter
    eps: float

    def backward(self, grad: Tensor, into: Tensor | None, hidden: Tensor, inverse: Tensor, run: Run) -> Tensor:
        """Return the gradient of the norm's input, added to `into`; see `add_rms_norm_backward`. Updates the
        master's `.grad`.
        """
        weight = run.weights.values[self.name]
        return add_rms_norm_backward(grad, into, hidden, inverse, weight, gradient_of([self.master]))


def add_norm(
    x: Tensor, residual: Tensor | None, norm: Norm, run: Run, linear: PackedLinear | None = None, values: bool = False
) -> Normed:
    """Return the residual stream x + residual (T, H) and its norm: as codes if `linear` reads codes, else as values.

    residual: None for zeros. values: Whether to return values in addition to codes.
    """
    weight = run.weights.values[norm.name]
    if run.weights.fused:
        codes = None if linear is None else linear.input_codes(run.weights)
        return add_rms_norm(x, residual, weight, norm.eps, codes, want_normed=codes is None or values)
    hidden = x if residual is None else residual + x
    normed = pointwise.rms_norm(hidden.contiguous(), norm.master, weight, norm.eps)
    return Normed(hidden, hidden.new_empty(0), normed, None, None)


@dataclass
class Kept:
    """Intermediates that a fused layer keeps for its backward. Those that are None are recomputed.

    Attributes:
        hidden: (T, H), residual stream before the layer.
        inverse: (T,), inverse RMS of the first norm.
        qkv: (T, (H + 2 H_kv) D), output of the packed q, k and v.
        out, lse: (T, H, D) and (H, T), output of the attention and its log-sum-exp.
        middle, middle_inverse: (T, H) and (T,), residual stream before the MLP, and the inverse RMS of its norm.
        gate_up: (T, 2 I), output of gate and up; None for a mixture of experts.
        experts: Intermediates of a mixture of experts; None for an MLP.
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
        """Return a copy without the tensors that the backward recomputes according to `recompute`, see `Decoder`."""
        if recompute == "elementwise":
            return self
        experts = None if self.experts is None else self.experts.drop(recompute)
        if recompute == "mlp":
            return replace(self, gate_up=None, experts=experts)
        if recompute == "products":
            return Kept(self.hidden, out=self.out, lse=self.lse, experts=experts)
        return Kept(self.hidden, experts=experts)


@dataclass(frozen=True, eq=False)
class DecoderLayer:
    """Sizes and masters of one layer, its forward and its backward.

    Attributes:
        window: Number of tokens that a query sees; None: all.
        scale: Factor of the attention scores.
        q_norm, k_norm: Norms of queries and keys before the rotation, or None. whole_norms: whether they are over all
            heads at once (OLMoE), not over each head.
        gate_up, down: Packed linears of the MLP, or of all experts.
        shared: gate_up and down of the shared expert, or empty.
        experts: None if the layer has an MLP.
        gates: Masters of the router and of the shared expert's gate, by name.
    """

    index: int
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int | None
    input_norm: Norm
    mlp_norm: Norm
    q_norm: Norm | None
    k_norm: Norm | None
    whole_norms: bool
    qkv: PackedLinear
    o: PackedLinear
    gate_up: PackedLinear
    down: PackedLinear
    shared: tuple[PackedLinear, ...] = ()
    experts: ExpertLayer | None = None
    gates: Mapping[str, nn.Parameter] = field(default_factory=dict)

    @property
    def linears(self) -> tuple[PackedLinear, ...]:
        return self.qkv, self.o, self.gate_up, self.down, *self.shared

    @property
    def norms(self) -> list[Norm]:
        return [norm for norm in (self.input_norm, self.mlp_norm, self.q_norm, self.k_norm) if norm is not None]

    def parameters(self) -> list[nn.Parameter]:
        """Return all masters of the layer, the large ones first."""
        weights = [master for linear in self.linears for master in linear.masters]
        biases = [master for linear in self.linears for master in linear.biases]
        return [*weights, *biases, *(norm.master for norm in self.norms), *self.gates.values()]

    # --- forward -----------------------------------------------------------------------------------------------

    def forward(self, x: Tensor, residual: Tensor | None, run: Run) -> tuple[Tensor, Tensor, Kept]:
        """Run the layer.

        Args:
            x: (T, H), output of the previous layer, to be added to `residual`.
            residual: (T, H), residual stream; None: zero.
            run: Inputs shared by all layers.

        Returns:
            x and residual for the next layer, and the intermediates for the backward.
        """
        hidden, inverse, qkv = self._into_qkv(x, residual, run)
        out, lse = self._attend(qkv, run)
        # No variable holds the output of o, so that its memory is freed after the next operation.
        if self.experts is not None:
            normed = self._norm(self.mlp_norm, self._product_of_o(out, run), hidden, self.gate_up, run, values=True)
            y, experts = mixture(self, self.experts, normed, run)
            return y, normed.hidden, Kept(hidden, inverse, qkv, out, lse, normed.hidden, normed.inverse, None, experts)
        middle, middle_inverse, gate_up = self._into_gate_up(self._product_of_o(out, run), hidden, run)
        kept = Kept(hidden, inverse, qkv, out, lse, middle, middle_inverse, gate_up)
        return mlp(gate_up, self.down, self.index, run), middle, kept

    def _product_of_o(self, out: Tensor, run: Run) -> Tensor:
        return run.noted(self.index, "o", self.o(out.flatten(1), run.weights))

    def _into_qkv(self, x: Tensor, residual: Tensor | None, run: Run) -> tuple[Tensor, Tensor, Tensor]:
        """Return (stream, inverse RMS, output of q, k and v). The normed stream is freed afterwards."""
        normed = self._norm(self.input_norm, x, residual, self.qkv, run)
        return normed.hidden, normed.inverse, self._product(self.qkv, "qkv", normed, run)

    def _into_gate_up(self, x: Tensor, residual: Tensor, run: Run) -> tuple[Tensor, Tensor, Tensor]:
        """Return (stream, inverse RMS, output of gate and up)."""
        normed = self._norm(self.mlp_norm, x, residual, self.gate_up, run)
        return normed.hidden, normed.inverse, self._product(self.gate_up, "gate_up", normed, run)

    def _norm(
        self, norm: Norm, x: Tensor, residual: Tensor | None, linear: PackedLinear, run: Run, values: bool = False
    ) -> Normed:
        normed = add_norm(x, residual, norm, run, linear, values)
        stream, operation = ("stream", "input_norm") if norm is self.input_norm else ("mlp_stream", "mlp_norm")
        run.note(self.index, stream, normed.hidden)
        run.note(self.index, operation, normed.normed, normed.codes, normed.scale)
        return normed

    def _product(self, linear: PackedLinear, operation: str, normed: Normed, run: Run) -> Tensor:
        read = activations(normed.normed, normed.codes, normed.scale, normed.hidden.dtype)
        return run.noted(self.index, operation, linear(read, run.weights))

    def _attend(self, qkv: Tensor, run: Run) -> tuple[Tensor, Tensor | None]:
        """Attention from the output of q, k and v: (T, H, D), and its log-sum-exp if the backward needs it."""
        attention, rest = run.attention, (self.index, self.scale, self.window)
        if isinstance(attention, PlainAttention):
            q, k, v = self._rotated_qkv(qkv, run)
            run.note(self.index, "rotary", q, k)
            return run.noted(self.index, "attention", attention(q, k, v, *rest)), None
        rotation, qkv = self._rotation(run), self._with_whole_norms(qkv, run)
        out, lse = attention.forward(qkv, rotation, *rest)
        if run.note is not unnoted:
            run.note(self.index, "rotary", *attention.keys_and_values(qkv, rotation, self.index))
        return run.noted(self.index, "attention", out), lse

    def _rotated_qkv(self, qkv: Tensor, run: Run) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values (T, heads, D) in plain torch: norms, rotation, rounding to an FP8 KV cache."""
        q, k, v = qkv.split([self.heads * self.head_dim, *[self.kv_heads * self.head_dim] * 2], 1)
        if self.whole_norms:
            q, k = self._normed(q, self.q_norm, run), self._normed(k, self.k_norm, run)
        q, k, v = (x.unflatten(1, (-1, self.head_dim)) for x in (q, k, v))
        if not self.whole_norms:
            q, k = self._normed(q, self.q_norm, run), self._normed(k, self.k_norm, run)
        q, k = rotated(q, run.cos, run.sin), rotated(k, run.cos, run.sin)
        return (q, pointwise.round_e4m3(k), pointwise.round_e4m3(v)) if run.weights.kv_fp8 else (q, k, v)

    @staticmethod
    def _normed(x: Tensor, norm: Norm | None, run: Run) -> Tensor:
        if norm is None:
            return x
        return pointwise.rms_norm(x.contiguous(), norm.master, run.weights.values[norm.name], norm.eps)

    def _rotation(self, run: Run) -> Rotation:
        """Return the operations on queries, keys and values that Triton kernels fuse: all except norms over all
        heads.
        """
        norms = (None, None) if self.whole_norms else (self.q_norm, self.k_norm)
        q_norm, k_norm = (None if norm is None else run.weights.values[norm.name] for norm in norms)
        sizes, tables = (self.heads, self.kv_heads, self.head_dim), (run.cos, run.sin, run.attention.positions)
        return Rotation(*sizes, *tables, q_norm, k_norm, self.input_norm.eps, run.weights.kv_fp8)

    def _with_whole_norms(self, qkv: Tensor, run: Run) -> Tensor:
        """Apply norms over all heads at once to the output of q, k and v, if the layer has them."""
        if not self.whole_norms:
            return qkv
        normed = torch.empty_like(qkv)
        for columns, part, _ in self._whole_norms(qkv, run):
            assert part.normed is not None, "add_norm without a linear returns values"
            normed[:, columns] = part.normed
        values = slice((self.heads + self.kv_heads) * self.head_dim, None)
        normed[:, values] = qkv[:, values]
        return normed

    def _whole_norms(self, qkv: Tensor, run: Run) -> Iterator[tuple[slice, Normed, Norm]]:
        """Yield for q and k the columns, their normed values and the norm."""
        start = 0
        for norm, heads in ((self.q_norm, self.heads), (self.k_norm, self.kv_heads)):
            assert norm is not None, "both have a norm"
            columns = slice(start, start + heads * self.head_dim)
            yield columns, add_norm(qkv[:, columns], None, norm, run), norm
            start = columns.stop

    # --- backward of a fused layer -----------------------------------------------------------------------------

    def backward(self, grad: Tensor, kept: Kept, run: Run) -> Tensor:
        """Return the gradient (T, H) of the residual stream before the layer, given that after it. Adds to `.grad` of
        the masters, and frees `kept`.
        """
        self._complete(kept, run)
        assert kept.middle is not None and kept.middle_inverse is not None
        normed = partial(rms_norm_again, kept.middle, kept.middle_inverse, run.weights.values[self.mlp_norm.name])
        if self.experts is None:
            assert kept.gate_up is not None
            grad_normed = mlp_backward(grad, kept.gate_up, normed, self.gate_up, self.down, run)
            kept.gate_up = None
        else:
            assert kept.experts is not None, "the chosen experts are always kept"
            grad_normed = mixture_backward(self, self.experts, grad, normed(), kept.experts, run)
        del normed
        grad = self.mlp_norm.backward(grad_normed, grad, kept.middle, kept.middle_inverse, run)
        kept.middle = kept.middle_inverse = None

        assert kept.out is not None and kept.lse is not None and kept.qkv is not None and kept.inverse is not None
        gradient = OutputGradient(self.o, run.weights, grad, run.backward)
        gradient.add_to_masters(kept.out.flatten(1))
        grad_qkv = self._attention_backward(gradient.of_input().view_as(kept.out), kept, run)
        gradient = OutputGradient(self.qkv, run.weights, grad_qkv, run.backward)
        gradient.add_to_masters(rms_norm_again(kept.hidden, kept.inverse, run.weights.values[self.input_norm.name]))
        return self.input_norm.backward(gradient.of_input(), grad, kept.hidden, kept.inverse, run)

    def _attention_backward(self, grad: Tensor, kept: Kept, run: Run) -> Tensor:
        """Return the gradient of the output of q, k and v, given that of the attention's output (T, H, D)."""
        attention, rotation, qkv, out, lse = run.attention, self._rotation(run), kept.qkv, kept.out, kept.lse
        assert isinstance(attention, PackedAttention) and qkv is not None and out is not None and lse is not None
        normed = self._with_whole_norms(qkv, run)
        grad_qkv = torch.empty_like(qkv)
        dv = rotation.values(grad_qkv)
        dq, dk = attention.backward(grad, normed, rotation, out, lse, self.scale, self.window, dv)
        norms = (None, None) if self.whole_norms else (self.q_norm, self.k_norm)
        q_sums, k_sums = (None if norm is None else gradient_of([norm.master]) for norm in norms)
        rotary_backward(dq, dk, normed, rotation, grad_qkv, q_sums, k_sums)
        if self.whole_norms:
            for columns, part, norm in self._whole_norms(qkv, run):
                grad_part = grad_qkv[:, columns]
                grad_part.copy_(norm.backward(grad_part, None, part.hidden, part.inverse, run))
        return grad_qkv

    def _complete(self, kept: Kept, run: Run) -> None:
        """Recompute dropped tensors, with the same bits."""
        if kept.qkv is None or kept.inverse is None:
            _, kept.inverse, kept.qkv = self._into_qkv(kept.hidden, None, run)
        if kept.out is None or kept.lse is None:
            kept.out, kept.lse = self._attend(kept.qkv, run)
        if kept.middle is None or kept.middle_inverse is None:
            x = self._product_of_o(kept.out, run)
            if self.experts is not None:
                before = self._norm(self.mlp_norm, x, kept.hidden, self.gate_up, run, values=True)
                kept.middle, kept.middle_inverse = before.hidden, before.inverse
                return
            kept.middle, kept.middle_inverse, kept.gate_up = self._into_gate_up(x, kept.hidden, run)
        elif kept.gate_up is None and self.experts is None:
            normed = rms_norm_again(kept.middle, kept.middle_inverse, run.weights.values[self.mlp_norm.name])
            kept.gate_up = self.gate_up(normed, run.weights)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x (T, H, D) by cos and sin (T, D), in x's dtype."""
    left, right = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat((-right, left), -1) * sin[:, None]
