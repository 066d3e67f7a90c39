"""Which tile a grouped product takes: that of a table, by its shape and by how many rows its experts have in the mean.

Who has how many rows is known on the device alone; how many rows there are, and how many experts, is known here, before
the launch and in a CUDA graph. As of a single product (`qarl_kernels.tuning`), a tile decides speed and no bit.

Tables are the same files, section `experts`: family -> "EXNxK", with " gathered" behind it where a row of x is a
token's -> [most sorted rows, tile]. Families are those of `qarl_kernels.tuning` for a forward, and two of a backward.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import Tensor

from qarl_kernels import tuning
from qarl_kernels.integers import cdiv
from qarl_kernels.launch import capability_of, device_name
from qarl_kernels.moe.groups import Groups
from qarl_kernels.tuning import FALLBACK, Entry, Tile

BACKWARD = ("input_grad", "weight_grad")
FAMILIES = (*tuning.FAMILIES, *BACKWARD)


@dataclass(frozen=True)
class Shape:
    """experts: E. n, k: of an expert's weight (N, K). gathered: x has a row a token, not one a sorted row."""

    experts: int
    n: int
    k: int
    gathered: bool

    def __str__(self) -> str:
        return f"{self.experts}x{self.n}x{self.k}{' gathered' * self.gathered}"

    @classmethod
    def parse(cls, text: str) -> Shape:
        """What `str` made. Raises ValueError for anything else."""
        sizes, gap, how = text.partition(" ")
        experts, n, k = map(int, sizes.split("x"))
        if how != "gathered" * bool(gap):
            raise ValueError(f"{text!r} is no shape of a grouped product; 8x256x128 or 8x256x128 gathered are")
        return cls(experts, n, k, bool(gap))

    def distance(self, other: Shape) -> float:
        """How unlike two shapes are in what a tile depends on: N and E, which set the parallelism, and K."""
        ratios = (self.n / other.n, 1.0), (self.k / other.k, 0.5), (self.experts / other.experts, 0.5)
        return sum(abs(math.log(ratio)) * weight for ratio, weight in ratios) + (self.gathered != other.gathered)


Table = dict[str, dict[Shape, Entry]]


def tile_for(family: str, groups: Groups, n: int, k: int, gathered: bool, x: Tensor) -> Tile:
    """The tile of a product of all rows of `groups`, on the GPU of x, with experts' weights (n, k).

    What was measured on this GPU for the shape, else on one that shares its table, else for the nearest shape with as
    many rows an expert; else a default.
    """
    before_hopper = capability_of(x) < (9, 0)
    if not before_hopper:
        for experts, entry in _entries(family, Shape(groups.experts, n, k, gathered), device_name(x)):
            tile = entry.tile(cdiv(groups.rows * experts, groups.experts))
            if tile is not None:
                return tile
    return default_tile(family, groups.rows, groups.experts, before_hopper)


@cache
def _entries(family: str, shape: Shape, device: str) -> tuple[tuple[int, Entry], ...]:
    """Entries to ask for a tile, the best first, each with the experts that its numbers of rows are of."""
    tables = [load_table(name).get(family) or {} for name in (device, *FALLBACK.get(device, ()))]
    found = [(shape.experts, table[shape]) for table in tables if shape in table]
    for table in filter(None, tables):
        near = min(table, key=shape.distance)
        found.append((near.experts, table[near]))
    return tuple(found)


@cache
def load_table(device: str) -> Table:
    """family -> shape -> entry, as measured on a GPU, by name; empty if it has no such table."""
    return parse_table(tuning.read_table(device))


def parse_table(data: dict[str, Any]) -> Table:
    return {
        family: {Shape.parse(shape): tuning.parse_entry(tiles) for shape, tiles in shapes.items()}
        for family, shapes in data.get("experts", {}).items()
    }


def entries(device: str) -> Iterator[tuple[str, Shape, Entry]]:
    """What a GPU's own table holds: family, shape, and the entry without the rows that were not measured."""
    for family, shapes in load_table(device).items():
        for shape, entry in shapes.items():
            yield family, shape, Entry(tuple((most, tile) for most, tile in entry.tiles if tile is not None))


# Of 16-bit weights: (most rows an expert has in the mean, tile), the last one for all more.
DENSE: tuple[tuple[float, Tile], ...] = (
    (16, Tile("w_first", 16, 64, 128, warps=4, stages=5)),
    (64, Tile("w_first", 64, 64, 64, warps=4, stages=5)),
    (512, Tile("x_first", 64, 128, 64, warps=4, stages=4)),
    (math.inf, Tile("x_first", 128, 128, 64, warps=8, stages=4)),
)
DENSE_BEFORE_HOPPER: tuple[tuple[float, Tile], ...] = (
    (16, Tile("x_first", 16, 128, 64, warps=4, stages=3)),
    (math.inf, Tile("x_first", 64, 128, 64, warps=4, stages=3)),
)
# Of dW: block_m output features, block_n input features, block_k rows at a time.
WEIGHT_GRAD = Tile("x_first", 128, 128, 64, warps=8, stages=3)
WEIGHT_GRAD_BEFORE_HOPPER = Tile("x_first", 64, 128, 32, warps=4, stages=3)


def default_tile(family: str, rows: int, experts: int, before_hopper: bool) -> Tile:
    """A sound tile for so many sorted rows of so many experts, where nothing was measured."""
    if family == "weight_grad":
        return WEIGHT_GRAD_BEFORE_HOPPER if before_hopper else WEIGHT_GRAD
    if family in ("dense", "input_grad"):
        tiles = DENSE_BEFORE_HOPPER if before_hopper else DENSE
        return next(tile for most, tile in tiles if rows <= most * experts)
    return tuning.default_tile(family, cdiv(rows, experts), before_hopper, library=False)
