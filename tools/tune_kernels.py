"""Time the candidate tiles of the product kernels on this GPU, and write the best ones into a table.

    python tools/tune_kernels.py --shapes 24576x4096 4096x12288
    python tools/tune_kernels.py --model DIR --families w4a16 --m 64 128 256   # a Hugging Face model's linear layers
    python tools/tune_kernels.py --experts qwen3-30b-a3b mixtral-8x7b      # grouped products of the experts of a layer

A table affects only speed: a tile whose result differs in one bit from that of the first tile is reported and left out.
Other shapes and numbers of rows that the table has are kept. For those that it lacks, `qarl_kernels.tuning.lookup`
uses the table of a related GPU, the most similar shape or a default tile.
"""

import argparse
import itertools
import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
import triton
from harness import command_line, count
from kernel_bench.measure import Late, Stopwatch
from kernel_bench.tuned import BACKWARD_TOKENS, PRODUCTS, ROWS, TOKENS, GroupedProblem, Problem, dump_tile, format_table
from model_sizes import MIXTURES, SHAPES, linears
from qarl_kernels.ahead import compile_ahead
from qarl_kernels.launch import device_name
from qarl_kernels.tuning import BACKWARD, FAMILIES, TABLES, Entry, Tile, parse_entry
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

from qarl.config.architecture import read_config_json

NOTHING = Entry(())
Work = tuple[Callable[[torch.device], Problem], list[int]]  # makes a problem on a device; numbers of rows to tune


def tune(problem: Problem, rows: list[int], watch: Stopwatch) -> dict[int, Tile]:
    """Return the best tile per number of rows. The tile that the tables give now is also a candidate."""
    done: dict[int, Tile] = {}
    for m in rows:
        problem.rows(m)
        name = f"{problem.family} {problem.key} M={m}"
        before = problem.known(m)
        tiles = list(dict.fromkeys([before, *problem.candidates(m)]))
        own = next(tile for tile in tiles if tile.way not in ("library", "dequantized"))
        expected = problem.product(own)
        timed: dict[Tile, float] = {}
        for tile in tiles:
            try:
                if problem.comparable(tile) and not torch.equal(problem.product(tile), expected):
                    print(f"{name} {dump_tile(tile)}: other bits")
                    continue
                call = partial(problem.timed, tile)
                quick = watch.microseconds(call, 3)
                if quick < 1.15 * min(timed.values(), default=math.inf):
                    timed[tile] = watch.microseconds(call, 9 if m < 4096 else 5)
            except (OutOfResources, CompilationError, PTXASError, Late, torch.OutOfMemoryError) as error:
                print(f"{name} {dump_tile(tile)}: {type(error).__name__}")
        if not timed:
            continue
        best = min(timed, key=timed.__getitem__)
        for tile in (*done.values(), before):  # prefer tiles already in use, so that fewer kernels are compiled
            if timed.get(tile, math.inf) < 1.015 * timed[best]:
                best = tile
                break
        done[problem.limit(m)] = best
        gain = f"{timed[before] / timed[best]:.2f} times as fast as {dump_tile(before)}, " if before in timed else ""
        print(f"{name}: {timed[best]:.1f} us, {gain}{dump_tile(best)}", flush=True)
    return done


def merged(measured: dict[int, Tile], old: Entry = NOTHING, ladder: Sequence[int] = ROWS) -> list[list]:
    """Return the entry of a table, pairs [most rows, tile as JSON]: the tile measured now, else the old one, else null.

    A tile measured for a number of rows applies down to the next smaller number of `ladder`. Neighbours with the same
    tile are joined.
    """
    grid = sorted({*ladder, *measured})
    limits = sorted({*grid, *(most for most, _ in old.tiles)})
    beyond = max(measured) if max(measured) >= ladder[-1] else None  # its tile also applies to all larger numbers
    pairs: list[list] = []
    for m in limits:
        served = next((row for row in grid if row >= m), beyond)
        tile = dump_tile(measured.get(served, old.tile(m) if old.tiles else None))
        if pairs and pairs[-1][1] == tile:
            pairs[-1][0] = m
        else:
            pairs.append([m, tile])
    return pairs


def launch_all(work: Sequence[Work]) -> None:
    """Launch every candidate and the tiles that the tables give now on meta tensors, so that they are compiled."""
    tried = set()
    for make, rows in work:
        problem = make(torch.device("meta"))
        for m in rows:
            problem.rows(m)
            for tile in dict.fromkeys([problem.known(m), *problem.candidates(m)]):
                kernel = problem.family, problem.section, problem.grouped.get("gathered"), tile
                if tile.way != "library" and (kernel not in tried or tile.way == "dequantized"):
                    problem.product(tile)  # `dequantized` also launches the dense tile for m rows
                tried.add(kernel)


