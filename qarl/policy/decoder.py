"""The decoder of a policy: embedding, decoder layers and the last norm, on the masters of a Hugging Face model.

In plain torch autograd runs the backward. On Triton kernels the whole decoder is one autograd function: its backward
visits the layers itself, frees the intermediates of each layer, recomputes those that `recompute` names, and adds
every master's gradient in place. The order of all sums is fixed, so a step gives the same bits twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from qarl_kernels.fused_norm import Normed
from qarl_kernels.token_sums import embedding_grad
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from qarl.policy.attention import Attention
from qarl.policy.fused_attention import PackedAttention
from qarl.policy.layer import DecoderLayer, Kept, add_norm
from qarl.policy.linear import Backward, PackedLinear, WeightSet, gradient_of
from qarl.policy.modules import HFModule, read_layers, read_norm, rotary_tables
from qarl.policy.routes import NO_ROUTES, Routes
from qarl.policy.run import Recompute, Run
from qarl.policy.trace import Note, unnoted


class Decoder:
    """Reads the layers of a model and runs them.

    Args:
        model: Hugging Face model without its output layer.
        positions: Number of positions in the rotary tables.
        dtypes: Compute dtypes of the forwards.
        device: Device of the rotary tables.
        dequantize_input: See `PackedLinear`.
        backward: See `OutputGradient`; plain torch has 16-bit products only.

    Attributes:
        recompute: What a backward recomputes instead of keeping it. elementwise: norms, rotation and activation; mlp:
            also the product of gate and up; products: all products, so that a layer keeps only its input and the
            output of its attention; layer: everything except the layer's input. In plain torch the first three are
            the same, because autograd chooses what it keeps.
        note: Records the result of each operation, see `qarl.policy.trace`.
        on_gradients: Called by a fused backward, layer by layer, with the masters whose `.grad` is complete. Not called
            in plain torch, where autograd's own hooks do this.
    """

    def __init__(
        self,
        model: HFModule,
        positions: int,
        dtypes: set[torch.dtype],
        device: torch.device,
        dequantize_input: bool = False,
        backward: Backward = "bf16",
    ) -> None:
        self.embedding: nn.Parameter = model.embed_tokens.weight
        padding = model.embed_tokens.padding_idx
        self.padding_id = -1 if padding is None else padding
        self.embedding_name = "model.embed_tokens.weight"
        self.rotary = rotary_tables(model.rotary_emb, positions, dtypes, device)
        self.norm = read_norm(model.norm, "model.norm")
        self.layers: list[DecoderLayer] = read_layers(model, dequantize_input)
        self.recompute: Recompute = "elementwise"
        self.backward: Backward = backward
        self.note: Note = unnoted
        self.on_gradients: Callable[[Sequence[nn.Parameter]], None] = lambda masters: None

    @property
    def linears(self) -> list[PackedLinear]:
        """The packed linears of all layers, in order."""
        return [linear for layer in self.layers for linear in layer.linears]

    def __call__(
        self,
        ids: Tensor,
        attention: Attention,
        weights: WeightSet,
        rows: Tensor | None = None,
        routes: Routes = NO_ROUTES,
    ) -> Tensor:
        """Return the final hidden states of a packed batch, (R, H) in the compute dtype.

        Args:
            ids: (T,) int64.
            attention: Attention of the batch, built for Triton kernels if `weights.fused`.
            weights: Weights of the version that runs.
            rows: (R,) int64, rows whose states are returned. None: all rows.
            routes: Routing of the tokens to experts.
        """
        cos, sin = self.rotary[weights.values[self.embedding_name].dtype]
        if not weights.fused:
            cos, sin = cos[attention.positions], sin[attention.positions]
        run = Run(weights, attention, routes, cos, sin, self.note, self.backward)
        if weights.fused and torch.is_grad_enabled():
            assert rows is not None and isinstance(attention, PackedAttention), "a forward with gradients needs rows"
            return _Fused.apply(self.embedding, self, ids, rows, run)
        last = self.run(ids, rows, run).normed
        assert last is not None, "the last norm gives values"
        return last

    def run(self, ids: Tensor, rows: Tensor | None, run: Run, kept: list[Kept] | None = None) -> Normed:
        """Run all layers and return the last norm of `rows`. ids, rows: as for `__call__`.

        kept: Receives each layer's intermediates; None if there is no backward.
        """
        fused = run.weights.fused
        x, residual = self._embedded(ids, run), None
        run.note(-1, "embedding", x)
        for layer in self.layers:
            if not fused:
                x, residual = self._plain(layer, x, run), None
                continue
            x, residual, intermediates = layer.forward(x, residual, run)
            if kept is not None:
                kept.append(intermediates.drop(self.recompute))
            del intermediates  # frees the rest before the next layer runs
        if fused and rows is not None:
            x, residual = x[rows], None if residual is None else residual[rows]
        last = add_norm(x, residual, self.norm, run)
        noted = {"rows": rows if fused else None}
        run.note(len(self.layers), "final_stream", last.hidden, **noted)
        run.note(len(self.layers), "final_norm", last.normed, **noted)
        if not fused and rows is not None and last.normed is not None:
            last = last._replace(normed=last.normed[rows])
        return last

    def _embedded(self, ids: Tensor, run: Run) -> Tensor:
        value = run.weights.values[self.embedding_name]
        return value[ids] if run.weights.fused else _Lookup.apply(ids, self.embedding, value, self.padding_id)

    def _plain(self, layer: DecoderLayer, hidden: Tensor, run: Run) -> Tensor:
        """The residual stream after a layer in plain torch."""

        def stream(hidden: Tensor) -> Tensor:
            x, residual, _ = layer.forward(hidden, None, run)
            return residual + x

        again = self.recompute == "layer" and torch.is_grad_enabled()
        return checkpoint(stream, hidden, use_reentrant=False) if again else stream(hidden)

    @contextmanager
    def noting(self, note: Note) -> Iterator[None]:
        """Context manager: forwards report the result of each operation to `note`."""
        before, self.note = self.note, note
        try:
            yield
        finally:
            self.note = before


class _Lookup(torch.autograd.Function):
    """Rows of the embedding's value (V, H), with a float32 gradient for its master.

    The padding token gets no gradient from its look-ups, as in `nn.Embedding`: its row may be all zeros, and a norm's
    gradient at a zero row is 1 / sqrt(eps) = 1000 times too large to be of use.
    """

    @staticmethod
    def forward(ctx: Any, ids: Tensor, master: Tensor, value: Tensor, padding_id: int) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.rows, ctx.padding_id = master.shape[0], padding_id
        return value[ids]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (ids,) = ctx.saved_tensors
        wide = grad.float().reshape(-1, grad.shape[-1])
        summed = torch.ops.aten.embedding_dense_backward(wide, ids.reshape(-1), ctx.rows, ctx.padding_id, False)
        return None, summed, None, None


class _Fused(torch.autograd.Function):
    """The decoder on Triton kernels. Its first input represents all masters, which get their gradients in place."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, decoder: Decoder, ids: Tensor, rows: Tensor, run: Run) -> Tensor:
        ctx.decoder, ctx.ids, ctx.rows, ctx.run = decoder, ids, rows, run
        kept: list[Kept] = []
        last = decoder.run(ids, rows, run, kept)
        ctx.kept, ctx.hidden, ctx.inverse = kept, last.hidden, last.inverse
        assert last.normed is not None, "the last norm gives values"
        return last.normed

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        decoder, kept, run = ctx.decoder, ctx.kept, ctx.run
        assert kept, "a second backward through one forward"
        grad = decoder.norm.backward(grad.contiguous(), None, ctx.hidden, ctx.inverse, run)
        decoder.on_gradients([decoder.norm.master])
        grad = _spread(grad, ctx.rows, len(ctx.ids))
        for layer in reversed(decoder.layers):
            grad = layer.backward(grad, kept.pop(), run)
            decoder.on_gradients(layer.parameters())
        embedding_grad(grad, ctx.ids, gradient_of([decoder.embedding]), decoder.padding_id)
        decoder.on_gradients([decoder.embedding])
        return None, None, None, None, None


def _spread(grad: Tensor, rows: Tensor, count: int) -> Tensor:
    """Backward of x[rows]: sum grad (R, H) into `count` rows, as a row may have been read several times or never."""
    wide = torch.zeros(count, grad.shape[1], dtype=torch.float32, device=grad.device)
    embedding_grad(grad, rows, wide, -1)
    return wide.to(grad.dtype)
