"""Time every sensible tile of the product kernels on this GPU and write the best ones into a table.

    python tools/tune_kernels.py --shapes 24576x4096 4096x12288
    python tools/tune_kernels.py --model DIR            # the linear layers of a Hugging Face model directory
    python tools/tune_kernels.py --preset               # the shapes that `tools/bench_kernels.py` reports

A table changes speed alone: a tile whose result differs in one bit from the first candidate's is reported and left out.
Entries of other shapes in the table are kept.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import triton
from kernel_bench.measure import Stopwatch
from kernel_bench.precompile import precompile
from kernel_bench.shapes import MODELS, layers
from qarl_kernels import fp8_block, gemm, library, nvfp4a16, w4a8, w4a16
from qarl_kernels.launch import Launch, device_name, recording
from qarl_kernels.tuning import FAMILIES, TABLES, Tile, dump_tile, format_table, parse_table
from torch import Tensor

ROWS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 16384)


def candidates(family: str, m: int) -> list[Tile]:
    """Tiles worth trying for m rows."""
    few = max(8 if family in ("w4a16", "nvfp4a16") else 16, min(64, 1 << (m - 1).bit_length()))
    tiles: list[Tile] = []
    if family in ("w4a16", "nvfp4a16"):
        if m <= 64:
            for n, warps, stages in ((16, 1, 8), (32, 2, 4), (32, 2, 8), (32, 1, 4), (64, 2, 4), (32, 4, 4)):
                tiles.append(Tile("narrow", few, n, warps=warps, stages=stages))
        if m >= 16:
            for n, warps in ((64, 4), (128, 8), (128, 4)):
                tiles += [Tile("wide", min(few, 32), n, warps=warps, stages=s) for s in (4, 6)] if m <= 64 else []
                tiles += [Tile("wide", 64, n, warps=warps, stages=s) for s in (3, 4)] if m >= 64 else []
                if m >= 128:
                    tiles += [Tile("wide", 128, n, warps=warps, stages=s) for s in (3, 4)]
            if m >= 256:
                tiles += [Tile("wide", 256, 64, warps=4), Tile("wide", 256, 128, warps=8)]
        if m >= 512:
            tiles.append(Tile("dequantized"))
        return tiles
    if family == "w4a8":
        for block_m in sorted({few, min(few, 32)} if m <= 64 else {64, 128}):
            for n, warps, stages in ((32, 2, 4), (64, 4, 4), (128, 4, 3), (128, 8, 3)):
                tiles.append(Tile("wide", block_m, n, warps=warps, stages=stages))
        return tiles
    if family == "fp8_block":
        if m <= 64:
            return [Tile("w_first", few, 64, warps=4, stages=s) for s in (4, 6)] + [Tile("w_first", few, 128, warps=4)]
        shapes = ((64, 64, 4, 4), (64, 128, 4, 4), (128, 64, 4, 4), (128, 128, 8, 3), (128, 128, 8, 4))
        return [Tile("x_first", a, b, warps=w, stages=s) for a, b, w, s in shapes]
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


class Problem:
    """Random operands of one family and shape, and the product of m rows with a given tile."""

    def __init__(self, family: str, n: int, k: int, device: torch.device, group: int = 128) -> None:
        self.family, self.n, self.k, self.device = family, n, k, device
        self.scale_w = torch.rand(n, 1, device=device) * 0.01
        if family in ("w4a16", "w4a8"):
            words = -(-n // 16), -(-k // 128), 16, 16
            self.tiled = torch.randint(-(2**31), 2**31 - 1, words, dtype=torch.int32, device=device)
            rows = words[1] * max(1, 128 // group), words[0] * 16
            scales = torch.rand(rows, device=device) * 0.01
            if family == "w4a8":
                self.meta = scales
            else:
                low = scales.bfloat16().view(torch.int16).int() & 0xFFFF
                self.meta = low | (torch.full_like(scales, -136).bfloat16().view(torch.int16).int() << 16)
        elif family == "nvfp4a16":
            packed = torch.randint(0, 256, (n, k // 2), device=device).to(torch.uint8)
            self.stored = packed, torch.rand(n, k // 16, device=device).to(torch.float8_e4m3fn), self.scale_w[0]
            self.tiled, self.meta = nvfp4a16.tile_nvfp4(*self.stored[:2])
        elif family == "fp8_block":
            self.weight = torch.randn(n, k, device=device).to(torch.float8_e4m3fn)
            self.scale_w = torch.rand(-(-n // 128), -(-k // 128), device=device)
        else:
            self.weight = self._codes(n)

    def _codes(self, rows: int) -> Tensor:
        if self.family in ("w8a8", "w4a8"):
            return torch.randint(-127, 128, (rows, self.k), dtype=torch.int8, device=self.device)
        x = torch.randn(rows, self.k, device=self.device, dtype=torch.bfloat16)
        return x.to(torch.float8_e4m3fn) if self.family.startswith("fp8") else x

    def rows(self, m: int) -> None:
        self.x = self._codes(m)
        self.scale_x = torch.rand(m, -(-self.k // 128) if self.family == "fp8_block" else 1, device=self.device)

    def product(self, tile: Tile) -> Tensor:
        dtype = torch.bfloat16
        if self.family == "w4a16":
            if tile.way == "dequantized":
                packed = self.tiled.view(self.n, -1)  # as many words; their order does not matter to the time
                scale = self.scale_w.expand(-1, self.k // 128).bfloat16().contiguous()
                weight = w4a16.dequantize_int4(packed, scale, None, self.k, dtype)
                return gemm.dense(self.x, weight)
            return w4a16.fused(self.x, self.tiled, self.meta, self.n, None, dtype, tile)
        if self.family == "nvfp4a16":
            if tile.way == "dequantized":
                return nvfp4a16.dequantized(self.x, *self.stored, None, dtype)
            return nvfp4a16.fused(self.x, self.tiled, self.meta, self.scale_w[0], self.n, None, dtype, tile)
        if self.family == "w4a8":
            return w4a8.tiled_product(self.x, self.scale_x, self.tiled, self.meta, self.n, None, dtype, False, tile)
        if self.family == "fp8_block":
            return fp8_block.run(self.x, self.scale_x, self.weight, self.scale_w, None, dtype, tile)
        out = torch.empty(self.x.shape[0], self.n, dtype=dtype, device=self.device)
        if tile.way == "library":
            return out[: library.product(self.x, self.weight, out, gemm.by_kernel)]  # shorter where its bits differ
        scales = (None, None) if self.family == "dense" else (self.scale_x, self.scale_w)
        gemm.run(self.x, self.weight, *scales, None, out, tile)
        return out


def tune(problem: Problem, rows: list[int], watch: Stopwatch) -> tuple[list[tuple[int, Tile]], list[str]]:
    """Best tile for each number of rows, and what was left out because it differs or does not run."""
    chosen: list[tuple[int, Tile]] = []
    notes: list[str] = []
    for m in rows:
        problem.rows(m)
        first: Tensor | None = None
        timed: list[tuple[float, Tile]] = []
        for tile in candidates(problem.family, m):
            try:
                result = problem.product(tile)
                if tile.way != "dequantized":
                    first = result if first is None else first
                    if not torch.equal(result, first):
                        notes.append(f"{problem.family} {problem.n}x{problem.k} M={m} {dump_tile(tile)}: other bits")
                        continue
                timed.append((watch.microseconds(lambda t=tile: problem.product(t), 9 if m < 4096 else 5), tile))
            except triton.runtime.errors.OutOfResources:
                continue
        best, tile = min(timed, key=lambda pair: pair[0])
        chosen.append((m, tile))
        print(f"{problem.family} {problem.n}x{problem.k} M={m}: {best:.1f} us {dump_tile(tile)}", flush=True)
    return chosen, notes


def merged(chosen: list[tuple[int, Tile]]) -> Iterator[tuple[int, dict]]:
    """(most rows, tile) pairs, neighbours with the same tile joined."""
    for index, (m, tile) in enumerate(chosen):
        if index + 1 == len(chosen) or chosen[index + 1][1] != tile:
            yield m, dump_tile(tile)


def launches_of(families: list[str], rows: list[int], capability: tuple[int, int]) -> list[Launch]:
    """Every candidate's launch, recorded on tensors without memory."""
    with recording(capability) as launches:
        for family in families:
            problem = Problem(family, 4096, 4096, torch.device("meta"))
            problem.rows(64)
            for tile in dict.fromkeys(tile for m in rows for tile in candidates(family, m)):
                if tile.way not in ("library", "dequantized"):
                    problem.product(tile)
    return launches


