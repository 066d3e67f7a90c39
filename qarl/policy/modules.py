"""Row-invariant stand-ins for a Hugging Face model's norms, activation, rotary table and embedding.

Each keeps the module's parameters under their own names as float32 masters, and computes on the published values in
the compute dtype; gradients pass straight through the rounding.
"""

from __future__ import annotations

import torch
from qarl_kernels import pointwise
from torch import Tensor, nn

from qarl.errors import UserError


class _RoundedParameter(torch.autograd.Function):
    """The published value in the forward, the master in the backward."""

    @staticmethod
    def forward(ctx, master, value):
        return value.view_as(value)

    @staticmethod
    def backward(ctx, grad):
        return grad.float(), None


class RMSNorm(nn.Module):
    """`qarl_kernels.pointwise.rms_norm` with a float32 master weight (H,)."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.weight = norm.weight
        self.eps = float(norm.variance_epsilon)
        self.value: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        weight = _RoundedParameter.apply(self.weight, self.value) if torch.is_grad_enabled() else self.value
        return pointwise.rms_norm(x.contiguous(), weight, self.eps)


class SiLU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return pointwise.silu(x.contiguous())


class RotaryTable(nn.Module):
    """cos and sin of every position, computed once, so that a position's values never depend on the batch."""

    def __init__(self, rotary: nn.Module, positions: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        x = torch.empty(1, dtype=dtype, device=device)
        cos, sin = rotary.to(device)(x, torch.arange(positions, device=device)[None])
        self.register_buffer("cos", cos[0].contiguous(), persistent=False)
        self.register_buffer("sin", sin[0].contiguous(), persistent=False)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        return self.cos[position_ids], self.sin[position_ids]


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx, ids, master, value):
        ctx.save_for_backward(ids)
        ctx.shape = master.shape
        return value[ids]

    @staticmethod
    def backward(ctx, grad):
        (ids,) = ctx.saved_tensors
        wide = grad.float().reshape(-1, grad.shape[-1])
        return None, torch.ops.aten.embedding_dense_backward(wide, ids.reshape(-1), ctx.shape[0], -1, False), None


class Embedding(nn.Module):
    """Token embedding: published values (V, H) in the compute dtype, float32 gradient to the master."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.weight = embedding.weight
        self.value: Tensor | None = None

    def forward(self, ids: Tensor) -> Tensor:
        return _Lookup.apply(ids, self.weight, self.value) if torch.is_grad_enabled() else self.value[ids]


def replace_modules(model: nn.Module, positions: int, dtype: torch.dtype, device: torch.device) -> None:
    """Put the stand-ins in place, in `model`, and prove each norm's on random input.

    Raises UserError naming the module when the model has a parameter outside what qarl can run exactly.
    """
    for name, module in list(model.named_modules()):
        parent, _, leaf = name.rpartition(".")
        owner = model.get_submodule(parent)
        kind = type(module).__name__
        if kind.endswith("RMSNorm") and hasattr(module, "variance_epsilon"):
            norm = RMSNorm(module)
            _prove_norm(name, module, norm)
            setattr(owner, leaf, norm)
        elif isinstance(module, nn.Embedding):
            setattr(owner, leaf, Embedding(module))
        elif isinstance(module, nn.SiLU) or kind == "SiLUActivation":
            setattr(owner, leaf, SiLU())
        elif leaf == "rotary_emb":
            if module.rope_type in ("dynamic", "longrope"):
                raise UserError(f"model.path: rope type '{module.rope_type}' changes with sequence length, which no "
                                "batch-invariant forward can follow; use a model with default, linear, llama3 or yarn")  # fmt: skip
            setattr(owner, leaf, RotaryTable(module, positions, dtype, device))


def _prove_norm(name: str, original: nn.Module, norm: RMSNorm) -> None:
    x = torch.randn(3, original.weight.shape[-1], generator=torch.Generator().manual_seed(0))
    norm.value = norm.weight.detach()
    with torch.no_grad():
        if not torch.allclose(original(x), norm(x), rtol=1e-5, atol=1e-6):
            raise UserError(f"model.path: {name} ({type(original).__name__}) is not a Llama-style RMSNorm; supported "
                            "families are Llama, Mistral, Qwen2 and Qwen3")  # fmt: skip
