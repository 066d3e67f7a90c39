"""CUDA graphs of decodes: their sizes, inputs and capture.

One graph is captured per size: a number of rows (`graph_rows`) and a number of pages per row (`graph_pages`). The first
decode of a size runs without a graph, which compiles its kernels. The second one is captured, so a size that does not
recur costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from qarl_kernels.attention import PAGE
from qarl_kernels.flash.layout import CHUNK
from torch import Tensor


def graph_rows(count: int) -> int:
    """Return the rows of the smallest graph for `count` sequences.

    Sizes are 1, 2, 4, 8, and above 8 the multiples of max(8, p / 8), where p is the next power of two.
    """
    power = 1 << (count - 1).bit_length()
    step = max(8, power // 8)
    return power if count <= 8 else -(-count // step) * step


def graph_pages(longest: int) -> int:
    """Return the pages per row of the smallest graph for sequences of `longest` tokens.

    They cover a power of two of the key chunks (`CHUNK` tokens) that attention splits a sequence into.
    """
    return (1 << (-(-longest // CHUNK) - 1).bit_length()) * (CHUNK // PAGE)


class Graphs:
    """CUDA graphs by (rows, pages per row). Without CUDA, nothing is captured and the work runs directly.

    All graphs share one memory pool, because only one runs at a time and none returns a result in that memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._replays: dict[tuple[int, int], Callable[[], None] | None] = {}
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            with torch.cuda.device(device):
                self._pool: torch.cuda.MemPool | None = torch.cuda.MemPool()

    def run(self, key: tuple[int, int], work: Callable[[], None]) -> None:
        """Run `work`, whose kernel launches depend only on the key; from the second call per key on as a graph."""
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
            pool: Any = self._pool.id  # torch wants an opaque handle and documents this pair
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()
        return graph.replay

    def close(self) -> None:
        """Free the graphs and their memory. Nothing can be captured afterwards."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # an interrupted generation may have left a step running
        self._replays.clear()
        self._pool = None


@dataclass(frozen=True)
class Inputs:
    """Inputs of a decode: S rows, one per sequence; trailing rows may be padding.

    All tensors are views of one block, so that a single copy transfers them to the device. For `positions`, `slots`,
    `lengths` and `table` see `DecodeAttention`.
    """

    block: Tensor  # (N,) int64, the memory of all others
    host_tokens: Tensor  # (S,) int64, token ids that the host knows; the beginning of the block
    token_index: Tensor  # (S,) int64, index of each row's input token in `AsyncRunner._memory`
    positions: Tensor
    slots: Tensor
    points: Tensor  # (S,) float64, uniform random numbers that the next tokens are sampled with
    lengths: Tensor
    table: Tensor

    @classmethod
    def of(cls, block: Tensor, size: int, pages: int) -> Inputs:
        """Return views of a block for `size` rows, each view aligned to 16 bytes. pages: columns of the page table."""
        sizes = cls.sizes(size, pages)
        block = block[: sum(sizes)]
        host_tokens, token_index, positions, slots, points, lengths, table = block.split(sizes)
        return cls(
            block,
            host_tokens[:size],
            token_index[:size],
            positions[:size],
            slots[:size],
            points.view(torch.float64)[:size],
            lengths.view(torch.int32)[:size],
            table.view(torch.int32)[: size * pages].view(size, pages),
        )

    @staticmethod
    def sizes(size: int, pages: int) -> list[int]:
        """Return the number of 64-bit words of each tensor in the block, in the order of `of`."""
        narrow = (-(-size // 2), -(-size * pages // 2))
        return [-(-words // 2) * 2 for words in (size, size, size, size, size, *narrow)]
