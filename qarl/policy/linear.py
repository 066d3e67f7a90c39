"""The quantized linear layer: a low-bit forward, and a straight-through backward into float32 masters.

    forward    y = x W^T + b      W: codes and scales, the tensors that the sampler multiplies
    backward   dx = dy W_deq      W_deq: the values that the codes stand for
               dW = dy^T x        added to the masters' gradients; scales get none

(QaRL, section 3.1.) Layers that read the same input are one packed linear, as in vLLM: q, k and v; gate and up; in a
mixture, gate and up of all experts. A row's bits do not depend on the other rows.

On a GPU Triton kernels multiply, and the layers (`layer`, `mlp`, `mixture`) call the backward (`OutputGradient`),
which adds to the masters' `.grad` in place. In plain torch autograd calls the backward, which returns the gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from qarl_formats.rows import adjacent, concatenate_rows
from qarl_formats.scheme import Codes, InputCodes
from qarl_formats.weight import LowBitWeight
from qarl_kernels import fp8_backward
from qarl_kernels.backward import input_grad, weight_grad
from qarl_kernels.groups import Groups
from qarl_kernels.moe.backward import grouped_input_grad, grouped_weight_grad
from qarl_kernels.token_sums import column_sum
from torch import Tensor, nn

Backward: TypeAlias = Literal["bf16", "fp8"]


def activations(
    values: Tensor | None, codes: Tensor | None, scale: Tensor | None, dtype: torch.dtype
) -> Tensor | Codes:
    """Return the input (T, K) of a product: the codes, with a scale per token, if there are any, else the values."""
    if codes is not None and scale is not None:
        return Codes(codes, scale, dtype)
    assert values is not None, "activations are values or codes"
    return values


class Part(NamedTuple):
    """Some layers of a packed linear, stored as one weight.

    Attributes:
        names: Module names of these layers.
        features: Their slice of the packed linear's output features.
        weight: (N, K), their weight.
        bias: (N,) in the compute dtype, or None.
    """

    names: tuple[str, ...]
    features: slice
    weight: LowBitWeight
    bias: Tensor | None


@dataclass(frozen=True, eq=False)
class PackedLinear:
    """Linear layers with the same input, and their masters; a `WeightSet` has their weights.

    Attributes:
        names: Module names in the order of their outputs.
        widths: Output features per module.
        masters: Weights, (width, K) float32 per module.
        biases: (width,) float32 per module, or empty.
        experts: Number of experts. Their modules follow each other, and a row is multiplied only with the weight of
            its expert. None: every row is multiplied with all weights.
        dequantize_input: Whether dW is computed from activations after quantization and dequantization
            (`quant.ste_input`).
    """

    names: tuple[str, ...]
    widths: tuple[int, ...]
    masters: tuple[nn.Parameter, ...]
    biases: tuple[nn.Parameter, ...]
    experts: int | None = None
    dequantize_input: bool = False

    def parts(self, weights: Sequence[LowBitWeight], bias: Tensor | None) -> tuple[Part, ...]:
        """Return the entry of a `WeightSet`. weights: One for all layers, or one per layer. bias: (N,), all layers."""
        if len(weights) == 1:
            return (Part(self.names, slice(0, sum(self.widths)), weights[0], bias),)
        stops = list(accumulate(self.widths))
        biases = [None] * len(stops) if bias is None else bias.split(self.widths)
        columns = zip(self.names, [0, *stops[:-1]], stops, weights, biases, strict=True)
        return tuple(Part((name,), slice(start, stop), weight, own) for name, start, stop, weight, own in columns)

    def input_codes(self, weights: WeightSet) -> InputCodes | None:
        """Return the kind of activation codes that the product reads, see `Scheme.input_codes`; None: values."""
        kinds = {part.weight.input_codes for part in weights.linears[self]}
        return kinds.pop() if len(kinds) == 1 else None

    def __call__(self, x: Tensor | Codes, weights: WeightSet) -> Tensor:
        """Return the product (T, N). x: (T, K) in the compute dtype, contiguous, or codes of the kind `input_codes`."""
        return self._multiply(x, weights, slice(None))

    def grouped(self, x: Tensor | Codes, weights: WeightSet, groups: Groups, gathered: bool) -> Tensor:
        """Multiply each row with the weight of its expert.

        Args:
            x: Contiguous values or codes: (T, K), one row per token, if `gathered`; else (R, K), sorted by expert.
            weights: Weights of the forward.
            groups: The R (token, expert) pairs, sorted by expert.
            gathered: Whether the product gathers the rows of x by token.

        Returns:
            (R, N), sorted by expert; N is the number of output features of one expert.
        """
        if weights.fused:
            (part,) = weights.linears[self]
            return part.weight.matmul(x, None, groups, gathered)
        assert isinstance(x, Tensor) and self.experts is not None
        tokens, counts = groups.order.long() // groups.slots, groups.starts.diff().tolist()
        rows = [x[its] for its in tokens.split(counts)] if gathered else x.split(counts)
        each = len(self.names) // self.experts
        return torch.cat([self._multiply(r, weights, slice(e * each, (e + 1) * each)) for e, r in enumerate(rows)])

    def _multiply(self, x: Tensor | Codes, weights: WeightSet, layers: slice) -> Tensor:
        """Multiply with some of the layers. In plain torch each layer is a part, so that autograd sees its master."""
        parts = weights.linears[self][layers]
        if weights.fused or not torch.is_grad_enabled():
            return _products(x, parts)
        return _StraightThrough.apply(x, parts, self.dequantize_input, *self.masters[layers], *self.biases[layers])


def _products(x: Tensor | Codes, parts: Sequence[Part]) -> Tensor:
    found = [part.weight.matmul(x, part.bias) for part in parts]
    return found[0] if len(found) == 1 else torch.cat(found, -1)


class _StraightThrough(torch.autograd.Function):
    """The product for autograd, with its straight-through backward. Each part has one layer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, parts: Sequence[Part], dequantize_input: bool, *masters: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.parts, ctx.dequantize_input = parts, dequantize_input
        return _products(x, parts)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        first = ctx.parts[0].features.start
        dx, weights, biases = None, [], []
        for number, part in reversed(list(enumerate(ctx.parts))):
            own = dy[:, part.features.start - first : part.features.stop - first].contiguous()
            if ctx.needs_input_grad[0]:
                its = input_grad(own, part.weight.values(x.dtype))
                dx = its if dx is None else dx + its  # last layer first, the order in which autograd adds
            if ctx.needs_input_grad[3 + number]:
                weights.append(weight_grad(own, part.weight.rounded_input(x) if ctx.dequantize_input else x))
            else:
                weights.append(None)
            if part.bias is not None:
                biases.append(own.float().sum(0))
        return dx, None, None, *reversed(weights), *reversed(biases)


