"""What `test_compile_only.py` compiles of the low-bit grouped products, as `compile_cases` has it of the others."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from compile_cases import BF16, FP32, empty, for_this_gpu, is_wgmma, tiled_fp4
from qarl_kernels import tuning
from qarl_kernels.launch import capability_of
from qarl_kernels.moe import codes, fp8_block, nvfp4a16, starting, w4a8, w4a16
from qarl_kernels.moe.groups import Groups

# E, k, N, K and whether x is gathered: Qwen3-30B-A3B and Mixtral
EXPERTS = ((128, 8, 1536, 2048, True), (128, 8, 2048, 768, False), (8, 2, 28_672, 4096, True))


def _grouped(family: str) -> Iterator[str]:
    """Grouped products of few, some and many rows an expert; where x is not gathered, of many alone.

    The number of experts changes where a program begins: no tile is compiled for two of them.
    """
    done: set[tuple[tuning.Tile, bool]] = set()
    for experts, slots, n, k, gathered in for_this_gpu(EXPERTS):
        for tokens in (65_536, 4096, 256, 16):
            rows = tokens * slots
            order = empty(rows, dtype=torch.int32)
            given = Groups(experts, slots, order, order, empty(experts + 1, dtype=torch.int32))
            x, width = empty(tokens if gathered else rows, k), experts * n
            tile_ = starting.tile_for(family, given, x)
            if tile_.way == "dequantized" or (tile_, gathered) in done:
                continue
            done.add((tile_, gathered))
            blocks = k // 128
            tiled, meta = empty(width // 16, blocks, 16, 16, dtype=torch.int32), empty(blocks, width, dtype=FP32)
            byte = torch.int8 if family.startswith("w") else torch.float8_e4m3fn
            qx, scale_x = x.to(byte), empty(len(x), 1, dtype=FP32)
            rest = n, given, gathered
            if family == "nvfp4a16":
                nvfp4a16.fused(x, *tiled_fp4(width, k), empty(1, dtype=FP32), *rest, tile_)
            elif family == "w4a16":
                w4a16.fused(x, tiled, meta.view(torch.int32), *rest, tile_)
            elif family == "w4a8":
                w4a8.run(qx, scale_x, tiled, meta, *rest, BF16, False, tile_)
            elif family == "fp8_block":
                scales = empty(len(x), blocks, dtype=FP32), empty(width // 128, blocks)
                fp8_block.run(qx, scales[0], empty(width, k, dtype=byte), scales[1], *rest, BF16, tile_)
            else:
                weight, scale = empty(width, k, dtype=byte), empty(width, 1)
                codes.run(qx, scale_x, weight, scale, *rest, BF16, tile_)
            yield f"experts {family} {experts}x{n}x{k} {tokens} {tile_}" + " wgmma" * (
                capability_of(x) >= (9, 0) and is_wgmma(tile_)
            )
            if not gathered:
                break


def int8() -> Iterator[str]:
    yield from _grouped("w8a8")


def fp8() -> Iterator[str]:
    yield from _grouped("fp8")
    yield from _grouped("fp8_block")


def int4() -> Iterator[str]:
    yield from _grouped("w4a16")
    yield from _grouped("nvfp4a16")
    experts, slots, n, k, _ = EXPERTS[0]
    order = empty(65_536 * slots, dtype=torch.int32)
    given = Groups(experts, slots, order, order, empty(experts + 1, dtype=torch.int32))
    x, weight, tile_ = empty(65_536, k), empty(experts * n, k), starting.tile_for("dense", given, order)
    scales = empty(len(x), 1, dtype=FP32), empty(len(weight), dtype=FP32)
    codes.run(x, scales[0], weight, scales[1], n, given, True, BF16, tile_)
    yield f"experts nvfp4a16 dequantized {tile_}" + " wgmma" * (capability_of(x) >= (9, 0))


def int4_int8() -> Iterator[str]:
    yield from _grouped("w4a8")
