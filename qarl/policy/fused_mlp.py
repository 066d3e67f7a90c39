"""An MLP on a GPU: a layer's, or the shared expert of a mixture; both ways, but for the first product and its input.

forward     d = (silu(g) * u) @ Wd^T
backward    written out; the gradients of down, and of gate and up, are added to the masters'
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from qarl_kernels.column_sum import column_sum
from qarl_kernels.swiglu import swiglu, swiglu_backward
from torch import Tensor

from qarl.policy.projection import ArrivingGradient, Projection, gradient_of

if TYPE_CHECKING:
    from qarl.policy.decoder import Decoder


class FusedMLP:
    """Of one layer, by index, of one view. gate_up, down: its products. prefix: of its operations in a trace."""

    def __init__(self, index: int, gate_up: Projection, down: Projection, decoder: Decoder, prefix: str = "") -> None:
        self.index, self.gate_up, self.down, self.decoder, self.prefix = index, gate_up, down, decoder, prefix

    def forward(self, gate_up: Tensor) -> Tensor:
        """gate_up: (T, 2 I), what the product of gate and up gave. Returns (T, H)."""
        codes = self.down.input_codes
        gated = swiglu(gate_up, codes, want_product=codes is None)
        self.decoder.note(self.index, f"{self.prefix}activation", gated.product, gated.codes, gated.scale)
        down = self.down.of(gated.product, gated.codes, gated.scale, gate_up.dtype)
        self.decoder.note(self.index, f"{self.prefix}down", down)
        return down

    def backward(self, grad: Tensor, gate_up: Tensor, read: Callable[[], Tensor]) -> Tensor:
        """The gradient of what gate and up read (T, H), from that of what down gave (T, H).

        gate_up: (T, 2 I), is written over. read: makes what gate and up read, (T, H), when it is needed.
        """
        arriving = self.down.arriving(grad, self.decoder.backward)
        grad_gate_up, product = swiglu_backward(arriving.of_input(), gate_up, True, into=gate_up)
        assert product is not None, "it was asked for"
        add_gradients(arriving, product, self.decoder)
        del product
        arriving = self.gate_up.arriving(grad_gate_up, self.decoder.backward)
        add_gradients(arriving, read(), self.decoder)
        return arriving.of_input()


def add_gradients(arriving: ArrivingGradient, x: Tensor, decoder: Decoder) -> None:
    """Add the gradients of a projection's weights and biases. x: (T, K), the values that it read."""
    arriving.add_of_weight(x, rounded=decoder.dequantize_input)
    if biases := arriving.projection.stack.biases:
        column_sum(arriving.dy, gradient_of(biases))
