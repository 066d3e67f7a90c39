"""The part of an MLP (or of a shared expert) after its first product: forward, and fused backward."""

from __future__ import annotations

from collections.abc import Callable

from qarl_kernels import pointwise
from qarl_kernels.swiglu import Gated, swiglu, swiglu_backward
from torch import Tensor

from qarl.policy.linear import OutputGradient, PackedLinear, activations
from qarl.policy.run import Run


def activate(gate_up: Tensor, down: PackedLinear, run: Run) -> Gated:
    """Return silu(gate) * up of gate_up (T, 2 I), in the form that down reads."""
    if run.weights.fused:
        codes = down.input_codes(run.weights)
        return swiglu(gate_up, codes, want_product=codes is None)
    return Gated(silu_product(gate_up), None, None)


def silu_product(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up (T, I) of gate_up (T, 2 I), in plain torch."""
    gate, up = gate_up.chunk(2, -1)
    return pointwise.silu(gate.contiguous()) * up


def mlp(gate_up: Tensor, down: PackedLinear, index: int, run: Run, prefix: str = "") -> Tensor:
    """Return the output (T, H) of an MLP, given that of gate and up (T, 2 I).

    index: Index of the layer. prefix: Prefix of the operations' names in a trace.
    """
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
    """Return the gradient of the MLP's input (T, H), given that of its output (T, H). Adds to `.grad` of the masters.

    product: (T, 2 I), output of gate and up; overwritten. normed: Returns the input of gate and up, (T, H).
    """
    gradient = OutputGradient(down, run.weights, grad, run.backward)
    gradient.add_to_masters(swiglu_backward(gradient.of_input(), product))  # product is its own gradient from here on
    gradient = OutputGradient(gate_up, run.weights, product, run.backward)
    gradient.add_to_masters(normed())
    return gradient.of_input()
