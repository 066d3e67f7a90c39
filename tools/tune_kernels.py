"""Time every sensible tile of the product kernels on this GPU and write the best ones into a table.

    python tools/tune_kernels.py --shapes 24576x4096 4096x12288
    python tools/tune_kernels.py --model DIR            # the linear layers of a Hugging Face model directory
    python tools/tune_kernels.py --preset               # the shapes that `tools/bench_kernels.py` reports
    python tools/tune_kernels.py --preset qwen3-4b --families w4a16 --m 64 128 256 --seconds 60

A table changes speed alone: a tile whose result differs in one bit from the first one's is reported and left out. Only
what was measured is written: other shapes and other numbers of rows in the table are kept, or left to the table of
another GPU.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
import triton
from kernel_bench.candidates import candidates
from kernel_bench.measure import Stopwatch
from kernel_bench.precompile import precompile
from kernel_bench.shapes import MODELS, TUNED, layers
from kernel_bench.summary import geometric_mean
from qarl_kernels import fp8_block, gemm, library, nvfp4a16, w4a8, w4a16
from qarl_kernels.launch import Launch, device_name, recording
from qarl_kernels.tuning import FAMILIES, TABLES, Entry, Tile, dump_tile, format_table, lookup, parse_table
from torch import Tensor
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

NOTHING = Entry(())
ROWS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 16384)


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


@dataclass
class Tuned:
    """What was measured of one family and shape: by rows, the tile and how many times as fast it is; remarks."""

    tiles: dict[int, Tile] = field(default_factory=dict)
    gains: dict[int, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def tune(problem: Problem, rows: list[int], watch: Stopwatch, deadline: float = math.inf) -> Tuned:
    """The best tile for each number of rows, among them the one the tables give now.

    deadline: of `time.monotonic`; every number of rows gets its share of what is left, in which the table's tile and
    one other are timed whatever happens.
    """
    done = Tuned()
    for index, m in enumerate(rows):
        share = time.monotonic() + (deadline - time.monotonic()) / (len(rows) - index)
        problem.rows(m)
        name = f"{problem.family} {problem.n}x{problem.k} M={m}"
        before = lookup(problem.family, problem.n, problem.k, m, problem.x)
        tiles = list(dict.fromkeys([before, *candidates(problem.family, m)]))
        own = next(tile for tile in tiles if tile.way not in ("library", "dequantized"))
        expected = problem.product(own)
        timed: dict[Tile, float] = {}
        for tried, tile in enumerate(tiles):
            if tried > 1 and time.monotonic() > share:
                done.notes.append(f"{name}: {len(tiles) - tried} tiles not tried, the time was over")
                break
            try:
                if tile.way != "dequantized" and not torch.equal(problem.product(tile), expected):
                    done.notes.append(f"{name} {dump_tile(tile)}: other bits")
                    continue
                call = partial(problem.product, tile)
                quick = watch.microseconds(call, 3)
                if quick < 1.15 * min(timed.values(), default=math.inf):
                    timed[tile] = watch.microseconds(call, 9 if m < 4096 else 5)
            except (OutOfResources, CompilationError, PTXASError) as error:
                done.notes.append(f"{name} {dump_tile(tile)}: {type(error).__name__}")
        if not timed:
            continue
        best = min(timed, key=timed.__getitem__)
        done.tiles[m] = best
        gain = ""
        if before in timed:
            done.gains[m] = timed[before] / timed[best]
            gain = f"{done.gains[m]:.2f} times as fast as {dump_tile(before)}, "
        print(f"{name}: {timed[best]:.1f} us, {gain}{dump_tile(best)}", flush=True)
    return done


def merged(measured: dict[int, Tile], old: Entry = NOTHING) -> list[list]:
    """[most rows, tile as JSON] of a table: what was measured now, else an old entry's, else null.

    A number of rows that was measured stands for those down to the next smaller one of `ROWS`. Neighbours with the
    same tile are joined.
    """
    grid = sorted({*ROWS, *measured})
    limits = sorted({*grid, *(most for most, _ in old.tiles)})
    beyond = max(measured) if max(measured) >= ROWS[-1] else None  # then the last one serves all larger M
    pairs: list[list] = []
    for m in limits:
        served = next((row for row in grid if row >= m), beyond)
        tile = dump_tile(measured.get(served, old.tile(m) if old.tiles else None))
        if pairs and pairs[-1][1] == tile:
            pairs[-1][0] = m
        else:
            pairs.append([m, tile])
    return pairs


def launches_of(
    families: list[str], rows: list[int], capability: tuple[int, int], shapes: list[tuple[int, int]] | None = None
) -> list[Launch]:
    """The launch of every candidate, and of the tiles that the tables give now, on tensors without memory."""
    with recording(capability) as launches:
        for family in families:
            problem = Problem(family, 4096, 4096, torch.device("meta"))
            problem.rows(64)
            tiles = [lookup(family, n, k, m, problem.x) for n, k in shapes or () for m in rows]
            for tile in dict.fromkeys(tiles + [tile for m in rows for tile in candidates(family, m)]):
                if tile.way not in ("library", "dequantized"):
                    problem.product(tile)
            for n, k in shapes or ():
                for m in rows:
                    if Tile("dequantized") in candidates(family, m):
                        problem = Problem(family, n, k, torch.device("meta"))
                        problem.rows(m)
                        problem.product(Tile("dequantized"))
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
    started = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--shapes", type=parse_shape, nargs="+", metavar="NxK", help="weights of N outputs, K inputs")
    what.add_argument("--model", type=Path, help="a Hugging Face model directory")
    what.add_argument("--preset", nargs="*", choices=list(TUNED), help=f"known models; none named: {', '.join(MODELS)}")
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--m", type=int, nargs="+", default=list(ROWS), help="numbers of rows")
    parser.add_argument("--seconds", type=float, default=math.inf, help="time for all of it, compiling included")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes that compile beforehand")
    parser.add_argument("--out", type=Path, help="the table; default: the one of this GPU inside qarl_kernels")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("tuning needs a CUDA device; torch sees none")
    preset = None if arguments.preset is None else [(a.n, a.k) for a in layers(arguments.preset or MODELS)]
    shapes = preset or arguments.shapes or shapes_of_model(arguments.model)
    rows = sorted(set(arguments.m))
    device, capability = torch.device("cuda"), torch.cuda.get_device_capability()
    launches = launches_of(arguments.families, rows, capability, shapes)
    failed = precompile(launches, capability, arguments.workers)
    print(f"{len(launches)} kernels compiled in {time.monotonic() - started:.0f} s, {len(failed)} of them failed")
    watch = Stopwatch(device)
    out = arguments.out or TABLES / f"{device_name(watch.flush)}.json"
    table = json.loads(out.read_text()) if out.exists() else {"tiles": {}}
    table |= {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    work = [(family, n, k) for family in arguments.families for n, k in shapes]
    gains: dict[str, list[float]] = defaultdict(list)
    for index, (family, n, k) in enumerate(work):
        if k % 128 and family in ("w4a16", "w4a8"):
            print(f"{family} {n}x{k}: left to the default tile (K is not a multiple of 128)")
            continue
        now = time.monotonic()
        deadline = now + (started + arguments.seconds - now) / (len(work) - index)
        found = tune(Problem(family, n, k, device), rows, watch, deadline)
        print("\n".join(found.notes), end="\n" if found.notes else "", flush=True)
        if found.tiles:
            old = parse_table(table).get(family, {}).get((n, k), NOTHING)
            table["tiles"].setdefault(family, {})[f"{n}x{k}"] = merged(found.tiles, old)
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(format_table(table))
        gains[family] += found.gains.values()
        torch.cuda.empty_cache()
    for family, found in gains.items():
        if found:
            mean = geometric_mean(found)
            print(f"{family}: {mean:.3f} times as fast as by the tables before, over {len(found)} cases")
    print(f"written to {out} after {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