def save(out: Path, problem: Problem, found: dict[int, Tile]) -> None:
    """Write the tiles found for one problem into the table."""
    out.parent.mkdir(parents=True, exist_ok=True)
    table = json.loads(out.read_text()) if out.exists() else {}
    table |= {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    shapes = table.setdefault(problem.section, {}).setdefault(problem.family, {})
    ladder = [problem.limit(m) for m in problem.numbers]
    shapes[problem.key] = merged(found, parse_entry(shapes.get(problem.key, [])), ladder)
    whole = out.with_suffix(".part")
    whole.write_text(format_table(table))
    whole.replace(out)


def shapes_of_model(directory: Path) -> list[tuple[int, int]]:
    """Return the distinct (N, K) of the weights of a Hugging Face model's linear layers."""
    return sorted(set(linears(read_config_json(directory / "config.json")).values()))


def parse_shape(text: str) -> tuple[int, int]:
    n, _, k = text.partition("x")
    try:
        return int(n), int(k)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a shape; write NxK, e.g. 4096x12288") from None


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = command_line(__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--shapes", type=parse_shape, nargs="+", metavar="NxK", help="weights, N outputs and K inputs")
    what.add_argument("--model", type=Path, help="Hugging Face model directory")
    experts = f"grouped products of the experts of a model: {', '.join(MIXTURES)}"
    what.add_argument("--experts", nargs="+", choices=MIXTURES, metavar="MODEL", help=experts)
    add, families = parser.add_argument, (*FAMILIES, *BACKWARD)
    known = f"{', '.join(FAMILIES)}, with --experts also {', '.join(BACKWARD)}; default: all"
    add("--families", nargs="+", choices=families, metavar="FAMILY", help=known)
    add("--m", type=count, nargs="+", help=f"numbers of rows (default: {ROWS}), with --experts of tokens ({TOKENS})")
    add("--out", type=Path, help="file of the table; default: that of this GPU in qarl_kernels")
    parsed = parser.parse_args(arguments)
    if parsed.families is None:
        parsed.families = [*FAMILIES, *BACKWARD] if parsed.experts else list(FAMILIES)
    backward = [family for family in parsed.families if family in BACKWARD]
    if backward and not parsed.experts:
        parser.error(f"--families {' '.join(backward)} has only grouped products; name a model with --experts")
    return parsed


def parts_of(arguments: argparse.Namespace) -> list[list[Work]]:
    """Return the parts of the work, which are compiled, measured and saved one after the other. Grouped products have
    one part per model and family, so that the table is useful after each."""
    if arguments.experts:
        parts = []
        for model, family in itertools.product(arguments.experts, arguments.families):
            rows = sorted(set(arguments.m or (BACKWARD_TOKENS if family in BACKWARD else TOKENS)))
            parts.append([(partial(GroupedProblem, family, SHAPES[model], which), rows) for which in PRODUCTS])
        return parts
    shapes = arguments.shapes or shapes_of_model(arguments.model)
    part: list[Work] = []
    for family, (n, k) in itertools.product(arguments.families, shapes):
        if k % 128 and family in ("w4a16", "w4a8"):
            print(f"{family} {n}x{k}: left to the default tile (K is not a multiple of 128)")
        else:
            part.append((partial(Problem, family, n, k), sorted(set(arguments.m or ROWS))))
    return [part]


def main() -> None:
    started = time.monotonic()
    arguments = parse()
    if not torch.cuda.is_available():
        sys.exit("tuning needs a CUDA device; torch sees none")
    device = torch.device("cuda", torch.cuda.current_device())
    watch = Stopwatch(device)
    out = arguments.out or TABLES / f"{device_name(watch.flush)}.json"
    for part in parts_of(arguments):
        begin = time.monotonic()
        # In parallel, because compiling the kernels one after the other takes longer than timing them.
        compiled = compile_ahead(partial(launch_all, part), device, os.cpu_count() or 1)
        print(f"{compiled} kernels compiled in {time.monotonic() - begin:.0f} s", flush=True)
        for make, rows in part:
            problem = make(device)
            if found := tune(problem, rows, watch):
                save(out, problem, found)
            del problem
            torch.cuda.empty_cache()
    print(f"written to {out} after {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
