"""vLLM's sleep on a GPU that other processes use too: what of its memory is whose.

Importing this module does not import vLLM.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch

GREW = "Memory usage increased after sleeping"  # of vLLM's worker, 0.24 to 0.32


@contextmanager
def beside_others(worker: Any) -> Iterator[None]:
    """Inside, vLLM's worker falls asleep whatever other processes take of its GPU meanwhile.

    When it has given its memory back it compares what the whole GPU has free with what that was before, and fails where
    that is less; nothing is left to do then.
    """
    sleep = worker.sleep

    @wraps(sleep)
    def sleeping(*arguments: Any, **options: Any) -> None:
        try:
            sleep(*arguments, **options)
        except AssertionError as error:
            if GREW not in str(error):
                raise

    worker.sleep = sleeping
    try:
        yield
    finally:
        del worker.sleep


class Freed:
    """Bytes that a sleep gives back; made before it."""

    def __init__(self) -> None:
        from vllm.device_allocator.cumem import CuMemAllocator

        self._reserved = torch.cuda.memory_reserved()
        self._held = CuMemAllocator.get_instance().get_current_usage()  # weights and KV cache, all of which it unmaps

    def nbytes(self) -> int:
        """To be called after it: torch's cache is given back too."""
        return self._held + self._reserved - torch.cuda.memory_reserved()
