"""Tile tables as `tools/tune_kernels.py` writes them; `qarl_kernels.tuning` reads them."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from qarl_kernels.tuning import SECTIONS, Tile


def dump_tile(tile: Tile | None) -> dict[str, Any] | None:
    """The fields of a tile that differ from their defaults."""
    if tile is None:
        return None
    default = Tile(tile.way)
    return {"way": tile.way} | {k: v for k, v in asdict(tile).items() if v != getattr(default, k)}


def format_table(data: dict[str, Any]) -> str:
    """A table as JSON text, one shape per line."""
    parts = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in data.items() if key not in SECTIONS]
    for section in SECTIONS:
        families = []
        for family, shapes in data.get(section, {}).items():
            lines = ",\n".join(f"   {json.dumps(shape)}: {json.dumps(tiles)}" for shape, tiles in shapes.items())
            families.append(f"  {json.dumps(family)}: {{\n{lines}\n  }}")
        if families:
            parts.append(f" {json.dumps(section)}: {{\n" + ",\n".join(families) + "\n }")
    return "{\n" + ",\n".join(parts) + "\n}\n"
