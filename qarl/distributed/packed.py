"""Packing rows of several tensors into one message per rank, and unpacking them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

FILLED = 1.25  # maximum size of messages that are padded to equal length, relative to their size without padding
_ALIGNED = 16  # bytes: alignment of a tensor's rows in a message
_WORD = 8  # bytes that are copied as one element, if all sizes are multiples of it


class _Runs(NamedTuple):
    """`number` runs of `length` bytes each, `step` apart, the first at `first`."""

    number: int
    length: int
    first: int
    step: int

    def whole_words(self, memory: Tensor) -> bool:
        """Whether all runs begin and end at multiples of 8 bytes in `memory`."""
        sizes = self.length, self.first, self.step, memory.storage_offset()
        return all(size % _WORD == 0 for size in sizes)

    def of(self, memory: Tensor, words: bool) -> Tensor:
        """View the runs as (number, elements per run). memory: flat uint8, viewed as int64 if `words`."""
        size = _WORD if words else 1
        if words:
            memory = memory[: len(memory) // size * size].view(torch.int64)
        start = memory.storage_offset() + self.first // size
        return memory.as_strided((self.number, self.length // size), (self.step // size, 1), start)


class Layout:
    """Layout of the ranks' messages.

    Args:
        cuts: For each tensor the rows that each rank has.
        widths: Bytes per row of each tensor.

    Attributes:
        sizes: Bytes of each rank's message.
        largest: The maximum of `sizes`.
        even: Whether all messages are padded to `largest`, so that a backend's all-gather works. False if the padding
            would be too large.
    """

    def __init__(self, cuts: Sequence[Sequence[range]], widths: Sequence[int]) -> None:
        self._cuts, self._widths = cuts, widths
        self._rows = list(zip(*([len(rows) for rows in cut] for cut in cuts), strict=True))  # by rank, of each tensor
        self._places = {rows: list(accumulate(map(_size, rows, widths), initial=0)) for rows in set(self._rows)}
        self.sizes = [self._places[rows][-1] for rows in self._rows]
        self.largest = max(self.sizes)
        self.even = self.largest * len(self.sizes) <= FILLED * sum(self.sizes)

    def pack(self, own: Sequence[Tensor], rank: int) -> Tensor:
        """Return a rank's message, flat uint8. It may alias `own`, the rank's contiguous rows of each tensor."""
        size = self.largest if self.even else self.sizes[rank]
        rows = [tensor.reshape(-1).view(torch.uint8) for tensor in own]
        if len(rows) == 1 and len(rows[0]) == size:
            return rows[0]
        *places, end = self._places[self._rows[rank]]
        message = own[0].new_empty(size, dtype=torch.uint8)
        if sum(map(len, rows)) == end:
            torch.cat(rows, out=message[:end])
        else:
            torch._foreach_copy_([message[at : at + len(one)] for at, one in zip(places, rows, strict=True)], rows)
        return message

    def unpack(self, messages: Tensor, outs: Sequence[Tensor]) -> None:
        """Copy all ranks' rows into the contiguous tensors. messages: messages of all ranks, concatenated."""
        memories = [out.reshape(-1).view(torch.uint8) for out in outs]
        into, found = [], []
        for which, place, source in self._copies():
            words = place.whole_words(memories[which]) and source.whole_words(messages)
            into.append(place.of(memories[which], words))
            found.append(source.of(messages, words))
        if into:
            torch._foreach_copy_(into, found)

    def _copies(self) -> Iterator[tuple[int, _Runs, _Runs]]:
        """Yield (tensor index, destination runs, source runs in the messages) for groups of ranks."""
        ranks = range(len(self.sizes))
        starts = [rank * self.largest for rank in ranks] if self.even else list(accumulate(self.sizes, initial=0))
        for rows, group in groupby(ranks, self._rows.__getitem__):  # ranks with the same layout
            some = list(group)
            between = starts[some[-1]] - starts[some[-2]] if len(some) > 1 else 0
            for which, (count, width, at) in enumerate(zip(rows, self._widths, self._places[rows], strict=False)):
                if not count * width:
                    continue
                firsts = [self._cuts[which][rank].start for rank in some]
                step = firsts[-1] - firsts[-2] if len(some) > 1 else 0
                heads = [(some[0], firsts[0], len(some))]
                if any(b - a != step for a, b in pairwise(firsts)):
                    heads = [(rank, first, 1) for rank, first in zip(some, firsts, strict=True)]
                for rank, first, together in heads:
                    into = _Runs(together, count * width, first * width, step * width)
                    yield which, into, _Runs(together, count * width, starts[rank] + at, between)


def _size(rows: int, width: int) -> int:
    """Return the bytes that rows of a tensor take in a message."""
    return -(-rows * width // _ALIGNED) * _ALIGNED
