"""The decoder on a GPU: embedding, `fused_layer`s and the last norm, as one step of autograd.

Autograd sees one function of the masters, whose backward walks the layers itself: it frees what a layer kept as it
goes, recomputes as much as `recompute` says, and adds every master's gradient where it belongs. The order of all sums
is fixed, so that a step gives the same bits twice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from qarl_kernels.embedding import embedding_grad
from qarl_kernels.fused_norm import add_rms_norm, add_rms_norm_backward
from torch import Tensor

from qarl.policy.fused_attention import FusedAttention, PackedAttention
from qarl.policy.fused_layer import FusedLayer, Kept
from qarl.policy.projection import gradient_of
from qarl.policy.routes import Routes

if TYPE_CHECKING:
    from qarl.policy.decoder import Decoder


def fused_states(
    decoder: Decoder, ids: Tensor, attention: FusedAttention, rows: Tensor | None, routes: Routes
) -> Tensor:
    """Final hidden states of a packed batch: ids (T,) int64, and of them those in `rows` (R,) int64. Returns (R, H)."""
    if torch.is_grad_enabled():
        assert rows is not None and isinstance(attention, PackedAttention), "a learner says which states it reads"
        return _Fused.apply(decoder.embedding.weight, decoder, ids, attention, rows, routes)
    x, layers = _embedded(decoder, ids, attention)
    residual = None
    for layer in layers:
        # Nobody holds the rest while the next layer runs.
        x, residual = layer.forward(x, residual, attention, routes)[:2]
    if rows is not None:
        x, residual = x[rows], None if residual is None else residual[rows]
    return _last_norm(decoder, x, residual, rows)[0]


def _embedded(decoder: Decoder, ids: Tensor, attention: FusedAttention) -> tuple[Tensor, list[FusedLayer]]:
    view = decoder.role.view
    x = view.values[decoder.embedding_name][ids]
    decoder.note(-1, "embedding", x)
    cos, sin = decoder.rotary.tables[x.dtype]
    layers = [FusedLayer(modules, view, cos, sin, attention.positions, decoder) for modules in decoder.layers]
    return x, layers


def _last_norm(
    decoder: Decoder, x: Tensor, residual: Tensor | None, rows: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(normed, stream, inverse) of the rows of a batch that x and residual are; None: all."""
    last = add_rms_norm(x, residual, decoder.role.view.values[decoder.norm_name], decoder.norm.eps)
    assert last.normed is not None, "a norm without quantization gives its values"
    decoder.note(len(decoder.layers), "final_stream", last.hidden, rows=rows)
    decoder.note(len(decoder.layers), "final_norm", last.normed, rows=rows)
    return last.normed, last.hidden, last.inverse


class _Fused(torch.autograd.Function):
    """The first input takes no gradient here: it stands for all masters, which get theirs in place."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        decoder: Decoder,
        ids: Tensor,
        attention: PackedAttention,
        rows: Tensor,
        routes: Routes,
    ) -> Tensor:
        x, layers = _embedded(decoder, ids, attention)
        residual = None
        ctx.decoder, ctx.attention, ctx.layers, ctx.ids, ctx.rows = decoder, attention, layers, ids, rows
        ctx.view, ctx.routes = decoder.role.view, routes
        kept: list[Kept] = []
        for layer in layers:
            x, residual, intermediates = layer.forward(x, residual, attention, routes)
            kept.append(intermediates.drop(decoder.recompute))
            del intermediates
        stream = x[rows], None if residual is None else residual[rows]
        normed, ctx.hidden, ctx.inverse = _last_norm(decoder, *stream, rows)
        ctx.kept = kept
        return normed

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        decoder, attention, kept = ctx.decoder, ctx.attention, ctx.kept
        assert kept, "a second backward through one forward"
        weight = ctx.view.values[decoder.norm_name]
        sums = gradient_of([decoder.norm.weight])
        grad = add_rms_norm_backward(grad.contiguous(), None, ctx.hidden, ctx.inverse, weight, sums)
        decoder.on_gradients([decoder.norm.weight])
        grad = _spread(grad, ctx.rows, len(ctx.ids))
        while kept:
            layer = ctx.layers.pop()
            grad = layer.backward(grad, kept.pop(), attention, ctx.routes)
            decoder.on_gradients(layer.modules.parameters())
        embedding = decoder.embedding
        embedding_grad(grad, ctx.ids, gradient_of([embedding.weight]), embedding.padding_id)
        decoder.on_gradients([embedding.weight])
        return None, None, None, None, None, None


def _spread(grad: Tensor, rows: Tensor, count: int) -> Tensor:
    """Gradient of x[rows]: grad (R, H) summed into `count` rows; a row may be read several times, or never."""
    wide = torch.zeros(count, grad.shape[1], dtype=torch.float32, device=grad.device)
    embedding_grad(grad, rows, wide, -1)
    return wide.to(grad.dtype)
