"""How a product is cut into tiles.

A `Tile` decides speed alone. K is summed front to back by one chain of tensor-core instructions an output element, in
every kernel: a tile has no way to split K or to reorder it, so neither the number of rows nor a table that is tuned
again can change a result. (`block_k` is how much of K is in flight at a time, not how it is summed.)

Tables (`tables/*.json`, one a GPU, written by `tools/tune_kernels.py`) give tiles for (family, N, K) and ranges of M.
Where a table has none, a GPU like it may; else the nearest tuned shape has, else a default does. Grouped products
have a section of their own there, see `qarl_kernels.moe.tuning`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from qarl_kernels.launch import capability_of, device_name

Way = Literal["x_first", "w_first", "library", "narrow", "wide", "dequantized"]
FAMILIES = ("dense", "w4a16", "w8a8", "fp8", "fp8_block", "w4a8", "nvfp4a16")
TABLES = Path(__file__).parent / "tables"


@dataclass(frozen=True)
class Tile:
    """One way to cut a product.

    way: `x_first` x @ w^T, `w_first` w @ x^T, `library` cuBLAS; for 4-bit weights `narrow`, `wide`, `dequantized`.
    block_m, block_n, block_k: tokens, output features and input features of a tile. persistent: one program a
    multiprocessor, over many tiles. halves: store half of a tile at a time. tma, split: of `wide` kernels, see
    `qarl_kernels.planes`.
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
    """Tiles of one (N, K): (most rows, tile), ascending; the last one serves all larger M. None: not measured."""

    tiles: tuple[tuple[int, Tile | None], ...]

    def tile(self, m: int, library: bool = True) -> Tile | None:
        found = None
        for most, tile in self.tiles:
            if not library and tile is not None and tile.way == "library":
                continue
            found = tile
            if m <= most:
                break
        return found


def lookup(family: str, n: int, k: int, m: int, x: Tensor, library: bool = True) -> Tile:
    """The tile for m rows of x against a weight (n, k).

    What was measured on this GPU for the shape, else on one that shares its table, else for the nearest shape.
    """
    major, _ = capability_of(x)
    if major < 9:
        return default_tile(family, m, before_hopper=True)
    for entry in _entries(family, n, k, device_name(x)):
        tile = entry.tile(m, library)
        if tile is not None:
            return tile
    return default_tile(family, m, library=library)


@cache
def _entries(family: str, n: int, k: int, device: str) -> tuple[Entry, ...]:
    """Entries to ask for a tile, the best first."""
    tables = [load_table(name).get(family) or {} for name in (device, *FALLBACK.get(device, ()))]
    found = [table[n, k] for table in tables if (n, k) in table]
    for table in filter(None, tables):  # the nearest shape, by the ratio of N (which sets the parallelism) and of K
        near = min(table, key=lambda shape: abs(math.log(shape[0] / n)) + 0.5 * abs(math.log(shape[1] / k)))
        found.append(table[near])
    return tuple(found)


@cache
def load_table(device: str) -> dict[str, dict[tuple[int, int], Entry]]:
    """family -> (N, K) -> entry, as measured on a GPU, by name; empty if there is no such table."""
    return parse_table(read_table(device))


def read_table(device: str) -> dict[str, Any]:
    """What stands in the file of a GPU's table; empty if there is none."""
    path = TABLES / f"{device}.json"
    return json.loads(path.read_text()) if path.exists() else {}


# GPUs with the same multiprocessors: what one's table lacks is looked up in the other's.
FALLBACK = {"h200": ("h100",), "h100": ("h200",), "gh200": ("h200", "h100")}


def parse_table(data: dict[str, Any]) -> dict[str, dict[tuple[int, int], Entry]]:
    table: dict[str, dict[tuple[int, int], Entry]] = {}
    for family, shapes in data.get("tiles", {}).items():
        table[family] = {tuple(map(int, shape.split("x"))): parse_entry(tiles) for shape, tiles in shapes.items()}
    return table


def parse_entry(tiles: list[list[Any]]) -> Entry:
    return Entry(tuple((most, None if tile is None else Tile(**tile)) for most, tile in tiles))


def dump_tile(tile: Tile | None) -> dict[str, Any] | None:
    """The fields of a tile that differ from their defaults."""
    if tile is None:
        return None
    default = Tile(tile.way)
    return {"way": tile.way} | {k: v for k, v in asdict(tile).items() if v != getattr(default, k)}


SECTIONS = ("tiles", "experts")  # of a table; the second one is of grouped products, see `qarl_kernels.moe.tuning`


def format_table(data: dict[str, Any]) -> str:
    """A table as JSON text, one shape a line."""
    parts = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in data.items() if key not in SECTIONS]
    for section in SECTIONS:
        families = []
        for family, shapes in data.get(section, {}).items():
            lines = ",\n".join(f"   {json.dumps(shape)}: {json.dumps(tiles)}" for shape, tiles in shapes.items())
            families.append(f"  {json.dumps(family)}: {{\n{lines}\n  }}")
        if families:
            parts.append(f" {json.dumps(section)}: {{\n" + ",\n".join(families) + "\n }")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def entries(device: str) -> Iterator[tuple[str, int, int, Entry]]:
    """What a GPU's own table holds: family, N, K, and the entry without the rows that were not measured."""
    for family, shapes in load_table(device).items():
        for (n, k), entry in shapes.items():
            yield family, n, k, Entry(tuple((most, tile) for most, tile in entry.tiles if tile is not None))


def default_tile(family: str, m: int, before_hopper: bool = False, library: bool = True) -> Tile:
    """A sound tile where nothing was measured."""
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
    if family == "fp8_block":  # two sums of a tile: the block's and the whole
        return Tile("x_first", 128, 128, warps=8)
    return Tile("x_first", 128, 256, block_k, warps=8, stages=3)
