"""Concatenation along dim 0, as for the weights of a packed linear."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def adjacent(tensors: Sequence[Tensor]) -> bool:
    """Whether contiguous tensors follow each other in one piece of memory."""
    end = None
    for tensor in tensors:
        here = tensor.untyped_storage().data_ptr(), tensor.data_ptr()
        if not tensor.is_contiguous() or (end is not None and here != end):
            return False
        end = here[0], here[1] + tensor.nbytes
    return True


def concatenate_rows(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate contiguous tensors to (sum of rows, ...): a view if they are `adjacent`, otherwise a copy."""
    first = tensors[0]
    if len(tensors) == 1:
        return first
    if adjacent(tensors):
        return first.as_strided((sum(len(tensor) for tensor in tensors), *first.shape[1:]), first.stride())
    return torch.cat(list(tensors))


def nonzero_counts(values: Tensor, widths: Sequence[int]) -> Tensor:
    """Count nonzero values per weight: int64 (len(widths),). values: (sum of widths, ...), the concatenated weights."""
    if len(widths) == 1:
        return values.count_nonzero()[None]
    rows = values.flatten(1).count_nonzero(1)
    if len(set(widths)) == 1:
        return rows.view(len(widths), -1).sum(1)
    return torch.stack([part.sum() for part in rows.split(list(widths))])