def shapes_of_model(directory: Path) -> list[tuple[int, int]]:
    """(N, K) of the weights of a Hugging Face model's linear layers, from its safetensors headers."""
    shapes: set[tuple[int, int]] = set()
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        sys.exit(f"{directory}: no safetensors files; give a Hugging Face model directory")
    for file in files:
        with file.open("rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        for name, entry in header.items():
            if name.endswith("proj.weight") and len(entry["shape"]) == 2:
                shapes.add(tuple(entry["shape"]))
            elif name.endswith("proj.weight_packed"):
                n, words = entry["shape"]
                shapes.add((n, words * 8))
    if not shapes:
        sys.exit(f"{directory}: no linear layers named *proj were found; give the shapes with --shapes NxK")
    return sorted(shapes)


def parse_shape(text: str) -> tuple[int, int]:
    n, _, k = text.partition("x")
    try:
        return int(n), int(k)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a shape; write NxK, as 4096x12288") from None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--shapes", type=parse_shape, nargs="+", metavar="NxK", help="weights of N outputs, K inputs")
    what.add_argument("--model", type=Path, help="a Hugging Face model directory")
    what.add_argument("--preset", action="store_true", help="Qwen3-0.6B, 8B, 30B-A3B and Llama-3-70B")
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--m", type=int, nargs="+", default=list(ROWS), help="numbers of rows")
    parser.add_argument("--workers", type=int, default=12, help="processes that compile beforehand")
    parser.add_argument("--out", type=Path, help="the table; default: the one of this GPU inside qarl_kernels")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("tuning needs a CUDA device; torch sees none")
    preset = [(layer.n, layer.k) for layer in layers(MODELS)]
    shapes = preset if arguments.preset else arguments.shapes or shapes_of_model(arguments.model)
    rows = sorted(arguments.m)
    device, capability = torch.device("cuda"), torch.cuda.get_device_capability()
    precompile(launches_of(arguments.families, rows, capability), capability, arguments.workers)
    watch = Stopwatch(device)
    out = arguments.out or TABLES / f"{device_name(watch.flush)}.json"
    table = json.loads(out.read_text()) if out.exists() else {"tiles": {}}
    table |= {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    for family in arguments.families:
        for n, k in shapes:
            if k % 128 and family in ("w4a16", "w4a8"):
                print(f"{family} {n}x{k}: left to the default tile (K is not a multiple of 128)")
                continue
            chosen, notes = tune(Problem(family, n, k, device), rows, watch)
            table["tiles"].setdefault(family, {})[f"{n}x{k}"] = [list(pair) for pair in merged(chosen)]
            print("\n".join(notes), end="\n" if notes else "", flush=True)
            torch.cuda.empty_cache()
        parse_table(table)
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(format_table(table))
    print(f"written to {out}")


if __name__ == "__main__":
    main()
