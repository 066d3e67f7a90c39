"""Linear layers that read one input, multiplied as one: q, k and v; gate and up; o and down by themselves.

Their weights stand under one another, so one product gives all their outputs side by side, each with the bits of its
own product. Where a scheme cannot stack them, their products follow one another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from qarl_formats.prepared import PreparedWeight
from qarl_formats.scheme import InputCodes
from qarl_kernels.backward import input_grad, weight_grad
from torch import Tensor, nn

from qarl.policy.operand import Operand


@dataclass(frozen=True)
class Stack:
    """The layers of one projection, in the order of their outputs.

    names: of the modules. widths: output features of each. masters: float32 (width, K) each; biases: (width,) each, or
    empty.
    """

    names: tuple[str, ...]
    widths: tuple[int, ...]
    masters: tuple[nn.Parameter, ...]
    biases: tuple[nn.Parameter, ...]

    @property
    def width(self) -> int:
        return sum(self.widths)


@dataclass(frozen=True)
class Projection:
    """A stack as one version of the parameters multiplies it.

    operands: one for the whole stack, or one for each layer. bias: (N,) of the compute dtype, or None.
    """

    stack: Stack
    operands: tuple[Operand, ...]
    bias: Tensor | None

    @property
    def input_codes(self) -> InputCodes | None:
        """What the product reads of activations, see `Scheme.input_codes`."""
        kinds = {o.scheme.input_codes if isinstance(o, PreparedWeight) else None for o in self.operands}
        return kinds.pop() if len(kinds) == 1 else None

    def __call__(self, x: Tensor) -> Tensor:
        """x: (T, K) of the compute dtype, contiguous. Returns (T, N)."""
        return _beside([operand(x, bias) for operand, bias in self._parts()])

    def of_codes(self, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        """The same of activations quantized as `input_codes` says. Returns (T, N) of dtype."""
        found = []
        for operand, bias in self._parts():
            assert isinstance(operand, PreparedWeight), "an unquantized operand multiplies values"
            found.append(operand.of_codes(codes, scale, bias, dtype))
        return _beside(found)

    def multiplied(self) -> Iterator[tuple[tuple[str, ...], tuple[int, ...], Operand]]:
        """Each operand with the layers whose weights it holds, and their output features."""
        names, widths = self.stack.names, self.stack.widths
        if len(self.operands) == 1:
            yield names, widths, self.operands[0]
            return
        for name, width, operand in zip(names, widths, self.operands, strict=True):
            yield (name,), (width,), operand

    def _parts(self) -> list[tuple[Operand, Tensor | None]]:
        if len(self.operands) == 1 or self.bias is None:
            return [(operand, self.bias) for operand in self.operands]
        return list(zip(self.operands, self.bias.split(self.stack.widths), strict=True))

    def input_grad(self, dy: Tensor) -> Tensor:
        """dx (T, K) = dy (T, N) @ W_deq, of dy's dtype."""
        weights = [operand.dequantized(dy.dtype) for operand in self.operands]
        return input_grad(dy, weights[0] if len(weights) == 1 else torch.cat(weights))

    def add_weight_grad(self, dy: Tensor, x: Tensor, rounded: bool) -> None:
        """Add dy^T @ x to the gradients of the masters. dy: (T, N), x: (T, K), of one dtype.

        rounded: x after the quantization of activations and back, which each operand has its own way to.
        """
        sums = gradient_of(self.stack.masters)
        if not rounded:
            weight_grad(dy, x, into=sums)
            return
        widths = [sum(widths) for _, widths, _ in self.multiplied()]
        for operand, part, into in zip(self.operands, dy.split(widths, -1), sums.split(widths), strict=True):
            weight_grad(part, operand.rounded_input(x), into=into)


class InPlace:
    """Where gradients go whose backward adds them itself: the masters' `.grad` (see `qarl_kernels.logprob.Sums`)."""

    def sum_of(self, master: Tensor) -> Tensor:
        assert isinstance(master, nn.Parameter), "a master is a parameter"
        return gradient_of([master])


def _beside(outputs: list[Tensor]) -> Tensor:
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)


@torch.no_grad()
def gradient_of(masters: Sequence[nn.Parameter]) -> Tensor:
    """The gradients of masters of one stack as one float32 tensor, made of zeros where there are none.

    It is the memory of their `.grad`: what is added to it is added to them.
    """
    first = masters[0]
    if len(masters) == 1:
        if first.grad is None:
            first.grad = torch.zeros_like(first, memory_format=torch.contiguous_format)
        return first.grad
    from qarl_formats.stacked import adjacent, under_one_another

    grads = [master.grad for master in masters]
    if any(grad is None for grad in grads) or not adjacent([g for g in grads if g is not None]):
        rows = [len(master) for master in masters]
        whole = torch.zeros(sum(rows), *first.shape[1:], dtype=first.dtype, device=first.device)
        for master, part in zip(masters, whole.split(rows), strict=True):
            if master.grad is not None:
                part.copy_(master.grad)
            master.grad = part
    return under_one_another([master.grad for master in masters if master.grad is not None])
