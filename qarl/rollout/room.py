"""Whether a sampler that sleeps on learners' GPUs may wake beside them already."""

from __future__ import annotations

from collections.abc import Callable

import torch

from qarl.distributed.ranks import Ranks

Room = Callable[[int | None], bool]
"""Whether there are so many bytes on each of a sampler's GPUs; None: it does not ask, and gets False."""


def own_room(device: torch.device) -> Room:
    """Of a sampler on one learner's GPU."""
    return lambda needed: needed is not None and has_room(device, needed)


def ranks_room(device: torch.device, ranks: Ranks, size: int) -> Room:
    """Of samplers that are each on the GPUs of `size` ranks, of which the first asks; a collective of all ranks."""

    def room(needed: int | None) -> bool:
        first = ranks.rank - ranks.rank % size
        asked = ranks.gather(needed)[first]
        there = ranks.gather(asked is not None and has_room(device, asked))
        return needed is not None and all(there[first : first + size])

    return room


def has_room(device: torch.device, needed: int) -> bool:
    """Whether so many bytes of a GPU are free once torch's cache of this process is given back, which it is unless that
    cannot be enough."""
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if torch.cuda.mem_get_info(device)[0] + cached < needed:
        return False
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0] >= needed
