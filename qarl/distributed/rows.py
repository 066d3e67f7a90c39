"""Row sharding: which rows of each master weight a rank holds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from qarl_formats.scheme import Scheme

from qarl.utils.expert_names import experts_of
from qarl.utils.packed_linears import fused_groups

Block = tuple[str, ...]
VECTOR = 64  # elements; 1-dimensional masters are split at multiples: a kernel may round a vector loop's tail otherwise


class RowPlan:
    """Splits every master into contiguous ranges of rows, one per rank.

    Rank r holds rows [r * c, (r + 1) * c) of N rows, with c = ceil(ceil(N / unit) / count) * unit. The last ranks may
    hold none.

    Args:
        shapes: Shapes of the masters by name.
        unit_of: Returns how many consecutive rows of a master must stay together (`Scheme.row_unit`).
        count: Number of ranks.
        stacks: Names of masters that are split as one tensor, concatenated along dimension 0; see `stacked_experts`.

    Attributes:
        blocks: The stacks, and every other master by itself, in the order of `shapes`.
    """

    def __init__(
        self,
        shapes: Mapping[str, Sequence[int]],
        unit_of: Callable[[str], int],
        count: int,
        stacks: Iterable[Sequence[str]] = (),
    ) -> None:
        self.shapes, self.count = {name: tuple(shape) for name, shape in shapes.items()}, count
        stack_of = {name: stack for stack in map(tuple, stacks) for name in stack}
        self.blocks: list[Block] = list(dict.fromkeys(stack_of.get(name, (name,)) for name in self.shapes))
        self._block_of = {name: block for block in self.blocks for name in block}
        self._units = {block: unit_of(block[0]) for block in self.blocks}
        self._of_blocks = {block: cut(self.block_shape(block)[0], self._units[block], count) for block in self.blocks}
        self._cuts: dict[str, list[range]] = {}

    def cut(self, name: str) -> list[range]:
        """Return the rows of each rank."""
        if name not in self._cuts:
            block = self._block_of[name]
            first = 0
            for member in block:
                rows = self.shapes[member][0]
                ends = ((own.start - first, own.stop - first) for own in self._of_blocks[block])
                self._cuts[member] = [range(*(min(max(end, 0), rows) for end in pair)) for pair in ends]
                first += rows
        return self._cuts[name]

    def block_cut(self, block: Block) -> list[range]:
        """Return the rows of each rank in a block's masters, concatenated along dimension 0."""
        return self._of_blocks[block]

    def unit(self, block: Block) -> int:
        """Return the number of rows of a block that stay together."""
        return self._units[block]

    def block_shape(self, block: Block) -> tuple[int, ...]:
        """Return the shape of a block's masters, concatenated along dimension 0."""
        return sum(self.shapes[name][0] for name in block), *self.shapes[block[0]][1:]


def stacked_experts(
    shapes: Mapping[str, Sequence[int]], scheme_of: Callable[[str], Scheme | None]
) -> Iterable[list[str]]:
    """Return the expert weights of each layer that a plan splits as one tensor: all gate and up, and all down.

    They have one scheme and the same number of columns, and no unit of rows spans two of them.
    """
    by_scheme: dict[Scheme | None, list[str]] = {}
    for name in shapes:
        module, _, leaf = name.rpartition(".")
        if leaf == "weight" and experts_of(module.rpartition(".")[0]) is not None:
            by_scheme.setdefault(scheme_of(name), []).append(module)
    for scheme, modules in by_scheme.items():
        for group in fused_groups(modules):
            names = [f"{module}.weight" for module in group]
            rows, unit = [shapes[name][0] for name in names], row_unit(scheme)
            if len({tuple(shapes[name][1:]) for name in names}) == 1 and all(one % unit == 0 for one in rows):
                yield names


def plan_of(shapes: Mapping[str, Sequence[int]], scheme_of: Callable[[str], Scheme | None], count: int) -> RowPlan:
    """Assign rows of each master weight to ranks.

    Args:
        shapes: Shape per master weight.
        scheme_of: Returns the scheme that quantizes a parameter, or None.
        count: Number of ranks.
    """
    stacks = stacked_experts(shapes, scheme_of)
    return RowPlan(shapes, lambda name: row_unit(scheme_of(name)) if len(shapes[name]) > 1 else VECTOR, count, stacks)


def cut(rows: int, unit: int, count: int) -> list[range]:
    """Split [0, rows) into `count` ranges of whole units, equally long except for the last ones."""
    each = math.ceil(math.ceil(rows / unit) / count) * unit
    return [range(min(r * each, rows), min((r + 1) * each, rows)) for r in range(count)]


def row_unit(scheme: Scheme | None) -> int:
    """Return the number of rows of a weight that `scheme` stores together. None: unquantized.

    They share a scale, or a 32-bit word with eight zero points.
    """
    return 1 if scheme is None else scheme.row_unit
