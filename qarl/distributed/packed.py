"""Rows of several tensors in one message of each rank: how they stand in it, and how they come into their places."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

FILLED = 1.25  # times the bytes of their rows that messages may have together to be of one length
_ALIGNED = 16  # bytes: where a tensor's rows begin in a message
_WORD = 8  # bytes that are copied as one element, where everything is a multiple of them


class _Runs(NamedTuple):
    """`number` runs of `length` bytes each, `step` apart, the first at `first`."""

    number: int
    length: int
    first: int
    step: int

    def whole_words(self, memory: Tensor) -> bool:
        sizes = self.length, self.first, self.step, memory.storage_offset()
        return all(size % _WORD == 0 for size in sizes)

    def of(self, memory: Tensor, words: bool) -> Tensor:
        """(number, elements of a run). memory: flat uint8, of which words are taken as int64."""
        size = _WORD if words else 1
        if words:
            memory = memory[: len(memory) // size * size].view(torch.int64)
        start = memory.storage_offset() + self.first // size
        return memory.as_strided((self.number, self.length // size), (self.step // size, 1), start)


class Layout:
    """cuts: for each tensor the rows of it that each rank has. widths: bytes of a row of each tensor.

    sizes: bytes of each rank's message. largest: of them. even: whether all are made as long as that, so that a backend
    can gather them; not where much would be filled up.
    """

    def __init__(self, cuts: Sequence[Sequence[range]], widths: Sequence[int]) -> None:
        self._cuts, self._widths = cuts, widths
        self._rows = list(zip(*([len(rows) for rows in cut] for cut in cuts), strict=True))  # by rank, of each tensor
        self._places = {rows: list(accumulate(map(_size, rows, widths), initial=0)) for rows in set(self._rows)}
        self.sizes = [self._places[rows][-1] for rows in self._rows]
        self.largest = max(self.sizes)
        self.even = self.largest * len(self.sizes) <= FILLED * sum(self.sizes)

    def pack(self, own: Sequence[Tensor], rank: int) -> Tensor:
        """The message of a rank, flat uint8; maybe memory of `own`, which is its rows of each tensor, contiguous."""
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
        """Put all ranks' rows into the tensors, contiguous. messages: of all ranks, one after the other."""
        memories = [out.reshape(-1).view(torch.uint8) for out in outs]
        into, found = [], []
        for which, place, source in self._copies():
            words = place.whole_words(memories[which]) and source.whole_words(messages)
            into.append(place.of(memories[which], words))
            found.append(source.of(messages, words))
        if into:
            torch._foreach_copy_(into, found)

    def _copies(self) -> Iterator[tuple[int, _Runs, _Runs]]:
        """(which tensor, where rows of some ranks go in it, where they are in the messages)."""
        ranks = range(len(self.sizes))
        starts = [rank * self.largest for rank in ranks] if self.even else list(accumulate(self.sizes, initial=0))
        for rows, group in groupby(ranks, self._rows.__getitem__):  # ranks whose messages are alike
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
    """Bytes that rows of a tensor take in a message."""
    return -(-rows * width // _ALIGNED) * _ALIGNED
