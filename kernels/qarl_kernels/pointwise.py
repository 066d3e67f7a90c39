"""Row-wise operations in plain torch whose bits do not depend on the rest of the batch.

torch's vectorized loops process the last elements of a chunk with scalar code, and where a chunk ends depends on the
batch size. Add, multiply, divide and square root round the same in both; transcendental functions may not (measured:
`torch.nn.functional.silu` in float32). `torch.exp` masks its last vector and is safe, so it is the only one used.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qarl_kernels.activation import FP8_MAX


class _SiLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        wide = x.float()
        return wide.neg().exp_().add_(1.0).reciprocal_().mul_(wide).to(x.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grad.float(), x.float()).to(x.dtype)


def silu(x: Tensor) -> Tensor:
    """Return x / (1 + exp(-x)), computed in float32 and rounded once to x's dtype. x: any shape, contiguous."""
    return _SiLU.apply(x)


class _RMSNorm(torch.autograd.Function):
    """Saves x and one number per row for the backward, not the float32 intermediates."""

    @staticmethod
    def forward(ctx, x: Tensor, master: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        inverse = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, inverse)
        return weight * (wide * inverse).to(x.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        x, weight, inverse = ctx.saved_tensors
        normed = x.float() * inverse
        wide = grad.float()
        grad_master = (wide * normed).flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        scaled = wide.mul_(weight) if wide is not grad else wide * weight
        grad_x = scaled.sub(normed * (scaled * normed).mean(-1, keepdim=True)).mul_(inverse)
        return grad_x.to(x.dtype), grad_master, None, None


def rms_norm(x: Tensor, master: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """Return weight * round(x / sqrt(mean(x^2) + eps)), with a float32 mean over the last axis (as Llama and Qwen).

    Args:
        x: (..., H), contiguous.
        master: (H,) float32 parameter that receives the weight's gradient, or None.
        weight: (H,) of x's dtype, the values that the forward uses.
        eps: Added to the mean square.
    """
    return _RMSNorm.apply(x, master, weight, eps)


class _RoundE4M3(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.float().clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).to(x.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad


def round_e4m3(x: Tensor) -> Tensor:
    """Round x (bf16, fp16 or float32, any shape) to e4m3, saturated to +-448, in x's dtype; straight-through gradient.

    NaN stays NaN.
    """
    return _RoundE4M3.apply(x)
