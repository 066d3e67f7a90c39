"""Random choices of experts, and what a grouped product promises: the rows of an expert as if they were all."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from qarl_kernels.moe.dispatch import groups_of
from qarl_kernels.moe.groups import Groups
from torch import Tensor

EXPERTS = 5


def groups(tokens: int, device: torch.device) -> Groups:
    """Two experts a token: expert 1 is chosen by none, expert 3 by all."""
    generator = torch.Generator().manual_seed(tokens)
    others = torch.tensor([0, 2, 4])[torch.randint(0, 3, (tokens,), generator=generator)]
    chosen = torch.stack([others, torch.full((tokens,), 3)], 1).sort(1).values
    return groups_of(chosen.int().contiguous().to(device), EXPERTS)


def sources(given: Groups, gathered: bool) -> list[Tensor]:
    """For each expert: which rows of x its sorted rows read."""
    starts = given.starts.tolist()
    rows = given.order // given.slots if gathered else torch.arange(given.rows, device=given.order.device)
    return [rows[first:end].long() for first, end in pairwise(starts)]


def by_expert(given: Groups, gathered: bool, x: Tensor, product: Callable[[Tensor, int], Tensor]) -> Tensor:
    """What `product(rows of x, expert)` makes of each expert's rows by themselves, in sorted order."""
    return torch.cat([product(x[rows], expert) for expert, rows in enumerate(sources(given, gathered)) if len(rows)])
