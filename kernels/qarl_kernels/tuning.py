"""Tile selection: how a product is cut into blocks.

A `Tile` changes speed only. Every kernel sums each output element front to back along K in one chain of tensor-core
instructions; no tile splits K or reorders it, so neither the number of rows nor a retuned table can change a bit.

Tables (`tables/*.json`, one per GPU, written by `tools/tune_kernels.py`) map family -> shape -> [most rows, tile].
Section `tiles` has dense products with shapes "NxK". Section `experts` has grouped products with shapes "ExNxK", or
"ExNxK gathered" if x has one row per token instead of one per sorted (token, slot) pair.

Lookup order: this GPU's table, a similar GPU's table, the nearest tuned shape, a default. A grouped product is looked
up by its total rows: how many rows each expert has is known on the device only.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from qarl_kernels.groups import Groups
from qarl_kernels.integers import cdiv
from qarl_kernels.launch import capability_of, device_name

Way = Literal["x_first", "w_first", "library", "narrow", "wide", "dequantized"]
FAMILIES = ("dense", "w4a16", "w8a8", "fp8", "fp8_block", "w4a8", "nvfp4a16")
BACKWARD = ("input_grad", "weight_grad")  # grouped only: dense gradients are the library's
TABLES = Path(__file__).parent / "tables"
SECTIONS = ("tiles", "experts")
# GPUs with the same multiprocessors: shapes that one's table lacks are looked up in the other's.
FALLBACK = {"h200": ("h100",), "h100": ("h200",), "gh200": ("h200", "h100")}


@dataclass(frozen=True)
class Tile:
    """One way to cut a product.

    Attributes:
        way: `x_first` computes x @ w^T, `w_first` w @ x^T, `library` calls cuBLAS; for 4-bit weights `narrow`, `wide`
            or `dequantized`, see `qarl_kernels.w4a16`.
        block_m, block_n, block_k: Tokens, output features and input features per tile.
        persistent: One program per multiprocessor loops over many tiles.
        halves: Store half of a tile at a time.
        tma, split: For `wide` kernels, see `qarl_kernels.tiled_product`.
    """

    way: Way
    block_m: int = 128
    block_n: int = 128
    block_k: int = 128
    warps: int = 4
    stages: int = 3
    persistent: bool = False
    halves: bool = False
    tma: bool = False
    split: bool = False


@dataclass(frozen=True)
class Entry:
    """Tiles of one shape: (maximum rows, tile), ascending; the last also serves more rows. Tile None: not measured."""

    tiles: tuple[tuple[int, Tile | None], ...]

    def tile(self, rows: int, library: bool = True) -> Tile | None:
        found = None
        for most, tile in self.tiles:
            if not library and tile is not None and tile.way == "library":
                continue
            found = tile
            if rows <= most:
                break
        return found


@dataclass(frozen=True)
class Shape:
    """Shape of a weight (n, k), or of `experts` of them. gathered: x has one row per token, not per sorted pair."""

    n: int
    k: int
    experts: int = 0
    gathered: bool = False

    def __str__(self) -> str:
        return f"{self.experts}x" * bool(self.experts) + f"{self.n}x{self.k}" + " gathered" * self.gathered

    @classmethod
    def parse(cls, text: str) -> Shape:
        """Undo `str`; raises ValueError for any other text."""
        sizes = text.removesuffix(" gathered")
        *experts, n, k = map(int, sizes.split("x"))
        shape = cls(n, k, experts[0] if experts else 0, sizes != text)
        if str(shape) != text:
            raise ValueError(f"{text!r} is not the shape of a product; write 256x128, 8x256x128 or 8x256x128 gathered")
        return shape

    def distance(self, other: Shape) -> float:
        """Return the distance of two shapes in the sizes that affect a tile: N and E, which set the parallelism,
        and K.
        """
        ratios = [(self.n / other.n, 1.0), (self.k / other.k, 0.5)]
        if self.experts:
            ratios.append((self.experts / other.experts, 0.5))
        return sum(abs(math.log(ratio)) * weight for ratio, weight in ratios) + (self.gathered != other.gathered)


Table = dict[str, dict[Shape, Entry]]


def lookup(
    family: str,
    n: int,
    k: int,
    m: int,
    x: Tensor,
    library: bool = True,
    groups: Groups | None = None,
    gathered: bool = False,
) -> Tile:
    """Choose the tile for m output rows of a product with a weight (n, k), or with one such weight per expert.

    x: Any tensor on the GPU that runs the product. library: Whether cuBLAS may be chosen.
    """
    experts, before_hopper = 0 if groups is None else groups.experts, capability_of(x) < (9, 0)
    if not before_hopper:
        for tuned, entry in _entries(family, n, k, experts, gathered, device_name(x)):
            rows = cdiv(m * tuned, experts) if experts else m  # the same mean rows per expert
            tile = entry.tile(rows, library)
            if tile is not None:
                return tile
    return default_tile(family, m, before_hopper, library, experts)


@cache
def _entries(family: str, n: int, k: int, experts: int, gathered: bool, device: str) -> tuple[tuple[int, Entry], ...]:
    """Return the entries to look for a tile in, best first, each with its number of experts."""
    shape = Shape(n, k, experts, gathered)
    tables = [load_table(name).get(family) or {} for name in (device, *FALLBACK.get(device, ()))]
    found = [(experts, table[shape]) for table in tables if shape in table]
    for table in tables:
        alike = [other for other in table if bool(other.experts) == bool(experts)]
        if alike:
            near = min(alike, key=shape.distance)
            found.append((near.experts, table[near]))
    return tuple(found)


@cache
def load_table(device: str) -> Table:
    """Return the tuning table of a GPU by its short name; empty if there is none."""
    path = TABLES / f"{device}.json"
    return parse_table(json.loads(path.read_text())) if path.exists() else {}


def parse_table(data: dict[str, Any]) -> Table:
    """Parse a file of `tables/`: {section: {family: {shape: tiles}}}. shape: see `Shape`; tiles: see `parse_entry`."""
    table: Table = {}
    for section in SECTIONS:
        for family, shapes in data.get(section, {}).items():
            parsed = {Shape.parse(shape): parse_entry(tiles) for shape, tiles in shapes.items()}
            table.setdefault(family, {}).update(parsed)
    return table


def parse_entry(tiles: list[list[Any]]) -> Entry:
    """Parse [[maximum rows, fields of `Tile` or null], ...]."""
    return Entry(tuple((most, None if tile is None else Tile(**tile)) for most, tile in tiles))


# Defaults of grouped 16-bit products: (maximum mean number of rows per expert, tile).
GROUPED_DENSE: tuple[tuple[float, Tile], ...] = (
    (16, Tile("w_first", 16, 64, 128, warps=4, stages=5)),
    (64, Tile("w_first", 64, 64, 64, warps=4, stages=5)),
    (512, Tile("x_first", 64, 128, 64, warps=4, stages=4)),
    (math.inf, Tile("x_first", 128, 128, 64, warps=8, stages=4)),
)
GROUPED_DENSE_BEFORE_HOPPER: tuple[tuple[float, Tile], ...] = (
    (16, Tile("x_first", 16, 128, 64, warps=4, stages=3)),
    (math.inf, Tile("x_first", 64, 128, 64, warps=4, stages=3)),
)
# dW: block_m output features, block_n input features, block_k rows at a time.
WEIGHT_GRAD = Tile("x_first", 128, 128, 64, warps=8, stages=3)
WEIGHT_GRAD_BEFORE_HOPPER = Tile("x_first", 64, 128, 32, warps=4, stages=3)


def default_tile(family: str, m: int, before_hopper: bool = False, library: bool = True, experts: int = 0) -> Tile:
    """Return an untuned tile for m rows (of all experts together if experts > 0)."""
    if not experts:
        return _default_dense(family, m, before_hopper, library)
    if family == "weight_grad":
        return WEIGHT_GRAD_BEFORE_HOPPER if before_hopper else WEIGHT_GRAD
    if family in ("dense", "input_grad"):
        tiles = GROUPED_DENSE_BEFORE_HOPPER if before_hopper else GROUPED_DENSE
        return next(tile for most, tile in tiles if m <= most * experts)
    return _default_dense(family, cdiv(m, experts), before_hopper, library=False)


def _default_dense(family: str, m: int, before_hopper: bool, library: bool) -> Tile:
    if family in ("w4a16", "nvfp4a16"):
        if m <= 16:
            return Tile("narrow", 8 if m <= 8 else 16, 32, warps=2, stages=4)
        if before_hopper:
            return Tile("narrow", 32, 64, warps=4, stages=3) if m <= 64 else Tile("dequantized")
        return Tile("wide", 64, 64, warps=4, stages=4) if m <= 256 else Tile("dequantized")
    if family == "w4a8":
        return Tile("wide", 16 if m <= 16 else 64, 64, warps=4, stages=3)
    block_k = 64 if family == "dense" else 128
    if before_hopper:
        return Tile("x_first", 16 if m <= 16 else 64, 128, 64, warps=4, stages=3)
    if m <= 64:
        return Tile("w_first", 16 if m <= 16 else 64, 64, block_k, warps=4, stages=5)
    if m < 1024:
        return Tile("x_first", 64, 128, block_k, warps=4, stages=4)
    if family == "dense" and library:
        return Tile("library")
    if family == "fp8_block":  # two accumulators per tile: the block's and the total
        return Tile("x_first", 128, 128, warps=8)
    return Tile("x_first", 128, 256, block_k, warps=8, stages=3)
