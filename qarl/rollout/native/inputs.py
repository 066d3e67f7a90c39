"""What a decode step reads, in one block of memory, so that one copy brings it to the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Inputs:
    """Of `size` rows, one a sequence, of which the last may be empty.

    block: (N,) int64, all of the others. given: (S,) int64, at its beginning, tokens that the host knows. token: (S,)
    int64, where the row's token is, in the memory that begins with the block. positions, slots, lengths, table: see
    `DecodeAttention`. points: (S,) float64, where the row's own next token is drawn.
    """

    block: Tensor
    given: Tensor
    token: Tensor
    positions: Tensor
    slots: Tensor
    points: Tensor
    lengths: Tensor
    table: Tensor

    @classmethod
    def of(cls, block: Tensor, size: int, pages: int) -> Inputs:
        """Parts of a block of `words` or more, each at a multiple of 16 bytes. pages: columns of the page table."""
        sizes = _words(size, pages)
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
    def words(size: int, pages: int) -> int:
        """Of a block."""
        return sum(_words(size, pages))


def _words(size: int, pages: int) -> list[int]:
    """64-bit words of each part, in the order of `Inputs.of`."""
    narrow = (-(-size // 2), -(-size * pages // 2))
    return [-(-words // 2) * 2 for words in (size, size, size, size, size, *narrow)]
