"""Counts over the rows of weights that lie under one another."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def nonzero_counts(values: Tensor, widths: Sequence[int]) -> Tensor:
    """How many values are not 0 in each weight of a stack: int64 (len(widths),). values: (sum of widths, ...)."""
    if len(widths) == 1:
        return values.count_nonzero()[None]
    rows = values.flatten(1).count_nonzero(1)
    if len(set(widths)) == 1:
        return rows.view(len(widths), -1).sum(1)
    return torch.stack([part.sum() for part in rows.split(list(widths))])
