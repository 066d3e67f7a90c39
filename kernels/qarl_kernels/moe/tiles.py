"""Which rows a program of a grouped product has: every tile lies within one expert's rows.

How many tiles there are is known on the device alone. As many programs are launched as the rows could need at most;
each finds its own expert from where the experts start, and those that are too many find that they have no rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from qarl_kernels.integers import next_power_of_2
from qarl_kernels.moe.groups import Groups


def most_tiles(groups: Groups, block_m: int) -> int:
    """Tiles of block_m rows that the rows take at most, however they are shared out among the experts."""
    rows = groups.rows
    return (rows + min(groups.experts, rows) * (block_m - 1)) // block_m


def lanes_of(experts: int) -> int:
    """What `tile_rows` wants as LANES for so many experts."""
    return next_power_of_2(experts)


@triton.jit
def tile_rows(starts, tile, experts, LANES: tl.constexpr, BLOCK_M: tl.constexpr):
    """(expert, first, end): the tile's rows are [first, end), BLOCK_M at most, of one expert.

    starts: (experts + 1,) i32, of `Groups`. A tile that there is not has first == end, and expert 0.
    """
    lane = tl.arange(0, LANES)
    there = lane < experts
    start = tl.load(starts + lane, mask=there, other=0)
    count = tl.load(starts + lane + 1, mask=there, other=0) - start
    tiles = (count + BLOCK_M - 1) // BLOCK_M
    after = tl.cumsum(tiles, axis=0)
    mine = (after > tile) & (after - tiles <= tile)  # true of one lane at most: empty experts have no tiles
    before = (tile - (after - tiles)) * BLOCK_M
    # Every program waits for this before it reads a weight: three numbers through one sum, which takes a barrier.
    number = (lane.to(tl.int64) << 48) | (tl.minimum(count - before, BLOCK_M).to(tl.int64) << 32) | (start + before)
    found = tl.sum(tl.where(mine, number, 0), axis=0)
    first = found.to(tl.int32)
    return (found >> 48).to(tl.int32), first, first + ((found >> 32) & 0xFFFF).to(tl.int32)


@triton.jit
def source_rows(order, rows, end, slots, GATHERED: tl.constexpr):
    """Which rows of x the sorted rows read: their tokens', or themselves. rows: i32; those from `end` on read row 0."""
    live = rows < end
    if GATHERED:
        source = tl.load(order + rows, mask=live, other=0) // slots
    else:
        source = tl.where(live, rows, 0)
    return source
