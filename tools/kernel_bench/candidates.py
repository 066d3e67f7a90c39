"""Candidate tiles of products and grouped products, for tuning.

No tile changes the result's bits, because products along K are always added in the same order.
"""

from collections.abc import Iterable, Iterator

from qarl_kernels.integers import next_power_of_2
from qarl_kernels.tuning import Tile

# (output features, warps, stages) for few rows, where reading the weights takes most of the time.
NARROW = ((16, 1, 8), (32, 2, 4), (32, 2, 8), (32, 1, 4), (64, 2, 4), (32, 4, 4))
# Shapes of `wide`: rows -> (output features, warps, stages). Few stages leave shared memory for a second program on an
# SM: if x is read by TMA, two programs of 128 x 128 fit with 2 stages, and three of 64 x 128 with 3.
WIDE: dict[int, tuple[tuple[int, int, int], ...]] = {
    16: ((64, 4, 4), (64, 4, 6)),
    32: ((64, 4, 4), (64, 4, 6)),
    64: ((64, 4, 4), (64, 4, 3), (128, 4, 3), (128, 4, 4)),
    128: ((128, 4, 2), (128, 4, 3), (64, 4, 3), (64, 4, 2), (128, 8, 3)),
    256: ((64, 4, 2), (128, 8, 2), (128, 8, 3)),
}
# (rows, output features, rows or features per block of the sum, warps, stages) for products of a backward.
INPUT_GRAD = ((64, 128, 64, 4, 4), (128, 128, 64, 8, 4), (128, 128, 64, 8, 3), (128, 128, 64, 4, 3))
INPUT_GRAD += ((128, 256, 64, 8, 3), (128, 256, 64, 8, 4), (256, 128, 64, 8, 3))
WEIGHT_GRAD = ((128, 128, 64, 8, 3), (128, 128, 64, 8, 4), (128, 128, 64, 4, 3), (128, 128, 32, 8, 5))
WEIGHT_GRAD += ((128, 256, 64, 8, 3), (128, 256, 64, 8, 4), (256, 128, 64, 8, 3), (64, 128, 64, 4, 4))
# (rows, output features, warps, stages). The tensor cores idle while a block's sum is scaled and added, so two or three
# programs share an SM.
FP8_BLOCK = ((64, 64, 4, 4), (64, 64, 4, 6), (64, 128, 4, 4), (64, 128, 4, 3), (64, 128, 4, 2), (128, 64, 4, 4))
FP8_BLOCK += ((128, 64, 4, 3), (128, 128, 8, 3), (128, 128, 8, 4), (128, 128, 8, 2))


def candidates(family: str, rows: int, grouped: bool = False, gathered: bool = False) -> list[Tile]:
    """Return the candidate tiles.

    Args:
        family: A family of `qarl_kernels.tuning`, forward or backward.
        rows: Rows of the product; for a grouped product the mean per expert.
        grouped: Whether the product is grouped by expert.
        gathered: Whether x has one row per token, which is read once per expert of that token.
    """
    if family in ("input_grad", "weight_grad"):
        return [Tile("x_first", *shape) for shape in (INPUT_GRAD if family == "input_grad" else WEIGHT_GRAD)]
    if family in ("w4a16", "nvfp4a16"):
        found = _fused(rows, grouped, gathered)
    elif family == "w4a8":
        found = _int4_int8(rows)
    else:
        found = _fp8_block(rows) if family == "fp8_block" else _codes(family, rows, grouped)
    return list(dict.fromkeys(found))


