"""Linear layers that read one input, multiplied as one: q, k and v; gate and up; o and down by themselves; or all
experts' gate and up, and all experts' down, of which each row reads its expert's.

Their weights stand under one another, so one product gives all their outputs side by side, each with the bits of its
own product. Where a scheme cannot stack them, their products follow one another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from qarl_formats.rows import adjacent, concatenate_rows
from qarl_formats.scheme import Codes, InputCodes
from qarl_formats.weight import LowBitWeight
from qarl_kernels.backward import input_grad, weight_grad
from qarl_kernels.moe.groups import Groups
from torch import Tensor, nn

Backward = Literal["bf16", "fp8"]


@dataclass(frozen=True)
class Stack:
    """The layers of one projection, in the order of their outputs.

    names: of the modules. widths: output features of each. masters: float32 (width, K) each; biases: (width,) each, or
    empty. experts: how many experts have them, one after the other; None: every row is multiplied with all of them.
    """

    names: tuple[str, ...]
    widths: tuple[int, ...]
    masters: tuple[nn.Parameter, ...]
    biases: tuple[nn.Parameter, ...]
    experts: int | None = None

    @property
    def width(self) -> int:
        return sum(self.widths)


@dataclass(frozen=True)
class Projection:
    """A stack as one version of the parameters multiplies it.

    operands: one for the whole stack, or one for each layer. bias: (N,) of the compute dtype, or None.
    """

    stack: Stack
    operands: tuple[LowBitWeight, ...]
    bias: Tensor | None

    @cached_property
    def input_codes(self) -> InputCodes | None:
        """What the product reads of activations, see `Scheme.input_codes`."""
        kinds = {weight.input_codes for weight in self.operands}
        return kinds.pop() if len(kinds) == 1 else None

    def __call__(self, x: Tensor) -> Tensor:
        """x: (T, K) of the compute dtype, contiguous. Returns (T, N)."""
        return _beside([weight.matmul(x, bias) for weight, bias in self._parts])

    def of_codes(self, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        """The same of activations quantized as `input_codes` says. Returns (T, N) of dtype."""
        return _beside([weight.matmul(Codes(codes, scale, dtype), bias) for weight, bias in self._parts])

    def of(self, x: Tensor | None, codes: Tensor | None, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Of codes where there are some, else of values."""
        if codes is None or scale is None:
            assert x is not None, "activations come as values or as codes"
            return self(x)
        return self.of_codes(codes, scale, dtype)

    def grouped(self, x: Tensor, groups: Groups, gathered: bool) -> Tensor:
        """The product of rows with the weights of their experts, of a stack of experts; see
        `LowBitWeight.matmul`.

        x: (T, K) of the compute dtype, contiguous, if gathered, else (R, K). Returns (R, N of one expert).
        """
        (weight,) = self.operands
        return weight.matmul(x, None, groups, gathered)

    def of_codes_grouped(
        self, codes: Tensor, scale: Tensor, groups: Groups, gathered: bool, dtype: torch.dtype
    ) -> Tensor:
        """The same of activations quantized as `input_codes` says. Returns (R, N of one expert) of dtype."""
        (weight,) = self.operands
        return weight.matmul(Codes(codes, scale, dtype), None, groups, gathered)

    def multiplied(self) -> Iterator[tuple[tuple[str, ...], tuple[int, ...], LowBitWeight]]:
        """Each operand with the layers whose weights it holds, and their output features."""
        names, widths = self.stack.names, self.stack.widths
        if len(self.operands) == 1:
            yield names, widths, self.operands[0]
            return
        for name, width, operand in zip(names, widths, self.operands, strict=True):
            yield (name,), (width,), operand

    @cached_property
    def _parts(self) -> list[tuple[LowBitWeight, Tensor | None]]:
        if len(self.operands) == 1 or self.bias is None:
            return [(operand, self.bias) for operand in self.operands]
        return list(zip(self.operands, self.bias.split(self.stack.widths), strict=True))

    def arriving(self, dy: Tensor, backward: Backward) -> ArrivingGradient:
        """The gradient (T, N) of the product's output, from which those of its input and its weights are made."""
        return (ArrivingGradient if backward == "bf16" else ArrivingFP8)(self, dy)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """W_deq (N, K)."""
        weights = [weight.values(dtype) for weight in self.operands]
        return weights[0] if len(weights) == 1 else torch.cat(weights)

    def fp8_codes(self) -> tuple[Tensor, Tensor] | None:
        """e4m3 codes (N, K) and scales (N, 1), where that is what the weight is; see `Scheme.fp8_codes`."""
        return self.operands[0].fp8_codes() if len(self.operands) == 1 else None

    def inputs(self, x: Tensor, rounded: bool) -> Iterator[tuple[slice, Tensor]]:
        """What the products read of x (T, K), and the output features that come of it.

        rounded: x after the quantization of activations and back, which each operand has its own way to.
        """
        if not rounded:
            yield slice(0, self.stack.width), x
            return
        start = 0
        for _, widths, operand in self.multiplied():
            yield slice(start, start + sum(widths)), operand.rounded_input(x)
            start += sum(widths)


