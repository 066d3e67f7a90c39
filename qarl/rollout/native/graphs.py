"""CUDA graphs of decode steps: their sizes, inputs and capture.

There is a graph per number of rows in a ladder and per power of two of attention's chunks of keys. A size first runs
without a graph, which compiles its kernels, and is captured the second time, so a size that does not recur costs
nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from qarl_kernels.attention import PAGE
from qarl_kernels.flash.layout import CHUNK
from torch import Tensor


def graph_rows(count: int) -> int:
    """Return the rows of the smallest graph for `count` sequences: powers of two, above 8 with sizes between them."""
    power = 1 << (count - 1).bit_length()
    step = max(8, power // 8)
    return power if count <= 8 else -(-count // step) * step


def graph_pages(longest: int) -> int:
    """Return the pages of the smallest graph for sequences of `longest` tokens: a power of two of key chunks."""
    return (1 << (-(-longest // CHUNK) - 1).bit_length()) * (CHUNK // PAGE)


class Graphs:
    """Graphs by key: rows, and pages of each. Without CUDA, the work runs as it is.

    The graphs share memory, because only one runs at a time and none leaves a result in it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._replays: dict[tuple[int, int], Callable[[], None] | None] = {}
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            with torch.cuda.device(device):
                self._pool: torch.cuda.MemPool | None = torch.cuda.MemPool()

    def run(self, key: tuple[int, int], work: Callable[[], None]) -> None:
        """Run `work`, whose launches depend on the key only; from the second time on as a graph."""
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
        assert self._pool is not None, "no graph is captured after `close`"
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
        """Free the memory of the graphs."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # an interrupted generation may have left a step running
        self._replays.clear()
        self._pool = None


@dataclass(frozen=True)
class Inputs:
    """Inputs of a decode step: S rows, one per sequence; trailing rows may be empty.

    All tensors are in one block of memory, so that one copy brings them to the device. For `positions`, `slots`,
    `lengths` and `table` see `DecodeAttention`.
    """

    block: Tensor  # (N,) int64, contains the others
    given: Tensor  # (S,) int64, tokens that the host knows; at the beginning of the block
    token: Tensor  # (S,) int64, index of the row's token in the memory that begins with the block
    positions: Tensor
    slots: Tensor
    points: Tensor  # (S,) float64, random numbers that decide the row's next token
    lengths: Tensor
    table: Tensor

    @classmethod
    def of(cls, block: Tensor, size: int, pages: int) -> Inputs:
        """Return views of a block, each at a multiple of 16 bytes. pages: columns of the page table."""
        sizes = cls.sizes(size, pages)
        block = block[: sum(sizes)]
        given, token, positions, slots, points, lengths, table = block.split(sizes)
        return cls(
            block,
            given[:size],
            token[:size],
            positions[:size],
            slots[:size],
            points.view(torch.float64)[:size],
            lengths.view(torch.int32)[:size],
            table.view(torch.int32)[: size * pages].view(size, pages),
        )

    @staticmethod
    def sizes(size: int, pages: int) -> list[int]:
        """Return the 64-bit words of each tensor in the block, in the order of `of`."""
        narrow = (-(-size // 2), -(-size * pages // 2))
        return [-(-words // 2) * 2 for words in (size, size, size, size, size, *narrow)]
