"""Memory of the messages in flight on a rank while a weight version is gathered. Imports no torch."""

import math
from collections.abc import Iterable

from qarl_formats.scheme import Scheme

from qarl.config import Config
from qarl.config.architecture import Architecture
from qarl.memory.activations import DTYPE_BYTES
from qarl.memory.ranks import Block, blocks_of

# `MESSAGE_BYTES` and `IN_FLIGHT` of `qarl.weight_sync.gathers` and `RUN_BYTES` of `qarl.weight_sync.quantize`, which
# import torch.
MESSAGE_BYTES, IN_FLIGHT, RUN_BYTES = 2**26, 2, 2**28


def codes_in_flight(config: Config, architecture: Architecture, ranks: int) -> int:
    """Return the peak bytes of messages in memory while `qarl.weight_sync.gathers` gathers a version.

    A tensor of MESSAGE_BYTES or more is a message by itself, and is received in place: only this rank's rows are in
    memory twice. Smaller tensors are packed into messages. Each of these needs this rank's rows, a packed copy of them,
    and the rows of all ranks until they are copied into the version's tensors. A learner that is not aligned gathers
    its own values afterwards.
    """
    blocks = blocks_of(config, architecture, ranks)
    width, learner_width = DTYPE_BYTES[config.model.dtype], DTYPE_BYTES[config.learner_dtype]
    gathers = [[(block, size) for block in blocks for size in _stored(block, block.scheme, width)]]
    if config.quant.learner != "aligned":
        gathers.append([(block, size) for block in blocks for size in _stored(block, None, learner_width)])
    return max(_most_held(gather, ranks) for gather in gathers)


def _stored(block: Block, scheme: Scheme | None, width: int) -> list[int]:
    """Return the bytes of each tensor of a block, over all rows. width: Bytes of an unquantized element."""
    if scheme is None:
        return [width * block.rows * block.columns]
    specs = scheme.tensor_specs(block.rows, block.columns)
    return [spec.nbytes for suffix, spec in specs.items() if suffix not in ("weight_shape", "weight_global_scale")]


def _most_held(gather: Iterable[tuple[Block, int]], ranks: int) -> int:
    """Return the peak memory of a gather's messages, in bytes. At most `IN_FLIGHT` + 1 are in memory at once.

    gather: (block, bytes of one of its tensors) per tensor.
    """
    messages: list[int] = []
    small = 0  # bytes of the tensors that wait to be packed
    for block, size in gather:
        own = size * block.first // block.rows
        # The rows of experts are sent in runs. If there are several, they are not received in place.
        runs = math.ceil(4 * block.first * block.columns / RUN_BYTES) if block.stack else 1
        large = size // runs >= MESSAGE_BYTES
        small += 0 if large else size
        if small >= MESSAGE_BYTES or (small and large):
            messages.append(small + 2 * small // ranks)
            small = 0
        if large:
            messages += [own if runs == 1 else (own + size) // runs] * runs
    messages.append(small + 2 * small // ranks)
    return max(sum(messages[first : first + IN_FLIGHT + 1]) for first in range(len(messages)))
