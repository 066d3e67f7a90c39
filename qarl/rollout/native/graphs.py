"""CUDA graphs of decode steps: for which sizes there are some, and how they are made.

There is one for each of a ladder of numbers of rows, and for each power of two of attention's chunks of keys. A size
runs once as it is, which compiles its kernels, and is captured when it comes again: one that does not costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from qarl_kernels.attention import PAGE
from qarl_kernels.flash.layout import CHUNK

Key: TypeAlias = tuple[int, int]  # rows, and pages of each


def ladder(count: int) -> int:
    """Rows of the smallest graph for `count` sequences: powers of two, then four numbers from each to the next."""
    power = 1 << (count - 1).bit_length()
    step = max(8, power // 8)
    return power if count <= 8 else -(-count // step) * step


def chunks_of_pages(longest: int) -> int:
    """Pages of the smallest graph for sequences of `longest` tokens: those of a power of two of attention's chunks."""
    return (1 << (-(-longest // CHUNK) - 1).bit_length()) * (CHUNK // PAGE)


class Graphs:
    """Work that is the same every time for a key; without CUDA a graph is the work itself.

    The graphs share memory, as only one runs at a time and none leaves a result in it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._replays: dict[Key, Callable[[], None] | None] = {}
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            with torch.cuda.device(device):
                self._pool: torch.cuda.MemPool | None = torch.cuda.MemPool()

    def run(self, key: Key, work: Callable[[], None]) -> None:
        """Do `work`, whose launches depend on the key alone: as it is the first time, from then on as a graph."""
        if key not in self._replays:
            work()
            self._replays[key] = None
            return
        replay = self._replays[key]
        if replay is None:
            replay = self._replays[key] = self._captured(work)
        replay()

    def _captured(self, work: Callable[[], None]) -> Callable[[], None]:
        if self._device.type != "cuda":
            return work
        assert self._pool is not None, "no graph is made after `close`"
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool.id, capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()
        return graph.replay

    def close(self) -> None:
        """Give the graphs' memory back to the device."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # an interrupted generation may have left a step under way
        self._replays.clear()
        self._pool = None
