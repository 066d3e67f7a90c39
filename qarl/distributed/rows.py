"""Which rows of each master a rank holds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from qarl_formats.scheme import Scheme

from qarl.utils.expert_names import experts_of
from qarl.utils.packed_linears import fused_groups

Block = tuple[str, ...]


class RowPlan:
    """The cut of every master into runs of whole rows, one a rank.

    shapes: of the masters by name. unit_of: rows of a master that may not be separated (a scheme's block of rows, or of
    packed zero points). count: of ranks. stacks: names of masters that are cut as one tensor, their rows under one
    another, as `stacked_experts` gives them. Rank r holds rows [r * c, (r + 1) * c) of N
    rows, where c = ceil(ceil(N / unit) / count) * unit; the last ranks may hold none.

    blocks: the stacks, and all other masters by themselves, in the order of `shapes`.
    """

    def __init__(
        self,
        shapes: Mapping[str, Sequence[int]],
        unit_of: Callable[[str], int],
        count: int,
        stacks: Iterable[Sequence[str]] = (),
    ) -> None:
        self.shapes, self.count = {name: tuple(shape) for name, shape in shapes.items()}, count
        stack_of = {name: tuple(stack) for stack in stacks for name in stack}
        self.blocks: list[Block] = list(dict.fromkeys(stack_of.get(name, (name,)) for name in self.shapes))
        self._of_blocks: dict[Block, list[range]] = {}
        self._units = {block: unit_of(block[0]) for block in self.blocks}
        self._cuts: dict[str, list[range]] = {}
        for block in self.blocks:
            sizes = [self.shapes[name][0] for name in block]
            self._of_blocks[block] = whole = cut(sum(sizes), self._units[block], count)
            first = 0
            for name, rows in zip(block, sizes, strict=True):
                self._cuts[name] = [
                    range(*(min(max(end - first, 0), rows) for end in (own.start, own.stop))) for own in whole
                ]
                first += rows

    def cut(self, name: str) -> list[range]:
        """The rows of each rank."""
        return self._cuts[name]

    def block_cut(self, block: Block) -> list[range]:
        """The rows of each rank, of a block's masters concatenated along dimension 0."""
        return self._of_blocks[block]

    def unit(self, block: Block) -> int:
        """Rows of a block that are not separated."""
        return self._units[block]

    def block_shape(self, block: Block) -> tuple[int, ...]:
        """Shape of a block's masters concatenated along dimension 0."""
        return sum(self.shapes[name][0] for name in block), *self.shapes[block[0]][1:]


def stacked_experts(
    shapes: Mapping[str, Sequence[int]], scheme_of: Callable[[str], Scheme | None]
) -> Iterable[list[str]]:
    """Weights of a layer's experts that are one tensor to a plan: gate and up of all of them, and down of all.

    Weights of one scheme with the same number of columns, if no unit of rows belongs to two of them.
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


def most_rows(rows: int, unit: int, count: int) -> int:
    """Of the first rank, which has no fewer than any other."""
    return min(rows, math.ceil(math.ceil(rows / unit) / count) * unit)


def cut(rows: int, unit: int, count: int) -> list[range]:
    """[0, rows) in `count` ranges of whole units, all but the last ones of one length."""
    each = math.ceil(math.ceil(rows / unit) / count) * unit
    return [range(min(r * each, rows), min((r + 1) * each, rows)) for r in range(count)]


def row_unit(scheme: Scheme | None) -> int:
    """Rows of a weight that are stored together in `scheme`, None: unquantized.

    They share a scale, or a word of zero points, of which one holds eight.
    """
    return 1 if scheme is None else scheme.row_unit