def heights(rows: int, lowest: int, highest: int) -> Iterable[int]:
    """Return numbers of rows per tile: from `rows` / 4 (more programs) to 2 * `rows` (experts with more rows)."""
    near = next_power_of_2(rows)
    least, most = max(lowest, min(near // 4, 64)), max(lowest, min(highest, 2 * near))
    return (size for size in (8, 16, 32, 64, 128, 256) if least <= size <= most)


def _fused(rows: int, grouped: bool, gathered: bool) -> Iterator[Tile]:
    if rows <= 64:
        for block_m in heights(rows, 8 if rows <= 8 else 16, 64):
            for n, warps, stages in NARROW:
                yield Tile("narrow", block_m, n, warps=warps, stages=stages)
    if rows >= 4:
        for block_m in heights(rows, 16, 128 if grouped else 256):
            for n, warps, stages in WIDE[block_m]:
                if stages > 2:  # without TMA two programs do not fit on an SM anyway
                    yield Tile("wide", block_m, n, warps=warps, stages=stages)
                if not gathered or rows >= 32:  # with fewer rows, sorting them for TMA costs more than it saves
                    yield Tile("wide", block_m, n, warps=warps, stages=stages, tma=True)
                if block_m >= 64 and (not gathered or rows >= 32):
                    yield Tile("wide", block_m, n, warps=warps, stages=stages, tma=True, split=True)
    if rows >= 128:
        yield Tile("dequantized")


def _int4_int8(rows: int) -> Iterator[Tile]:
    for block_m in heights(rows, 16, 128):
        shapes = ((64, 4, 4), (64, 4, 3), (128, 8, 3))
        shapes += ((32, 2, 4),) * (block_m <= 32) + ((128, 4, 3),) * (block_m <= 64)  # 128 x 128 spills with 4 warps
        for n, warps, stages in shapes:
            yield Tile("wide", block_m, n, warps=warps, stages=stages)


def _fp8_block(rows: int) -> Iterator[Tile]:
    if rows <= 512:
        for block_m in heights(rows, 16, 64):
            for n, stages in ((64, 4), (64, 6), (64, 3), (128, 3), (128, 4)):
                yield Tile("w_first", block_m, n, warps=4, stages=stages)
    if rows >= 32:
        for m, n, warps, stages in FP8_BLOCK:
            yield Tile("x_first", m, n, warps=warps, stages=stages)


def _codes(family: str, rows: int, grouped: bool) -> Iterator[Tile]:
    """Yield tiles for 16-bit values, INT8 and FP8."""
    deep = 64 if family == "dense" else 128
    if rows <= 64:
        for block_m in heights(rows, 16, 64):
            for shape in ((64, deep, 4, 8), (64, 2 * deep, 4, 5), (128, deep, 4, 6), (128, 2 * deep, 8, 3)):
                yield Tile("w_first", block_m, *shape)
            if family != "fp8":  # mma.sync: 16-bit chains agree with wgmma's, and int8 is exact
                yield Tile("w_first", block_m, 32, 2 * deep, 2, 5)
                yield Tile("w_first", block_m, 32, 2 * deep, 4, 5)
    if rows >= 32:
        for m, n, warps, stages in ((64, 128, 4, 4), (64, 128, 4, 3), (64, 256, 4, 4), (128, 128, 4, 4)):
            yield Tile("x_first", m, n, deep, warps, stages)
        yield Tile("w_first", 64, 64, 2 * deep, 4, 4)
        yield Tile("w_first", 128, 64, deep, 4, 5)
    if rows >= 64:
        for m, n, warps, stages in ((128, 128, 8, 4), (128, 128, 8, 3), (128, 128, 4, 3)):
            yield Tile("x_first", m, n, deep, warps, stages)
        yield Tile("w_first", 128, 128, deep, 8, 4)
        if family == "w8a8":  # integer products are not asynchronous, so deeper blocks or two programs per SM help
            yield Tile("x_first", 128, 128, 128, 4, 3)
            yield Tile("x_first", 256, 128, 128, 8, 3)
            yield Tile("x_first", 128, 128, 256, 8, 3)
            yield Tile("x_first", 128, 256, 64, 8, 4)
    if rows >= 128:
        for m, n, stages in ((128, 256, 3), (128, 256, 4), (256, 128, 3)):
            yield Tile("x_first", m, n, deep, 8, stages)
        yield Tile("w_first", 256, 128, deep, 8, 3)
    if rows >= 256 and not grouped:
        yield Tile("x_first", 128, 256, deep, 8, 3, True)
        yield Tile("x_first", 128, 256, deep, 8, 4, True, True)
    if rows >= 1024 and family == "dense" and not grouped:
        yield Tile("library")
