"""Grouped products for `test_compile_only.py`; `compile_cases` has the other kernels."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from compile_cases import (
    BF16,
    FP32,
    MIXTURES,
    empty,
    for_this_gpu,
    groups_of,
    is_wgmma,
    most_demanding,
    on_hopper,
    scales_fp4,
    tiled_fp4,
)
from qarl_kernels import fp8_block, gemm, nvfp4a16, w4a8, w4a16
from qarl_kernels.moe import backward
from qarl_kernels.moe.groups import Groups
from qarl_kernels.tuning import TABLES, Tile, default_tile
from shipped_tables import entries

# E, k, N, K and whether x is gathered: Qwen3-30B-A3B and Mixtral
EXPERTS = ((128, 8, 1536, 2048, True), (128, 8, 2048, 768, False), (8, 2, 28_672, 4096, True))


def product(family: str, given: Groups, n: int, k: int, gathered: bool, tile_: Tile | None) -> None:
    """Launch what a scheme launches for experts' weights (n, k). tile_: None: what the tables say."""
    rows, width, blocks = given.rows // given.slots if gathered else given.rows, given.experts * n, -(-k // 128)
    x, dy = empty(rows, k), empty(given.rows, n)
    tiled, meta = empty(width // 16, blocks, 16, 16, dtype=torch.int32), empty(blocks, width, dtype=FP32)
    byte = torch.int8 if family.startswith("w") else torch.float8_e4m3fn
    qx, scale_x = x.to(byte), empty(rows, 1, dtype=FP32)
    grouped = {"groups": given, "gathered": gathered, "tile": tile_}
    if family == "dense":
        gemm.dense(x, empty(width, k), **grouped)
    elif family == "input_grad":
        backward.grouped_input_grad(dy, empty(width, k), given, tile=tile_)
    elif family == "weight_grad":
        backward.grouped_weight_grad(dy, x, given, gathered, empty(width, k, dtype=FP32), tile_)
    elif family == "nvfp4a16":
        nvfp4a16.nvfp4a16(x, None, *scales_fp4(width, k), *tiled_fp4(width, k), **grouped)
    elif family == "w4a16":
        w4a16.w4a16(x, None, empty(width, 1), None, tiled, meta.view(torch.int32), **grouped)
    elif family == "w4a8":
        w4a8.w4a8(qx, scale_x, tiled, meta, k, n, None, BF16, **grouped)
    elif family == "fp8_block":
        scales = empty(rows, blocks, dtype=FP32), empty(width // 128, blocks)
        fp8_block.fp8_block(qx, scales[0], empty(width, k, dtype=byte), scales[1], None, BF16, **grouped)
    else:
        gemm.scaled(qx, scale_x, empty(width, k, dtype=byte), empty(width, 1), None, BF16, **grouped)


def _label(family: str, experts: int, n: int, k: int, tile_: Tile) -> str:
    return f"experts {family} {experts}x{n}x{k} {tile_}" + " wgmma" * (on_hopper() and is_wgmma(tile_))


class _Tiles:
    """Compiles each tile of a family once, with any number of stages: fewer stages take less shared memory.

    Whether rows are gathered and the number of experts change where a program begins, not what its loop holds, so no
    tile is compiled for two shapes. A tile that is used for both kinds of rows is compiled with gathered ones.
    """

    def __init__(self) -> None:
        self.done: set[tuple[str, Tile]] = set()

    def product(self, family: str, shape: tuple[int, int, int, int, bool], tokens: int, tile_: Tile) -> Iterator[str]:
        key = family, replace(tile_, stages=1)
        if tile_.way != "dequantized" and key not in self.done:
            self.done.add(key)
            experts, slots, n, k, gathered = shape
            product(family, groups_of(experts, slots, tokens), n, k, gathered, tile_)
            yield _label(family, experts, n, k, tile_)

    def defaults(self, family: str) -> Iterator[str]:
        """Tiles that no table has chosen, from many rows per expert to few."""
        for shape in for_this_gpu(EXPERTS):
            experts, slots = shape[:2]
            for tokens in (65_536, 4096, 256, 16):
                tile_ = default_tile(family, tokens * slots, not on_hopper(), experts=experts)
                yield from self.product(family, shape, tokens, tile_)

    def tabled(self, family: str) -> Iterator[str]:
        """On Hopper: the most demanding tiles of the shipped tables."""
        if not on_hopper():
            return
        for gathered, shape in ((True, EXPERTS[0]), (False, EXPERTS[1])):
            shipped = [
                tile_
                for device in sorted(path.stem for path in TABLES.glob("*.json"))
                for named, tuned, entry in entries(device, grouped=True)
                if named == family and tuned.gathered == gathered
                for _, tile_ in entry.tiles
                if tile_ is not None
            ]
            for tile_ in most_demanding(shipped):
                yield from self.product(family, shape, 4096, tile_)


def all_tiles(*families: str) -> Iterator[str]:
    tiles = _Tiles()
    for family in families:
        yield from tiles.tabled(family)  # before the defaults: it has the most stages
        yield from tiles.defaults(family)


def dense() -> Iterator[str]:
    """16-bit products of few rows per expert and of many, and their backward; widths that no vector divides."""
    yield from all_tiles("dense", "input_grad", "weight_grad")
    if on_hopper():
        experts, slots, hidden, width = MIXTURES[1]
        for gathered, n, k in ((True, 2 * width, hidden), (False, hidden, width)):
            for family, each in (("dense", 4), ("input_grad", 1000), ("weight_grad", 1000)):
                given = groups_of(experts, slots, each * experts // slots)
                tile_ = default_tile(family, given.rows, False, experts=experts)
                product(family, given, n, k, gathered, tile_)
                yield _label(family, experts, n, k, tile_)


def int4() -> Iterator[str]:
    yield from all_tiles("w4a16", "nvfp4a16")
    experts, slots, n, k, _ = EXPERTS[0]
    given = groups_of(experts, slots, 65_536)
    tile_ = default_tile("dense", given.rows, not on_hopper(), experts=experts)
    x, weight = empty(65_536, k), empty(experts * n, k)
    scales = empty(len(x), 1, dtype=FP32), empty(len(weight), dtype=FP32)
    gemm.run(x, weight, *scales, None, empty(given.rows, n), tile_, given, True)
    yield f"experts nvfp4a16 dequantized {tile_}" + " wgmma" * on_hopper()
