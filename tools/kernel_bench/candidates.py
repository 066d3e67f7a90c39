"""Tiles worth trying, of products and of grouped products.

None of them changes a bit: K is one chain of products in order, whatever the tile.
"""

from __future__ import annotations

from qarl_kernels.integers import cdiv, next_power_of_2
from qarl_kernels.tuning import Tile

# Shapes of `wide`: tokens -> (output features, warps, stages). Few stages leave room for a second program on a
# multiprocessor: with x through the accelerator, two of 128 x 128 fit with 2 stages, three of 64 x 128 with 3.
WIDE: dict[int, tuple[tuple[int, int, int], ...]] = {
    16: ((64, 4, 4), (64, 4, 6)),
    32: ((64, 4, 4), (64, 4, 6)),
    64: ((64, 4, 4), (64, 4, 3), (128, 4, 3), (128, 4, 4)),
    128: ((128, 4, 2), (128, 4, 3), (64, 4, 3), (64, 4, 2), (128, 8, 3)),
    256: ((64, 4, 2), (128, 8, 2), (128, 8, 3)),
}
X_OF_WIDE = ({"tma": True}, {"tma": True, "split": True}, {})


def fused_candidates(m: int) -> list[Tile]:
    """Tiles of w4a16 and nvfp4a16, whose kernels have the same shape."""
    few = max(8, min(64, 1 << (m - 1).bit_length()))
    tiles: list[Tile] = []
    if m <= 64:
        for n, warps, stages in ((16, 1, 8), (32, 2, 4), (32, 2, 8), (32, 1, 4), (64, 2, 4), (32, 4, 4)):
            tiles.append(Tile("narrow", few, n, warps=warps, stages=stages))
    if m >= 16:
        most = min(256, 1 << (m - 1).bit_length())
        for block_m in (size for size in WIDE if min(m // 4, 64) <= size <= most):
            for n, warps, stages in WIDE[block_m]:
                ways = X_OF_WIDE[:2] if stages == 2 else X_OF_WIDE  # by pointers two programs do not fit anyway
                tiles += [Tile("wide", block_m, n, warps=warps, stages=stages, **how) for how in ways]
    if m >= 256:
        tiles.append(Tile("dequantized"))
    return tiles


def candidates(family: str, m: int) -> list[Tile]:
    """Tiles worth trying for m rows."""
    if family in ("w4a16", "nvfp4a16"):
        return fused_candidates(m)
    few = max(16, min(64, 1 << (m - 1).bit_length()))
    tiles: list[Tile] = []
    if family == "w4a8":
        for block_m in sorted({few, min(few, 32)} if m <= 64 else {64, 128}):
            for n, warps, stages in ((32, 2, 4), (64, 4, 4), (128, 4, 3), (128, 8, 3)):
                tiles.append(Tile("wide", block_m, n, warps=warps, stages=stages))
        return tiles
    if family == "fp8_block":
        if m <= 64:
            shapes = ((64, 4), (64, 6), (64, 3), (128, 3), (128, 4))
            return [Tile("w_first", few, n, warps=4, stages=stages) for n, stages in shapes]
        # A block's sum is scaled and added while the tensor cores rest: two or three programs share a multiprocessor.
        shapes = ((64, 64, 4, 4), (64, 64, 4, 6), (64, 128, 4, 4), (64, 128, 4, 3), (64, 128, 4, 2), (128, 64, 4, 4))
        shapes += ((128, 64, 4, 3), (128, 128, 8, 3), (128, 128, 8, 4), (128, 128, 8, 2))
        tiles = [Tile("x_first", a, b, warps=w, stages=s) for a, b, w, s in shapes]
        return tiles + ([Tile("w_first", 64, 64, warps=4, stages=4)] if m <= 512 else [])
    deep = 64 if family == "dense" else 128
    if m <= 64:
        for block_m in sorted({few, min(few, 32)}):
            shapes = ((64, deep, 4, 8), (64, 2 * deep, 4, 5), (128, deep, 4, 6), (128, 2 * deep, 8, 3))
            for n, k, warps, stages in shapes:
                tiles.append(Tile("w_first", block_m, n, k, warps, stages))
        if family != "fp8":  # mma.sync: 16-bit chains agree with wgmma's, and int8 is exact
            tiles += [Tile("w_first", few, 32, 2 * deep, 2, 5), Tile("w_first", few, 32, 2 * deep, 4, 5)]
        return tiles
    if m <= 512:
        tiles += [Tile("w_first", 64, 64, 2 * deep, 4, 4), Tile("w_first", 128, 64, deep, 4, 5)]
    for a, b, w, s in ((64, 128, 4, 4), (128, 128, 4, 4), (128, 128, 8, 4), (64, 256, 4, 4)):
        tiles.append(Tile("x_first", a, b, deep, w, s))
    if family == "w8a8":  # integer products are not issued asynchronously: deeper blocks, two programs a multiprocessor
        tiles += [Tile("x_first", 128, 128, 128, 4, 3), Tile("x_first", 256, 128, 128, 8, 3)]
        tiles += [Tile("x_first", 128, 128, 256, 8, 3), Tile("x_first", 128, 256, 64, 8, 4)]
    if m >= 256:
        tiles += [Tile("x_first", 128, 256, deep, 8, 3), Tile("x_first", 128, 256, deep, 8, 4, True, True)]
        tiles += [Tile("x_first", 128, 256, deep, 8, 3, True), Tile("w_first", 256, 128, deep, 8, 3)]
        tiles.append(Tile("x_first", 256, 128, deep, 8, 3))
    if m >= 1024 and family == "dense":
        tiles.append(Tile("library"))
    return list(dict.fromkeys(tiles))


# --- grouped products

# Output features, warps, stages of experts with few rows, whose time is that of reading the weights.
NARROW = ((16, 1, 8), (32, 2, 4), (32, 2, 8), (32, 1, 4), (64, 2, 4), (32, 4, 4))
# Rows, output features, rows or features at a time, warps, stages of experts with many rows.
INPUT_GRAD = ((64, 128, 64, 4, 4), (128, 128, 64, 8, 4), (128, 128, 64, 8, 3), (128, 128, 64, 4, 3))
INPUT_GRAD += ((128, 256, 64, 8, 3), (128, 256, 64, 8, 4), (256, 128, 64, 8, 3))
WEIGHT_GRAD = ((128, 128, 64, 8, 3), (128, 128, 64, 8, 4), (128, 128, 64, 4, 3), (128, 128, 32, 8, 5))
WEIGHT_GRAD += ((128, 256, 64, 8, 3), (128, 256, 64, 8, 4), (256, 128, 64, 8, 3), (64, 128, 64, 4, 4))
FP8_BLOCK = ((64, 64, 4, 4), (64, 128, 4, 4), (64, 128, 4, 3), (64, 128, 4, 2), (128, 64, 4, 3))
FP8_BLOCK += ((128, 128, 8, 3), (128, 128, 8, 4), (128, 128, 8, 2))


def heights(mean: int, lowest: int, highest: int) -> list[int]:
    """Rows of a tile: about the mean of the experts' rows, and twice as many, since experts have more or fewer."""
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
