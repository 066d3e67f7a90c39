"""The quantized linear layer: a low-bit forward, a straight-through backward into the FP32 master weight.

    forward    y  = gemm(x, codes, scales)            the very tensors the sampler runs
    backward   dx = dy @ W_deq,  dW = dy^T @ x        W_deq from the codes; no gradient to scales

(formulas: "Quantization"; QaRL section 3.1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from qarl_formats.quantize import QuantizedWeight, dequantize_weight, unpack_codes
from qarl_kernels import reference
from qarl_kernels.activation import quantize_activation_fp8, quantize_activation_int8
from qarl_kernels.backward import input_grad, weight_grad
from torch import Tensor, nn

from qarl.policy.view import Role

if TYPE_CHECKING:
    from qarl.policy.kernel_operand import KernelOperand

Product = Literal["dense", "plain", "w8a8", "fp8", "w4a8"]


@dataclass(frozen=True)
class Operand:
    """The weight side of one product in plain torch, as the product reads it. Its twin on a GPU is `KernelOperand`.

    product: `dense` is the batch-invariant product of model.dtype operands; `plain` the framework's ordinary GEMM;
    the others the low-bit products of `qarl_kernels.reference`.
    weight: (N, K), values or codes, float32 on the CPU. scale: (N, 1) or (N, groups), None for dense and plain.
    activation: activation quantization that `plain` imitates (quantize, dequantize), for QAT.
    source: the published tensors that `weight` was made from; None for a full-precision learner.
    """

    product: Product
    weight: Tensor
    scale: Tensor | None = None
    activation: Literal["int8", "fp8"] | None = None
    source: QuantizedWeight | Tensor | None = None

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x: (M, K) of the compute dtype; bias: (N,) or None. Returns (M, N) of x's dtype."""
        if self.product == "dense":
            return reference.dense(x, self.weight, bias)
        if self.product == "plain":
            wide = dequantized_input(x, self.activation).to(self.weight.dtype)
            return nn.functional.linear(wide, self.weight, None if bias is None else bias.to(wide.dtype)).to(x.dtype)
        return getattr(reference, self.product)(x, self.weight, self.scale, bias)

    def held(self) -> dict[str, Tensor]:
        """The published tensors of a quantized weight that this operand was made from, by compressed-tensors suffix."""
        assert isinstance(self.source, QuantizedWeight)
        return self.source.tensors

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """W_deq (N, K): code * scale rounded to `dtype`, held in the operand's own storage dtype."""
        if self.scale is None:
            return self.weight
        groups = self.scale.shape[1]
        n, k = self.weight.shape
        wide = self.weight.view(n, groups, k // groups) * self.scale.float()[..., None]
        return wide.view(n, k).to(dtype).to(self.weight.dtype)


def dequantized_input(x: Tensor, activation: Literal["int8", "fp8"] | None) -> Tensor:
    """x after its per-token quantization and back, in x's dtype; x itself where activations are not quantized."""
    if activation is None:
        return x
    codes, scale = (quantize_activation_int8 if activation == "int8" else quantize_activation_fp8)(x)
    return (codes.float() * scale).to(x.dtype)


def operand_of(weight: QuantizedWeight | Tensor, dtype: torch.dtype, kernels: bool = False) -> Operand | KernelOperand:
    """The aligned operand: the product the sampler runs on these tensors.

    weight: codes and scales, or (N, K); kernels: multiply with Triton (`qarl.policy.kernels.use_kernels`).
    """
    if kernels:
        from qarl.policy.kernel_operand import kernel_operand  # imports Triton, which the CPU does not need

        return kernel_operand(weight, dtype)
    if isinstance(weight, Tensor):
        return Operand("dense", _storage(weight), source=weight)
    scheme = weight.scheme
    if scheme.activation is None:
        return Operand("dense", _storage(dequantize_weight(weight, dtype)), source=weight)
    codes, scale = unpack_codes(weight).float(), weight.tensors["weight_scale"]
    return Operand(scheme.name, codes, scale, scheme.activation, weight)  # type: ignore[arg-type]


def fake_quant_operand(weight: QuantizedWeight, dtype: torch.dtype) -> Operand:
    """QAT: weights and activations quantized and dequantized, the product an ordinary full-precision GEMM."""
    return Operand("plain", _storage(dequantize_weight(weight, dtype)), None, weight.scheme.activation, weight)


def full_precision_operand(master: Tensor, dtype: torch.dtype) -> Operand:
    """The learner of quantized-rollout training: the master rounded to the compute dtype, an ordinary GEMM."""
    return Operand("plain", _storage(master.detach().to(dtype, copy=True)))


def _storage(weight: Tensor) -> Tensor:
    """CPUs multiply in float32 (see `qarl_kernels.reference`); GPUs in the compute dtype."""
    return weight.float() if weight.device.type == "cpu" else weight


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, master, bias_master, bias, operand, keep_dequantized_input):
        ctx.save_for_backward(x)
        ctx.operand, ctx.keep_dequantized_input = operand, keep_dequantized_input
        ctx.has_bias = bias_master is not None
        return operand(x, bias)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        operand = ctx.operand
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = input_grad(grad, operand.dequantized(x.dtype))
        if ctx.needs_input_grad[1]:
            if ctx.keep_dequantized_input:
                x = dequantized_input(x, operand.activation)
            grad_weight = weight_grad(grad, x, _open_gradient(ctx.next_functions[1][0]))
        if ctx.has_bias:
            grad_bias = grad.float().sum(0)
        return grad_x, grad_weight, grad_bias, None, None, None


def _open_gradient(node: Any) -> Tensor | None:
    """The gradient that a master holds already, where the next may be added to it at once; else None.

    From the second micro batch on, this saves a float32 matrix of the weight's size and a pass over two of them. It
    goes behind autograd's back, so only where nobody would see the difference: the master is a leaf with a plain
    float32 gradient, no hook waits for what arrives, no graph of the backward is made, and the gradient goes into
    `.grad` (and is not what `torch.autograd.grad` returns). Hooks on the node itself cannot be seen from here:
    wrappers that put one there (DistributedDataParallel) are not used.

    node: what the graph sends the master's gradient to.
    """
    if torch.is_grad_enabled() or type(node).__name__ != "AccumulateGrad":
        return None
    master = node.variable
    into = master.grad
    if into is None or into.layout != torch.strided or into.dtype != torch.float32 or not into.is_contiguous():
        return None
    if into.shape != master.shape or master._backward_hooks or master._post_accumulate_grad_hooks:
        return None
    try:
        return into if torch._C._will_engine_execute_node(node) else None
    except RuntimeError:  # torch's way of saying that `torch.autograd.grad` was asked for this gradient
        return None


class QuantLinear(nn.Module):
    """Drop-in for `nn.Linear`: float32 masters under the same names, products on the operand of the role's view.

    name: the module's, under which views hold its operand and, as `<name>.bias`, its bias in the compute dtype.
    """

    def __init__(self, linear: nn.Linear, name: str, role: Role, keep_dequantized_input: bool) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.name, self.role, self.keep_dequantized_input = name, role, keep_dequantized_input

    def forward(self, x: Tensor) -> Tensor:
        view = self.role.view
        operand, bias = view.operands[self.name], view.values.get(f"{self.name}.bias")
        rows = x.reshape(-1, self.in_features)
        if torch.is_grad_enabled():
            y = _StraightThrough.apply(rows, self.weight, self.bias, bias, operand, self.keep_dequantized_input)
        else:
            y = operand(rows, bias)
        return y.view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"{self.in_features} -> {self.out_features}, bias={self.bias is not None}"
