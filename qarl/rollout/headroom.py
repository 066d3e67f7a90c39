"""Memory headroom: whether a sampler that sleeps on learners' GPUs may wake next to them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from qarl.distributed.ranks import Ranks

Headroom = Callable[[int | None], bool]
"""Tells whether each GPU of a sampler has so many free bytes. None, from a sampler that does not ask, gives False."""


def own_headroom(device: torch.device) -> Headroom:
    """Headroom for a sampler on one learner's GPU."""
    return lambda needed: needed is not None and has_headroom(device, needed)


def ranks_headroom(device: torch.device, ranks: Ranks, size: int) -> Headroom:
    """Headroom for samplers that span the GPUs of `size` ranks. The first of them asks; all ranks take part."""

    def headroom(needed: int | None) -> bool:
        first = ranks.rank - ranks.rank % size
        asked = ranks.gather(needed)[first]
        there = ranks.gather(asked is not None and has_headroom(device, asked))
        return needed is not None and all(there[first : first + size])

    return headroom


def has_headroom(device: torch.device, needed: int) -> bool:
    """Return whether so many bytes of a GPU are free, after emptying torch's cache if that can be enough."""
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if torch.cuda.mem_get_info(device)[0] + cached < needed:
        return False
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0] >= needed
