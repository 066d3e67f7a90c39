"""Memory of the messages in flight on a rank while a weight version is gathered. Imports no torch.

The formulas follow `qarl.weight_sync.gathers`: packed linears are sent in runs of rows, a message is sent when it is
full, and the next message starts before the previous one has arrived.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from qarl_formats.scheme import Scheme

from qarl.config import Config
from qarl.config.architecture import Architecture
from qarl.distributed.rows import most_rows
from qarl.memory.activations import DTYPE_BYTES
from qarl.memory.ranks import Block, blocks_of

# `MESSAGE_BYTES` and `IN_FLIGHT` of `qarl.weight_sync.gathers`, `RUN_BYTES` of `qarl.weight_sync.quantize`, `FILLED` of
# `qarl.distributed.packed`, which import torch.
MESSAGE_BYTES, IN_FLIGHT, RUN_BYTES, FILLED = 2**26, 2, 2**28, 1.25


class _Rows(NamedTuple):
    """Rows of a tensor that are gathered together. everyone, first: bytes of all ranks and of rank 0 (the largest)."""

    everyone: int
    first: int
    in_place: bool  # received directly into the destination


def codes_in_flight(config: Config, architecture: Architecture, ranks: int) -> int:
    """Peak bytes of the messages in memory at once while a version is gathered by `qarl.weight_sync.gathers`.

    Each message holds this rank's rows. A message with several tensors, or with part of one, also holds a packed copy
    of these rows, and the rows of all ranks until they are copied into the version's tensors. A learner that is not
    aligned gathers its own values afterwards.
    """
    width, learner_width = DTYPE_BYTES[config.model.dtype], DTYPE_BYTES[config.learner_dtype]
    blocks = blocks_of(config, architecture)
    gathers = [[(block, _stored(block, block.scheme, width)) for block in blocks]]
    if config.quant.learner != "aligned":
        gathers.append([(block, _stored(block, None, learner_width)) for block in blocks])
    return max(_most_held(_messages(gather, ranks), ranks) for gather in gathers)


def _stored(block: Block, scheme: Scheme | None, width: int) -> list[int]:
    """Bytes of each tensor of a block, over all rows. width: bytes of an unquantized element."""
    if scheme is None:
        return [width * block.rows * block.columns]
    specs = scheme.tensor_specs(block.rows, block.columns)
    return [spec.nbytes for suffix, spec in specs.items() if suffix not in ("weight_shape", "weight_global_scale")]


def _messages(gather: Iterable[tuple[Block, list[int]]], ranks: int) -> Iterator[list[_Rows]]:
    """Messages that `BucketedGather` fills with the rows of `own_rows`. gather: blocks and bytes of their tensors."""
    waiting: list[_Rows] = []
    for block, sizes in gather:
        for rows in _rows_of(block, sizes, ranks):
            if waiting and rows.everyone >= MESSAGE_BYTES:
                yield waiting
                waiting = []
            waiting.append(rows)
            if sum(some.everyone for some in waiting) >= MESSAGE_BYTES:
                yield waiting
                waiting = []
    if waiting:
        yield waiting


def _rows_of(block: Block, sizes: list[int], ranks: int) -> Iterator[_Rows]:
    """Rows of a block. A packed linear is sent in runs, one run per rank at a time."""
    each = most_rows(block.rows, block.unit, ranks)
    step = max(RUN_BYTES // (4 * block.columns * block.unit), 1) * block.unit if block.stack else each
    full, rest = divmod(block.rows, each)
    for start in range(0, each, step):
        first = min(each - start, step)
        everyone = full * first + min(max(rest - start, 0), step)
        for size in sizes:
            in_place = everyone == block.rows or everyone < ranks * first  # whole, or sent from rank to rank
            yield _Rows(size * everyone // block.rows, size * first // block.rows, in_place)


def _most_held(messages: Iterable[list[_Rows]], ranks: int) -> int:
    """Peak bytes over a sequence of messages; at most `IN_FLIGHT` + 1 are held at once."""
    held: deque[int] = deque(maxlen=IN_FLIGHT + 1)
    most = 0
    for message in messages:
        first, everyone = (sum(sizes) for sizes in ((r.first for r in message), (r.everyone for r in message)))
        even = ranks * first <= FILLED * everyone
        arriving = ranks * first if even else everyone
        if len(message) > 1:
            held.append(first + first + arriving)
        else:
            held.append(first if message[0].in_place else first + arriving)
        most = max(most, sum(held))
    return most
