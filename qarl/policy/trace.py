"""Digests of the results of each operation of a forward for one sequence, to find where two forwards diverge.

A decoder reports the result of each operation (`Decoder.note`) for all rows of a packed batch. A `Tracer` keeps the
rows that belong to one sequence. A row belongs to it if all tokens up to and including its own match the sequence, so a
prompt that another response ran, or a page that another request filled, counts as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TypeAlias

import torch
from torch import Tensor

Note: TypeAlias = Callable[..., None]
Step = tuple[int, str]  # (layer, operation); -1: before the first layer, the number of layers: after the last


def unnoted(layer: int, operation: str, *tensors: Tensor | None, rows: Tensor | None = None) -> None:
    """The `Note` that records nothing.

    Args:
        layer: Its index.
        operation: A key of `qarl.exactness.first_difference.OPERATIONS`.
        tensors: The operation's results, (T, ...) each, in the order of the batch's rows; None if a scheme has none.
        rows: (R,) int64, the rows that the tensors hold; None: all.
    """


@dataclass(frozen=True)
class Context:
    """Consecutive rows of a packed batch that belong to one sequence.

    Attributes:
        row: First row.
        position: Position of its token in the sequence.
        tokens: The sequence up to the last row.
    """

    row: int
    position: int
    tokens: Sequence[int]


@dataclass
class Tracer:
    """Follows one sequence.

    Attributes:
        tokens: Tokens of the sequence.
        watched: A step and a position whose values are recorded, or None.
        values: The watched values, flat and in float64, once per forward.
        found: Digests of each position's row by step, in a forward's order; a position may run several times.
    """

    tokens: Sequence[int]
    watched: tuple[Step, int] | None = None
    values: list[Tensor] = field(default_factory=list)
    found: dict[Step, dict[int, set[int]]] = field(default_factory=dict)
    _rows: list[int] = field(default_factory=list)
    _positions: list[int] = field(default_factory=list)
    _fresh: list[tuple[Step, list[int], Tensor]] = field(default_factory=list)

    def expect(self, contexts: Iterable[Context]) -> None:
        """Announce the rows of the next forward; rows of no sequence are left out."""
        self.settle()
        self._rows, self._positions = [], []
        for context in contexts:
            same = _common(self.tokens, context.tokens)
            positions = range(context.position, same)
            self._positions += positions
            self._rows += [context.row + position - context.position for position in positions]

    def __call__(self, layer: int, operation: str, *tensors: Tensor | None, rows: Tensor | None = None) -> None:
        """See `unnoted`."""
        held, positions = self._rows, self._positions
        if rows is not None and held:
            places = {row: position for row, position in zip(held, positions, strict=True)}
            pairs = [(i, places[row]) for i, row in enumerate(rows.tolist()) if row in places]
            held, positions = [i for i, _ in pairs], [position for _, position in pairs]
        if not held:
            return
        # 8-bit codes are viewed as bytes, which every operation takes.
        given = [t.view(torch.uint8) if t.element_size() == 1 else t for t in tensors if t is not None]
        chosen = torch.tensor(held, device=given[0].device)
        if self.watched is not None and self.watched[0] == (layer, operation) and self.watched[1] in positions:
            row = held[positions.index(self.watched[1])]
            self.values.append(torch.cat([t[row].flatten().double() for t in tensors if t is not None]).cpu())
        self._fresh.append(((layer, operation), positions, digest([tensor[chosen] for tensor in given])))

    def settle(self) -> None:
        """Fetch the digests of the last forward from the device."""
        if not self._fresh:
            return
        values = torch.cat([digests for *_, digests in self._fresh]).tolist()
        for step, positions, _ in self._fresh:
            places = self.found.setdefault(step, {})
            for position, value in zip(positions, values, strict=False):
                places.setdefault(position, set()).add(value)
            del values[: len(positions)]
        self._fresh.clear()


def digest(tensors: Sequence[Tensor]) -> Tensor:
    """Return one int64 digest per row of tensors (R, ...), on their device. 0 and -0 count as equal.

    The sum modulo 2^64 of the values' bits times odd constants: one value that differs changes the sum.
    """
    total = torch.zeros(len(tensors[0]), dtype=torch.int64, device=tensors[0].device)
    for tensor in tensors:
        rows = tensor.reshape(len(tensor), -1)
        if rows.is_floating_point() and rows.element_size() > 1:
            rows = rows + 0.0
        whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[rows.element_size()]
        bits = rows.contiguous().view(whole).to(torch.int64)
        total = total * 1_000_003 + (bits * _constants(bits.shape[1], bits.device)).sum(-1)
    return total


@cache
def _constants(count: int, device: torch.device) -> Tensor:
    random = torch.randint(-(2**62), 2**62, (count,), generator=torch.Generator().manual_seed(count))
    return (2 * random + 1).to(device)


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common prefix."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
