"""Positions of the tokens of a packed batch with shared prompts, as tables for the attention kernels.

A group is a prompt followed by its continuations, contiguous rows in that order; the prompt is stored once. A token of
a continuation attends to its prompt's rows and to its own, so positions of continuations start at the prompt's length.
This keeps the kernels simple: the keys of a row are two contiguous ranges of rows, and the queries that see a key are
one, from the key's own row to the end of the group (prompt) or of the continuation.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from qarl_kernels.integers import next_power_of_2

BLOCK = 64  # keys per step of the online softmax, aligned to absolute position
CHUNK = 1024  # keys summed from zero before they are merged, aligned to absolute position; a multiple of BLOCK
TILE = 128  # query or key rows per table entry; a kernel's own tile divides it
ITEM_ROWS = 4096  # query rows per work item of the key gradient, because any number of rows may see a shared prompt


def padded(dim: int) -> int:
    """Return the head size that kernels use: a power of two, at least 64."""
    return max(64, next_power_of_2(dim))


@dataclass(frozen=True)
class QueryTiles:
    """Tiles of query rows.

    Attributes:
        tokens: T, rows of the batch.
        queries: (n, 6) int32, one line per tile: first row, number of rows, position of the first row, and three
            columns that locate its keys. The tiles that see the most keys come first.
        long_tiles: The first so many tiles see more than one CHUNK of keys.
    """

    tokens: int
    queries: Tensor
    long_tiles: int

    @cached_property
    def stretches(self) -> list[tuple[Tensor, bool]]:
        """Return the tiles of each launch, and whether they see more than one CHUNK. No launch is empty."""
        parts = (self.queries[: self.long_tiles], True), (self.queries[self.long_tiles :], False)
        return [part for part in parts if part[0].shape[0]]


@dataclass(frozen=True)
class PackedLayout(QueryTiles):
    """Tables for attention over one packed batch, shared by all layers.

    The last three columns of `queries` are: first row of the prompt; position from which on keys are the continuation's
    own; first row of these keys.

    Attributes:
        positions: (T,) int64, position of each row in its sequence.
        items: (m, 7) int32, work items of the key gradient: first key row, number of key rows, position of the first
            key, first query row, end of the query rows, index of the partial sum (-1 if the tile has one item only),
            end of the rows of the keys' own prompt or continuation. Items with the most query rows come first.
        partials: Number of partial sums that items write.
        cuts: (c, 4) int32, key tiles with several items: first key row, number of key rows, first partial sum, number
            of partial sums.
    """

    positions: Tensor
    items: Tensor
    partials: int
    cuts: Tensor


def packed_layout(groups: list[tuple[int, list[int]]], device: torch.device) -> PackedLayout:
    """Lay out a packed batch. Copies once to the device and does not synchronize.

    groups: Per prompt its length, and the lengths of its continuations, which may be 0.
    """
    sizes = np.fromiter((1 + len(own) for _, own in groups), np.int64, len(groups))
    first = np.cumsum(sizes) - sizes  # index of each group's prompt among all segments (prompts and continuations)
    lengths = np.fromiter(chain.from_iterable((prompt, *own) for prompt, own in groups), np.int64, int(sizes.sum()))
    if lengths.size and lengths.min() < 0:
        raise ValueError("a prompt or continuation has a negative length")
    ends = np.cumsum(lengths)
    rows = ends - lengths  # first row of each segment
    prompt_of = np.repeat(first, sizes)  # segment of each segment's prompt
    last_of = np.repeat(first + sizes - 1, sizes)
    is_prompt = prompt_of == np.arange(lengths.size)
    shared = np.where(is_prompt, 0, lengths[prompt_of])  # prompt tokens before a segment
    seen_until = np.where(is_prompt, ends[last_of], ends)  # end of the queries that see a segment's keys

    tokens = int(lengths.sum())
    segment = np.repeat(np.arange(lengths.size), lengths)
    positions = np.arange(tokens) - (rows - shared)[segment]

    segment, start = split(lengths, TILE)
    queries = np.empty((segment.size, 6), np.int32)
    queries[:, 0] = rows[segment] + start
    queries[:, 1] = np.minimum(lengths[segment] - start, TILE)
    queries[:, 2] = shared[segment] + start
    queries[:, 3] = rows[prompt_of[segment]]
    queries[:, 4] = shared[segment]
    queries[:, 5] = rows[segment]
    end = queries[:, 2] + queries[:, 1]
    queries = queries[np.argsort(-end, kind="stable")]

    # The same tiles as keys, in order, each cut by the queries that see it.
    key_row = rows[segment] + start
    seen = seen_until[segment] - key_row
    tile, offset = split(seen, ITEM_ROWS)
    count = -(-seen // ITEM_ROWS)
    several = count > 1
    counted = np.where(several, count, 0)
    first_partial = np.cumsum(counted) - counted
    items = np.empty((tile.size, 7), np.int32)
    items[:, 0] = key_row[tile]
    items[:, 1] = np.minimum(lengths[segment] - start, TILE)[tile]
    items[:, 2] = (shared[segment] + start)[tile]
    items[:, 3] = key_row[tile] + offset
    items[:, 4] = np.minimum(items[:, 3] + ITEM_ROWS, seen_until[segment][tile])
    items[:, 5] = np.where(several[tile], first_partial[tile] + offset // ITEM_ROWS, -1)
    items[:, 6] = ends[segment][tile]
    cuts = np.empty((int(several.sum()), 4), np.int32)
    whole = np.flatnonzero(several)
    cuts[:, 0] = key_row[whole]
    cuts[:, 1] = np.minimum(lengths[segment] - start, TILE)[whole]
    cuts[:, 2] = first_partial[whole]
    cuts[:, 3] = count[whole]
    items = items[np.argsort(items[:, 3] - items[:, 4], kind="stable")]

    on_device = upload(device, positions, queries, items, cuts)
    return PackedLayout(
        tokens=tokens,
        positions=on_device[0],
        queries=on_device[1],
        long_tiles=int((end > CHUNK).sum()),
        items=on_device[2],
        partials=int(counted.sum()),
        cuts=on_device[3],
    )


def split(lengths: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Split lengths into pieces of at most `size`: the index of each piece's length, and its start there."""
    pieces = -(-lengths // size)
    whole = np.repeat(np.arange(lengths.size), pieces)
    return whole, (np.arange(whole.size) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * size


def upload(device: torch.device, *tables: np.ndarray) -> list[Tensor]:
    """Copy int64 and int32 tables to the device at once, from pinned memory and without synchronizing on a GPU.

    Each table starts at a multiple of 16 bytes; other alignments would compile the kernels a second time.
    """
    words = [-(-table.nbytes // 16) * 2 for table in tables]
    pinned = device.type == "cuda"
    host = torch.zeros(sum(words), dtype=torch.int64, pin_memory=pinned)
    at, whole = 0, host.numpy()
    for table, size in zip(tables, words, strict=True):
        whole[at : at + size].view(table.dtype)[: table.size] = table.reshape(-1)
        at += size
    there = host.to(device, non_blocking=True) if pinned else host
    parts = there.split(words)
    return [
        part.view(torch.int64 if table.dtype == np.int64 else torch.int32)[: table.size].view(table.shape)
        for part, table in zip(parts, tables, strict=True)
    ]
