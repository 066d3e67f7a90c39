"""The quantized linear layer: a low-bit forward, a straight-through backward into the FP32 master weight.

    forward    y  = gemm(x, codes, scales)            the very tensors the sampler runs
    backward   dx = dy @ W_deq,  dW = dy^T @ x        W_deq from the codes; no gradient to scales

(formulas: "Quantization"; QaRL section 3.1).
"""

from __future__ import annotations

from typing import Any

import torch
from qarl_formats.weight import LowBitWeight
from qarl_kernels.backward import input_grad, weight_grad
from torch import Tensor, nn

from qarl.policy.view import Role


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        master: Tensor,
        bias_master: Tensor | None,
        bias: Tensor | None,
        weight: LowBitWeight,
        keep_dequantized_input: bool,
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.keep_dequantized_input = weight, keep_dequantized_input
        ctx.has_bias = bias_master is not None
        return weight.matmul(x, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        weight = ctx.weight
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = input_grad(grad, weight.values(x.dtype))
        if ctx.needs_input_grad[1]:
            if ctx.keep_dequantized_input:
                x = weight.rounded_input(x)
            grad_weight = weight_grad(grad, x)
        if ctx.has_bias:
            grad_bias = grad.float().sum(0)
        return grad_x, grad_weight, grad_bias, None, None, None


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
        weight, bias = view.operands[self.name], view.values.get(f"{self.name}.bias")
        rows = x.reshape(-1, self.in_features)
        if torch.is_grad_enabled():
            y = _StraightThrough.apply(rows, self.weight, self.bias, bias, weight, self.keep_dequantized_input)
        else:
            y = weight.matmul(rows, bias)
        return y.view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"{self.in_features} -> {self.out_features}, bias={self.bias is not None}"
