"""Row-invariant stand-ins for a Hugging Face model's norms, activation, rotary table and embedding.

Each keeps the module's parameters under their own names as float32 masters, and computes on the values of the role's
view, in its compute dtype; gradients pass straight through the rounding.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from qarl_kernels import pointwise
from torch import Tensor, nn
from transformers import PreTrainedConfig

from qarl.config.architecture import FAMILIES
from qarl.config.model_fields import check_implemented, check_refused
from qarl.errors import UserError
from qarl.policy.experts import Router
from qarl.policy.view import Role, View

HFModule: TypeAlias = Any  # of Hugging Face, whose attributes no checker knows


class RMSNorm(nn.Module):
    """`qarl_kernels.pointwise.rms_norm` with a float32 master weight (H,). name: the module's."""

    def __init__(self, norm: HFModule, name: str, role: Role) -> None:
        super().__init__()
        self.weight: nn.Parameter = norm.weight
        self.eps = float(norm.variance_epsilon)
        self.parameter, self.role = f"{name}.weight", role

    def forward(self, x: Tensor) -> Tensor:
        return pointwise.rms_norm(x.contiguous(), self.weight, self.role.view.values[self.parameter], self.eps)


class SiLU(nn.Module):
    """`qarl_kernels.pointwise.silu` as a module."""

    def forward(self, x: Tensor) -> Tensor:
        return pointwise.silu(x.contiguous())


class RotaryTable(nn.Module):
    """cos and sin of every position, computed once, so that a position's values never depend on the batch.

    tables: for each compute dtype cos and sin, (positions, D) of that dtype, computed in float32 by the model's own
    module and rounded once.
    """

    def __init__(self, rotary: HFModule, positions: int, dtypes: set[torch.dtype], device: torch.device) -> None:
        super().__init__()
        rotary, order = rotary.to(device), torch.arange(positions, device=device)[None]
        self.tables: dict[torch.dtype, tuple[Tensor, Tensor]] = {}
        for dtype in dtypes:
            cos, sin = rotary(torch.empty(1, dtype=dtype, device=device), order)
            self.tables[dtype] = cos[0].contiguous(), sin[0].contiguous()

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self.tables[x.dtype]
        return cos[position_ids], sin[position_ids]


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, master: Tensor, value: Tensor, padding_id: int) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.rows, ctx.padding_id = master.shape[0], padding_id
        return value[ids]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (ids,) = ctx.saved_tensors
        wide = grad.float().reshape(-1, grad.shape[-1])
        summed = torch.ops.aten.embedding_dense_backward(wide, ids.reshape(-1), ctx.rows, ctx.padding_id, False)
        return None, summed, None, None


class Embedding(nn.Module):
    """Token embedding: values (V, H) in the compute dtype, float32 gradient to the master. name: the module's.

    The padding token gets no gradient from its look-ups, as in `nn.Embedding`. Its row may be all zeros, and a norm's
    gradient at a zero row is 1 / sqrt(eps) = 1000 times too large to be of use.
    """

    def __init__(self, embedding: nn.Embedding, name: str, role: Role) -> None:
        super().__init__()
        self.weight = embedding.weight
        self.padding_id = -1 if embedding.padding_idx is None else embedding.padding_idx
        self.parameter, self.role = f"{name}.weight", role

    def forward(self, ids: Tensor) -> Tensor:
        return _Lookup.apply(ids, self.weight, self.role.view.values[self.parameter], self.padding_id)


def check_family(config: PreTrainedConfig) -> None:
    """Raise UserError unless the policy implements every operation of the model.

    A family outside the list may scale or cap its scores or logits, which neither the attention nor the output layer
    of the policy does. config: of transformers, which may come from a GGUF header instead of a config.json.
    """
    if config.model_type not in FAMILIES:
        raise UserError(
            f"model.path: model type '{config.model_type}' is not supported; use one of {', '.join(FAMILIES)}"
        )
    values = config.to_dict()
    try:
        check_refused(config.model_type, values)
        check_implemented(config.model_type, values)
    except ValueError as error:
        raise UserError(f"model.path: the configuration {error}") from None


def replace_modules(
    model: nn.Module, role: Role, positions: int, dtypes: set[torch.dtype], device: torch.device
) -> None:
    """Put the stand-ins in place, in `model`, and prove each norm's on random input.

    positions: rows of the rotary tables. dtypes: in which views compute. Raises UserError for a norm of another kind.
    """
    modules = dict(model.named_modules())
    for name, module in modules.items():
        parent, _, leaf = name.rpartition(".")
        owner = modules[parent]
        kind = type(module).__name__
        if kind.endswith("RMSNorm") and hasattr(module, "variance_epsilon"):
            _prove_norm(name, module)
            setattr(owner, leaf, RMSNorm(module, name, role))
        elif isinstance(module, nn.Embedding):
            setattr(owner, leaf, Embedding(module, name, role))
        elif isinstance(module, nn.SiLU) or kind == "SiLUActivation":
            setattr(owner, leaf, SiLU())
        elif isinstance(module, Router):
            module.role = role
        elif leaf == "rotary_emb":
            setattr(owner, leaf, RotaryTable(module, positions, dtypes, device))


def _prove_norm(name: str, original: HFModule) -> None:
    weight = original.weight.detach()
    x = torch.randn(3, weight.shape[-1], generator=torch.Generator().manual_seed(0)).to(weight.device)
    norm = RMSNorm(original, name, Role(View({}, {f"{name}.weight": weight}, weight)))
    with torch.no_grad():
        if not torch.allclose(original(x), norm(x), rtol=1e-5, atol=1e-6, equal_nan=True):
            raise UserError(
                f"model.path: {name} ({type(original).__name__}) is not a Llama-style RMSNorm; "
                f"use a model of {', '.join(FAMILIES)}"
            )