class OutputGradient:
    """Backward of a fused packed linear: from dy to dx, and to the gradients of the masters.

    Args:
        linear: The packed linear.
        weights: Weights of the forward.
        dy: Output gradient, (R, N), contiguous.
        backward: "bf16" multiplies 16-bit operands with float32 sums; "fp8" quantizes both operands of each product
            (`qarl_kernels.fp8_backward`), dy once for both.
        groups: Rows per expert, for the experts of a mixture. Their products are always 16-bit.
    """

    def __init__(
        self, linear: PackedLinear, weights: WeightSet, dy: Tensor, backward: Backward, groups: Groups | None = None
    ) -> None:
        self.linear, self.parts, self.dy, self.groups = linear, weights.linears[linear], dy, groups
        self._fp8 = None
        if backward == "fp8" and groups is None:
            codes = self.parts[0].weight.fp8_codes() if len(self.parts) == 1 else None
            transposed = fp8_backward.transpose(*(codes or (self._values(),)))
            rows, columns = fp8_backward.quantize(dy, transposed.factor)
            assert rows is not None, "quantize returns rows and columns"
            self._fp8 = transposed, rows, columns

    def of_input(self) -> Tensor:
        """Return dx, (R, K) in dy's dtype."""
        if self.groups is not None:
            return grouped_input_grad(self.dy, self._values().to(self.dy.dtype), self.groups)
        if self._fp8 is None:
            return input_grad(self.dy, self._values())
        transposed, rows, _ = self._fp8
        return fp8_backward.input_grad_of(rows, transposed, self.dy.dtype)

    def add_to_masters(self, x: Tensor, gathered: bool = False) -> None:
        """Add the gradients of weights and biases to the masters' `.grad`.

        Args:
            x: Input of the forward in dy's dtype: (R, K), or (T, K) if `gathered`.
            gathered: See `PackedLinear.grouped`.
        """
        sums = gradient_of(self.linear.masters)
        for features, read in self._inputs(x):
            if self.groups is not None:
                grouped_weight_grad(self.dy, read, self.groups, gathered, sums)
            elif self._fp8 is None:
                weight_grad(self.dy[:, features], read, into=sums[features])
            else:
                columns = self._fp8[2]
                own = fp8_backward.Codes(columns.codes[features], columns.scale[features])
                fp8_backward.add_product(own, fp8_backward.columns_of(read), sums[features])
        if self.linear.biases:
            column_sum(self.dy, gradient_of(self.linear.biases))

    def _inputs(self, x: Tensor) -> list[tuple[slice, Tensor]]:
        if not self.linear.dequantize_input:
            return [(slice(None), x)]
        return [(part.features, part.weight.rounded_input(x)) for part in self.parts]

    def _values(self) -> Tensor:
        """W_deq (N, K)."""
        weights = [part.weight.values(self.dy.dtype) for part in self.parts]
        return weights[0] if len(weights) == 1 else torch.cat(weights)


@torch.no_grad()
def gradient_of(masters: Sequence[nn.Parameter]) -> Tensor:
    """Return the gradients of a packed linear's masters as one tensor, float32 (N, K) of the packed weight.

    Missing ones are allocated as zeros.

    It shares memory with their `.grad`, so adding to it adds to them.
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


def sum_of(master: Tensor) -> Tensor:
    """Return the gradient of one master, see `gradient_of`."""
    assert isinstance(master, nn.Parameter), "a master is a parameter"
    return gradient_of([master])


@dataclass(frozen=True)
class WeightSet:
    """All tensors of one version that a forward reads. Weight sets share tensors that are equal.

    Attributes:
        linears: Weights and biases of each packed linear: one part for all its layers, or one part per layer.
        values: All other parameters by name (norms, embedding, biases, output layer), in the compute dtype.
        head: (V, H), the output layer as `qarl_kernels.logprob.logits_of` reads it.
        fused: Whether the forward runs on Triton kernels; otherwise it runs in plain torch, with autograd.
        kv_fp8: Whether attention reads keys and values rounded to e4m3 (`quant.kv_cache_dtype`).
    """

    linears: Mapping[PackedLinear, tuple[Part, ...]]
    values: Mapping[str, Tensor]
    head: Tensor
    fused: bool = False
    kv_fp8: bool = False

    def cache_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of the KV cache of a forward in `dtype`; plain torch stores e4m3 values in `dtype`."""
        return torch.float8_e4m3fn if self.kv_fp8 and self.fused else dtype
