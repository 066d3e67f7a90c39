"""Memory per rank for master weights, gradients, optimizer state and temporaries of a step. Imports no torch.

With `distributed.engine: rows`, each of n ranks has 1/n of master weights, gradients and optimizer state, plus the
gradients of a few layers in flight. The DeepSpeed stages follow the code of DeepSpeed 0.19.8, as
`qarl.training.zero_stages` drives it.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from qarl_formats.scheme import Scheme, is_ignored

from qarl.config import Config
from qarl.config.architecture import Architecture
from qarl.config.quant import scheme_of
from qarl.distributed.rows import plan_of

Phase = Literal["always", "rollout", "update", "optimizer", "publish", "sampler GPU", "host"]
WINDOW = 3  # groups of parameters with gradients in memory: two in flight (`qarl.training.row_sums`), one computed
BUCKET = 500_000_000  # elements: DeepSpeed's reduce_bucket_size, also used for its all-reduce
SUB_GROUP = 1_000_000_000  # elements: DeepSpeed's sub_group_size


@dataclass(frozen=True)
class Share:
    """Number of elements that a rank holds: matrices of the layers, and all other parameters."""

    matrices: int
    others: int

    @property
    def parameters(self) -> int:
        return self.matrices + self.others


class Block(NamedTuple):
    """Master weights that are sharded together.

    Attributes:
        rows: Number of rows.
        first: Rows of the first rank, which has the most.
        columns: Elements per row.
        scheme: Quantization scheme; None: not quantized.
        stack: Whether these are the experts of a layer.
        matrix: Whether these are Linear weights, not embeddings or vectors.
    """

    rows: int
    first: int
    columns: int
    scheme: Scheme | None
    stack: bool
    matrix: bool


def row_share(config: Config, architecture: Architecture, ranks: int) -> Share:
    """Return the share of rank 0, which has the most, with row sharding."""
    blocks = blocks_of(config, architecture, ranks)
    matrices, others = (
        sum(block.first * block.columns for block in blocks if block.matrix == matrix) for matrix in (True, False)
    )
    return Share(matrices, others)


def blocks_of(config: Config, architecture: Architecture, ranks: int) -> tuple[Block, ...]:
    """Return the blocks of a model, in the order in which a run gathers them."""
    return _blocks(scheme_of(config.quant), tuple(config.quant.ignore), architecture, ranks)


@functools.lru_cache(maxsize=1)  # a mixture has tens of thousands of masters, and deciding sizes takes many estimates
def _blocks(scheme: Scheme, ignore: tuple[str, ...], architecture: Architecture, ranks: int) -> tuple[Block, ...]:
    inner = {f"{name}.weight" for name, _, _ in architecture.linears()}

    def of(name: str) -> Scheme | None:
        quantized = name in inner and scheme.quantized and not is_ignored(name.removesuffix(".weight"), list(ignore))
        return scheme if quantized else None

    plan = plan_of(dict(architecture.tensors()), of, ranks)
    blocks = []
    for names in plan.blocks:
        rows, *columns = plan.block_shape(names)
        first = len(plan.block_cut(names)[0])
        blocks.append(Block(rows, first, math.prod(columns), of(names[0]), len(names) > 1, names[0] in inner))
    return tuple(blocks)


def even_share(architecture: Architecture, ranks: int) -> Share:
    """Return the share of one rank if tensors can be split at any element (DeepSpeed)."""
    matrices = architecture.matrix_parameters
    return Share(math.ceil(matrices / ranks), math.ceil((architecture.parameters - matrices) / ranks))


def rows_in_flight(architecture: Architecture, ranks: int) -> int:
    """Return the peak bytes of gradients in flight during a backward, reached at the output layer.

    These are the float32 gradients of WINDOW groups, and per group the (n - 1)/n of it received from n - 1 other ranks.
    """
    vocabulary, layer = architecture.vocab_size * architecture.hidden_size, _layer(architecture)
    return (vocabulary + (WINDOW - 1) * layer) * 4 * (2 * ranks - 1) // ranks


def zero_lines(
    architecture: Architecture, stage: int, ranks: int, given: Mapping[str, Any]
) -> list[tuple[str, int, Phase]]:
    """Return the memory of a ZeRO stage in addition to master weights, gradients and optimizer state (`zero_elements`).

    Stage 0 needs one all-reduce bucket. Stages 1 to 3 need the float32 copy of the rank's partition that DeepSpeed
    updates, and a reduce bucket. Stages 1 and 2 add a flat copy of the partition's gradients during a step. Stage 3
    adds the gradients of a sub-group, and two copies of a gathered master weight.

    Args:
        architecture: The model.
        stage: ZeRO stage, 0 to 3.
        ranks: Number of ranks.
        given: The `zero_optimization` section of the DeepSpeed JSON.

    Returns:
        (name, bytes, phase) per item.
    """
    bucket = int(given.get("reduce_bucket_size", BUCKET))
    parameters, group = architecture.parameters, _layer(architecture)
    part = math.ceil(parameters / ranks)
    if stage == 0:
        return [("all-reduce bucket of gradients", 4 * min(parameters, BUCKET), "update")]
    lines: list[tuple[str, int, Phase]] = [
        ("second copy of this rank's masters", 4 * part, "always"),
        ("bucket of gradients", 4 * bucket, "update"),
    ]
    if stage >= 2:
        lines.append(("gradients of a layer", 4 * group, "update"))
    if stage == 3:
        lines.append(
            ("gradients of a sub-group, flat", 4 * min(part, int(given.get("sub_group_size", SUB_GROUP))), "update")
        )
        lines.append(
            ("gathered master, two copies", 2 * 4 * architecture.vocab_size * architecture.hidden_size, "publish")
        )
    else:
        lines.append(("second copy of this rank's gradients", 4 * part, "update"))
    return lines


def zero_elements(architecture: Architecture, stage: int, ranks: int) -> tuple[Share, Share, Share]:
    """Return the shares (master weights, gradients, optimizer state) of one rank in a ZeRO stage."""
    whole, part = even_share(architecture, 1), even_share(architecture, ranks)
    return (part if stage == 3 else whole), (part if stage >= 2 else whole), (part if stage >= 1 else whole)


def _layer(architecture: Architecture) -> int:
    return architecture.matrix_parameters // architecture.num_layers