class ArrivingGradient:
    """dx = dy @ W_deq and dW = dy^T @ x as products of 16-bit operands with float32 sums."""

    def __init__(self, projection: Projection, dy: Tensor) -> None:
        self.projection, self.dy = projection, dy

    def of_input(self) -> Tensor:
        """dx: (T, K) of dy's dtype."""
        return input_grad(self.dy, self.projection.dequantized(self.dy.dtype))

    def add_of_weight(self, x: Tensor, rounded: bool) -> None:
        """Add dW to the gradients of the masters. x: (T, K) of dy's dtype; rounded: see `Projection.inputs`."""
        sums = gradient_of(self.projection.stack.masters)
        for features, read in self.projection.inputs(x, rounded):
            self._add_product(features, read, sums[features])

    def _add_product(self, features: slice, x: Tensor, into: Tensor) -> None:
        weight_grad(self.dy[:, features], x, into=into)


class ArrivingFP8(ArrivingGradient):
    """The same of FP8 operands, each quantized for its product (`qarl_kernels.fp8_backward`), dy once for both."""

    def __init__(self, projection: Projection, dy: Tensor) -> None:
        from qarl_kernels import fp8_backward

        super().__init__(projection, dy)
        self._weight = fp8_backward.transpose(*(projection.fp8_codes() or (projection.dequantized(dy.dtype),)))
        rows, columns = fp8_backward.quantize(dy, self._weight.factor)
        assert rows is not None and columns is not None, "both were asked for"
        self._rows, self._columns = rows, columns

    def of_input(self) -> Tensor:
        from qarl_kernels import fp8_backward

        return fp8_backward.input_grad_of(self._rows, self._weight, self.dy.dtype)

    def _add_product(self, features: slice, x: Tensor, into: Tensor) -> None:
        from qarl_kernels import fp8_backward

        columns = fp8_backward.Codes(self._columns.codes[features], self._columns.scale[features])
        fp8_backward.add_weight_grad_of(columns, x, into)


class InPlace:
    """Where gradients go whose backward adds them itself: the masters' `.grad` (see `qarl_kernels.backward.Sums`)."""

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
    grads = [master.grad for master in masters]
    if any(grad is None for grad in grads) or not adjacent([g for g in grads if g is not None]):
        rows = [len(master) for master in masters]
        whole = torch.zeros(sum(rows), *first.shape[1:], dtype=first.dtype, device=first.device)
        for master, part in zip(masters, whole.split(rows), strict=True):
            if master.grad is not None:
                part.copy_(master.grad)
            master.grad = part
    return concatenate_rows([master.grad for master in masters if master.grad is not None])
