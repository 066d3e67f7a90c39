"""An MLP after its first product: a layer's, or the shared expert of a mixture; forward, and fused backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from qarl_kernels import pointwise
from qarl_kernels.swiglu import Gated, swiglu, swiglu_backward
from torch import Tensor

from qarl.policy.linear import OutputGradient, PackedLinear, activations

if TYPE_CHECKING:
    from qarl.policy.decoder import Run


def activate(gate_up: Tensor, down: PackedLinear, run: Run) -> Gated:
    """silu(gate) * up of gate_up (T, 2 I), as the product of down reads it."""
    if run.weights.fused:
        codes = down.input_codes(run.weights)
        return swiglu(gate_up, codes, want_product=codes is None)
    return Gated(silu_product(gate_up), None, None)


def silu_product(gate_up: Tensor) -> Tensor:
    """silu(gate) * up (T, I) in plain torch, of gate_up (T, 2 I)."""
    gate, up = gate_up.chunk(2, -1)
    return pointwise.silu(gate.contiguous()) * up


def mlp(gate_up: Tensor, down: PackedLinear, index: int, run: Run, prefix: str = "") -> Tensor:
    """(T, H), from gate_up (T, 2 I), the product of gate and up. index: of the layer. prefix: of names in a trace."""
    gated = activate(gate_up, down, run)
    run.note(index, f"{prefix}activation", gated.product, gated.codes, gated.scale)
    product = down(activations(gated.product, gated.codes, gated.scale, gate_up.dtype), run.weights)
    return run.noted(index, f"{prefix}down", product)


def mlp_backward(
    grad: Tensor,
    product: Tensor,
    normed: Callable[[], Tensor],
    gate_up: PackedLinear,
    down: PackedLinear,
    run: Run,
) -> Tensor:
    """The gradient of what gate and up read (T, H), from that of what down gave (T, H). Masters get theirs.

    product: (T, 2 I), that of gate and up, is overwritten. normed: makes what gate and up read, (T, H), when needed.
    """
    gradient = OutputGradient(down, run.weights, grad, run.backward)
    grad_product, gated = swiglu_backward(gradient.of_input(), product, True, into=product)
    assert gated is not None, "it was asked for"
    gradient.add_to_masters(gated)
    del gated
    gradient = OutputGradient(gate_up, run.weights, grad_product, run.backward)
    gradient.add_to_masters(normed())
    return gradient.of_input()
