"""Weights that one product multiplies: those of several layers under one another, and the layers' own again.

Rows of a weight are quantized by themselves (what they share, as a scale of nvfp4a16, is computed for all of them
together), so a stack's stored tensors are the layers' under one another, and each layer's are a slice of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from qarl_formats.quantize import QuantizedWeight
from qarl_formats.scheme import Scheme

Form: TypeAlias = QuantizedWeight | Tensor  # codes and scales, or the values of an unquantized layer


@dataclass(frozen=True)
class Stacked:
    """Weights that lie under one another in memory. whole: all of them as one; members: each, in the same memory."""

    whole: Form
    members: list[Form]


def rows_of(scheme: Scheme, suffix: str) -> int | None:
    """Output features for each row of a stored tensor; None: it has no rows, and is the same for all of a stack."""
    if suffix in ("weight_shape", "weight_global_scale"):
        return None
    return {"weight_scale": scheme.row_block, "weight_zero_point": 8}.get(suffix, 1)


def stackable(scheme: Scheme, widths: Sequence[int]) -> bool:
    """Whether weights of so many output features, one under the other, keep their stored tensors to the bit."""
    unit = max(scheme.row_block if scheme.quantized else 1, 1 if scheme.symmetric else 8)
    return all(width % unit == 0 for width in widths[:-1])


@torch.no_grad()
def stack(weights: Sequence[Form]) -> Form:
    """One weight of all rows, in order. All of one scheme (or none), input features and dtype, and `stackable`.

    Tensors that lie under one another in memory already, as `slices` gives them, are not copied.
    """
    first = weights[0]
    if isinstance(first, Tensor):
        return under_one_another([weight for weight in weights if isinstance(weight, Tensor)])
    shape = sum(weight.shape[0] for weight in weights), first.shape[1]
    tensors = {}
    for suffix, tensor in first.tensors.items():
        if rows_of(first.scheme, suffix) is not None:
            members = [weight.tensors[suffix] for weight in weights if isinstance(weight, QuantizedWeight)]
            tensors[suffix] = under_one_another(members)
        else:
            tensors[suffix] = torch.tensor(shape) if suffix == "weight_shape" else tensor
    return QuantizedWeight(first.scheme, tensors, shape)


def slices(weight: Form, widths: Sequence[int]) -> list[Form]:
    """The weights of a stack, which share its memory. widths: their output features, in order."""
    if isinstance(weight, Tensor):
        return list(weight.split(list(widths)))
    parts: list[dict[str, Tensor]] = [{} for _ in widths]
    for suffix, tensor in weight.tensors.items():
        rows = rows_of(weight.scheme, suffix)
        if suffix == "weight_shape":
            own = list(torch.tensor([(width, weight.shape[1]) for width in widths]))
        else:
            own = [tensor] * len(widths) if rows is None else tensor.split([-(-width // rows) for width in widths])
        for part, its in zip(parts, own, strict=True):
            part[suffix] = its
    return [
        QuantizedWeight(weight.scheme, part, (width, weight.shape[1]))
        for part, width in zip(parts, widths, strict=True)
    ]


def tensors_of(scheme: Scheme, tensors: dict[str, Tensor], start: int, width: int) -> dict[str, Tensor]:
    """The stored tensors of `width` output features of a stack, from feature `start` on."""
    found = {}
    for suffix, tensor in tensors.items():
        rows = rows_of(scheme, suffix)
        if suffix == "weight_shape":
            found[suffix] = torch.tensor((width, int(tensor[1])))
        else:
            found[suffix] = tensor if rows is None else tensor[start // rows : -(-(start + width) // rows)]
    return found


def under_one_another(tensors: Sequence[Tensor]) -> Tensor:
    """Contiguous tensors as one, (sum of rows, ...): the memory itself where they follow each other in it."""
    first = tensors[0]
    if len(tensors) == 1:
        return first
    shape = sum(len(tensor) for tensor in tensors), *first.shape[1:]
    if adjacent(tensors):
        return first.as_strided(shape, first.stride())
    return torch.cat(list(tensors))


def adjacent(tensors: Sequence[Tensor]) -> bool:
    """Whether contiguous tensors follow each other in one piece of memory."""
    end = None
    for tensor in tensors:
        here = tensor.untyped_storage().data_ptr(), tensor.data_ptr()
        if not tensor.is_contiguous() or (end is not None and here != end):
            return False
        end = here[0], here[1] + tensor.nbytes
    return True
