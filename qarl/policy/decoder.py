"""The decoder of a policy: a Hugging Face model's weights and configuration under layers of qarl's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from qarl.policy.attention import Attention, PlainAttention
from qarl.policy.layer import read_layers
from qarl.policy.modules import Embedding, HFModule, RMSNorm, RotaryTable
from qarl.policy.plain_layer import plain_layer
from qarl.policy.projection import Backward
from qarl.policy.routes import NO_ROUTES, Routes
from qarl.policy.trace import Note, unnoted
from qarl.policy.view import Role

Recompute = Literal["elementwise", "mlp", "products", "layer"]


def _unheard(masters: Sequence[nn.Parameter]) -> None:
    """Where nobody waits for gradients before the backward is over."""


class Decoder:
    """Runs the layers of a model whose modules `qarl.policy.modules` has replaced, on the role's view.

    model: without its output layer. dequantize_input: see `quant.ste_input`. recompute: what a backward computes again
    instead of keeping it. elementwise: norms, rotation and activation; mlp: also the products of gate and up; products:
    all products but the MLP's last, so that beside a layer's input the attention's output is kept; layer: everything.
    In plain torch, where autograd keeps what it wants, the first three keep all. backward: whether the backward's
    products are of 16-bit or FP8 operands, which only fused layers have. note: is told what each operation gives, see
    `qarl.policy.trace`. on_gradients: a fused backward tells it, layer by layer, of which masters `.grad` is complete,
    and adds nothing to them afterwards; those of plain torch are autograd's own leaves, which have hooks for it.
    """

    def __init__(self, model: HFModule, role: Role, dequantize_input: bool, backward: Backward) -> None:
        self.role, self.dequantize_input = role, dequantize_input
        self.embedding: Embedding = model.embed_tokens
        self.rotary: RotaryTable = model.rotary_emb
        self.norm: RMSNorm = model.norm
        self.embedding_name, self.norm_name = self.embedding.parameter, self.norm.parameter
        self.layers = read_layers(model)
        self.recompute: Recompute = "elementwise"
        self.backward: Backward = backward
        self.note: Note = unnoted
        self.on_gradients: Callable[[Sequence[nn.Parameter]], None] = _unheard

    def __call__(
        self, ids: Tensor, attention: Attention, rows: Tensor | None = None, routes: Routes = NO_ROUTES
    ) -> Tensor:
        """Final hidden states of a packed batch. ids: (T,) int64; rows: (R,) int64, which to return; None: all.

        attention: made for the role's view, see `qarl.policy.attention`. routes: of the tokens through the experts.
        Returns (R, H) of the compute dtype.
        """
        if not isinstance(attention, PlainAttention):
            from qarl.policy.fused_decoder import fused_states  # imports Triton, which the CPU does not need

            return fused_states(self, ids, attention, rows, routes)
        hidden, note = self.embedding(ids), self.note
        note(-1, "embedding", hidden)
        cos, sin = self.rotary(hidden, attention.positions)
        again = self.recompute == "layer" and torch.is_grad_enabled()
        run = partial(checkpoint, plain_layer, use_reentrant=False) if again else plain_layer
        for layer in self.layers:
            hidden = run(layer, hidden, cos, sin, attention, note, routes, self.role.view.kv_fp8)
        note(len(self.layers), "final_stream", hidden)
        hidden = self.norm(hidden)
        note(len(self.layers), "final_norm", hidden)
        return hidden if rows is None else hidden[rows]

    @contextmanager
    def noting(self, note: Note) -> Iterator[None]:
        """Inside, forwards say what they compute to `note`."""
        before, self.note = self.note, note
        try:
            yield
        finally:
            self.note = before
