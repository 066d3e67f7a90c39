"""Tiles worth trying for grouped products.

None of them changes a bit: K is one chain of products in order whatever the tile. Of the rows that an expert has in the
mean there is a tile about as high, and one twice as high, since experts have more or fewer.
"""

from __future__ import annotations

from qarl_kernels.integers import cdiv, next_power_of_2
from qarl_kernels.tuning import Tile

from kernel_bench.candidates import WIDE

# Output features, warps, stages, where experts have few rows and their weights are to be read as fast as memory gives.
NARROW = ((16, 1, 8), (32, 2, 4), (32, 2, 8), (32, 1, 4), (64, 2, 4), (32, 4, 4))
# Rows, output features, rows or features at a time, warps, stages, where there are many.
INPUT_GRAD = ((64, 128, 64, 4, 4), (128, 128, 64, 8, 4), (128, 128, 64, 8, 3), (128, 128, 64, 4, 3))
INPUT_GRAD += ((128, 256, 64, 8, 3), (128, 256, 64, 8, 4), (256, 128, 64, 8, 3))
WEIGHT_GRAD = ((128, 128, 64, 8, 3), (128, 128, 64, 8, 4), (128, 128, 64, 4, 3), (128, 128, 32, 8, 5))
WEIGHT_GRAD += ((128, 256, 64, 8, 3), (128, 256, 64, 8, 4), (256, 128, 64, 8, 3), (64, 128, 64, 4, 4))
FP8_BLOCK = ((64, 64, 4, 4), (64, 128, 4, 4), (64, 128, 4, 3), (64, 128, 4, 2), (128, 64, 4, 3))
FP8_BLOCK += ((128, 128, 8, 3), (128, 128, 8, 4), (128, 128, 8, 2))


def heights(mean: int, lowest: int, highest: int) -> list[int]:
    """Rows of a tile, for experts with so many of them in the mean."""
    near = next_power_of_2(mean)
    return sorted({min(max(size, lowest), highest) for size in (near, near * (2 if mean > 1 else 1))})


def grouped_candidates(family: str, rows: int, experts: int, gathered: bool) -> list[Tile]:
    """Tiles worth trying for so many sorted rows of so many experts."""
    mean = cdiv(rows, experts)
    if family in ("w4a16", "nvfp4a16"):
        return _fused(mean, gathered)
    if family == "w4a8":
        return _int4_int8(mean)
    if family == "fp8_block":
        return _fp8_block(mean)
    if family in ("input_grad", "weight_grad"):
        shapes = INPUT_GRAD if family == "input_grad" else WEIGHT_GRAD
        return [Tile("x_first", *shape) for shape in shapes]
    return _codes(family, mean)


def _fused(mean: int, gathered: bool) -> list[Tile]:
    tiles: list[Tile] = []
    if mean <= 32:
        for block_m in {8} if mean == 1 else {8, 16} if mean <= 8 else heights(mean, 16, 32):
            for n, warps, stages in NARROW if mean <= 8 else NARROW[1:5]:
                tiles.append(Tile("narrow", block_m, n, warps=warps, stages=stages))
    if mean >= 4:
        for block_m in heights(mean, 16, 128):
            # With few rows the accelerator is not worth that tokens' rows be put in order for it.
            ways = ({},) if gathered and mean < 32 else ({}, {"tma": True})
            if block_m >= 64:
                ways = ({}, {"tma": True}, {"tma": True, "split": True})
            for n, warps, stages in WIDE[block_m]:
                tiles += [
                    Tile("wide", block_m, n, warps=warps, stages=stages, **how) for how in ways if how or stages > 2
                ]
    return tiles + [Tile("dequantized")] * (mean >= 128)


def _int4_int8(mean: int) -> list[Tile]:
    tiles: list[Tile] = []
    for block_m in heights(mean, 16, 128):
        shapes = ((64, 4, 4), (64, 4, 3), (128, 8, 3))
        shapes += ((32, 2, 4),) * (block_m <= 32) + ((128, 4, 3),) * (block_m <= 64)  # 128 x 128 spills with 4 warps
        for n, warps, stages in shapes:
            tiles.append(Tile("wide", block_m, n, warps=warps, stages=stages))
    return tiles


def _fp8_block(mean: int) -> list[Tile]:
    tiles: list[Tile] = []
    if mean <= 64:
        for block_m in heights(mean, 16, 64):
            shapes = ((64, 4), (64, 6), (64, 3), (128, 3), (128, 4))
            for n, stages in shapes if block_m == 16 else shapes[::3]:
                tiles.append(Tile("w_first", block_m, n, warps=4, stages=stages))
    if mean >= 32:
        tiles += [Tile("x_first", m, n, warps=warps, stages=stages) for m, n, warps, stages in FP8_BLOCK]
    return tiles


def _codes(family: str, mean: int) -> list[Tile]:
    """16-bit values, INT8 and FP8."""
    deep = 64 if family == "dense" else 128
    tiles: list[Tile] = []
    if mean <= 64:
        for block_m in heights(mean, 16, 64):
            shapes = ((64, deep, 4, 6), (64, 2 * deep, 4, 4), (128, deep, 4, 4))
            if block_m == 16:
                shapes = ((64, deep, 4, 8), (64, 2 * deep, 4, 5), (64, 2 * deep, 4, 3), (128, deep, 4, 6))
                shapes += ((128, 2 * deep, 8, 3),)
                if family != "fp8":  # mma.sync: 16-bit chains agree with wgmma's, and int8 is exact
                    shapes += ((32, 2 * deep, 2, 5), (32, 2 * deep, 4, 5))
            tiles += [Tile("w_first", block_m, *shape) for shape in shapes]
    if mean >= 32:
        tiles += [Tile("x_first", 64, 128, deep, 4, 4), Tile("x_first", 64, 128, deep, 4, 3)]
    if mean >= 64:
        for m, n, warps, stages in ((64, 256, 4, 4), (128, 128, 8, 4), (128, 128, 8, 3), (128, 128, 4, 3)):
            tiles.append(Tile("x_first", m, n, deep, warps, stages))
        tiles += [Tile("w_first", 128, 64, deep, 4, 4), Tile("w_first", 128, 128, deep, 8, 4)]
    if mean >= 128:
        for m, n, stages in ((128, 256, 3), (128, 256, 4), (256, 128, 3)):
            tiles.append(Tile("x_first", m, n, deep, 8, stages))
        tiles.append(Tile("w_first", 256, 128, deep, 8, 3))
        if family == "w8a8":  # integer products are not issued asynchronously: deeper blocks
            tiles += [Tile("x_first", 128, 128, 256, 8, 3), Tile("x_first", 128, 256, 64, 8, 4)]
    return tiles
