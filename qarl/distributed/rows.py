"""Which rows of each master a rank holds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from qarl_formats.scheme import Scheme


class RowPlan:
    """The cut of every master into runs of whole rows, one a rank.

    shapes: of the masters by name. unit_of: rows of a master that may not be separated (a scheme's block of rows, or of
    packed zero points). count: of ranks. Rank r holds rows [r * c, (r + 1) * c) of a tensor with N rows, where
    c = ceil(ceil(N / unit) / count) * unit; the last ranks may hold none.
    """

    def __init__(self, shapes: Mapping[str, Sequence[int]], unit_of: Callable[[str], int], count: int) -> None:
        self.shapes, self.count = {name: tuple(shape) for name, shape in shapes.items()}, count
        self._cuts = {name: cut(shape[0], unit_of(name), count) for name, shape in self.shapes.items()}

    def cut(self, name: str) -> list[range]:
        """The rows of each rank."""
        return self._cuts[name]


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
    return 1 if scheme is None else math.lcm(scheme.row_block, 1 if scheme.symmetric else 8)
