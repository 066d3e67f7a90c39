"""Bucketed all-gather of row-sharded tensors."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

from qarl_formats.rows import concatenate_rows
from torch import Tensor

from qarl.distributed.exchange import Exchange
from qarl.distributed.rows import Block, RowPlan
from qarl.weight_sync.quantize import RUN_BYTES

MESSAGE_BYTES = 2**26  # bytes over all ranks that trigger a message; a larger tensor gets its own, without a copy
IN_FLIGHT = 2  # messages in flight while the rows of the next one are computed


class BucketedGather:
    """Bucketed all-gather. All ranks add the same tensors in the same order.

    A message needs at most three times its bytes: packed, unpacked and at the destination.

    Args:
        exchange: Collectives of the run.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._waiting: list[tuple[Tensor, Sequence[range], Tensor]] = []
        self._bytes = 0
        self._under_way: deque[Callable[[], None]] = deque()

    def add(self, own: Tensor, cut: Sequence[range], out: Tensor) -> None:
        """Add one tensor; arguments as for `Exchange.begin_gathers`. `out` is complete after `finish`."""
        size = out.nbytes * sum(map(len, cut)) // max(len(out), 1)
        if size >= MESSAGE_BYTES:
            self._send()
        self._waiting.append((own, cut, out))
        self._bytes += size
        if self._bytes >= MESSAGE_BYTES:
            self._send()

    def finish(self) -> None:
        """Send the last message and wait for all."""
        self._send()
        while self._under_way:
            self._wait_for_first()

    def _send(self) -> None:
        if not self._waiting:
            return
        own, cuts, outs = zip(*self._waiting, strict=True)
        self._waiting, self._bytes = [], 0
        self._under_way.append(self._exchange.begin_gathers(own, cuts, outs))
        if len(self._under_way) > IN_FLIGHT:
            self._wait_for_first()

    def _wait_for_first(self) -> None:
        self._under_way.popleft()()


def own_rows(
    block: Block, plan: RowPlan, rank: int, shards: Mapping[str, Tensor]
) -> Iterator[tuple[list[range], Tensor]]:
    """Yield a rank's rows of a block in chunks that are aligned over all ranks.

    A block of several masters is split into chunks of RUN_BYTES; a single master is one chunk.

    Args:
        block: Names of the masters.
        plan: Assignment of rows to ranks.
        rank: The rank.
        shards: The rank's rows of each master by name, fetched lazily. Rows adjacent in memory are not copied.

    Yields:
        The block's rows that each rank contributes to the chunk, and this rank's rows, concatenated and contiguous.
    """
    cut = plan.block_cut(block)
    longest, step = max(map(len, cut)), len(cut[0])
    if len(block) > 1:
        width = 4 * math.prod(plan.block_shape(block)[1:])
        step = max(RUN_BYTES // (width * plan.unit(block)), 1) * plan.unit(block)
    for start in range(0, longest, step) if longest else [0]:
        places = [range(*(min(own.start + end, own.stop) for end in (start, start + step))) for own in cut]
        parts, first = [], 0
        for name in block:
            rows, own = plan.shapes[name][0], plan.cut(name)[rank]
            begin, end = max(places[rank].start - first, own.start), min(places[rank].stop - first, own.stop)
            if begin < end or len(block) == 1:
                shard = shards[name]
                assert len(shard) == len(own), f"{name}: {len(shard)} rows of {own}, rank {rank}"
                parts.append(shard[begin - own.start : end - own.start])
            first += rows
        yield places, concatenate_rows(parts) if parts else shards[block[0]][:0]
