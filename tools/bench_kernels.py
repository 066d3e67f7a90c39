#!/usr/bin/env python3
"""Benchmark qarl's kernels against vLLM's and torch's, on one GPU and in one process.

    python tools/bench_kernels.py --out benchmarks/results/kernels_h100.json
    python tools/bench_kernels.py --schemes w4a16 --models qwen3-8b --m 1 16 64
    python tools/bench_kernels.py --table benchmarks/results/kernels_h100.json

The sections are the matrix products of the schemes, and `experts`. Every kernel's result is compared with the float32
product of the same quantized operands before it is timed. A time is the median over repetitions of CUDA events around
one call, each after overwriting the L2 cache. Activations are quantized beforehand for all kernels. `experts` times the
experts of a layer in all schemes, from normed states and their routing to the weighted sum. Peers (vLLM, torch) that
are not installed are reported and left out.
"""

import argparse
import gc
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from statistics import geometric_mean

import torch
from harness import Report, aligned, command_line, count, environment, heads
from kernel_bench.experts import SCHEMES as EXPERT_SCHEMES
from kernel_bench.experts import expert_rows
from kernel_bench.measure import Row, Stopwatch
from kernel_bench.products import product_rows
from model_sizes import MIXTURES, layers

SCHEMES = ("w4a16", "w8a8", "fp8", "w4a8", "fp8_block", "dense")
SECTIONS = (*SCHEMES, "experts")
ROWS = (1, 8, 16, 32, 64, 128, 256, 1024, 4096, 16384)
FEW_ROWS = 64  # decode: the summary lists products with at most this many rows separately
MODELS = ("qwen3-0.6b", "qwen3-8b", "qwen3-30b-a3b", "llama3-70b")
CASE = ("model", "layer", "n", "k", "routing", "m")  # fields that identify a case within its section
HEAD = ["best peer's time / qarl's", f"M<={FEW_ROWS}", f"M>{FEW_ROWS}", "worst", "cases", "worst at"]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__, out=None, table=None)
    add, sections, models = parser.add_argument, SECTIONS, MODELS
    add("--schemes", nargs="+", choices=sections, default=sections, metavar="SECTION", help=", ".join(sections))
    add("--models", nargs="+", choices=models, default=models, metavar="MODEL", help=", ".join(models))
    add("--mixtures", nargs="+", choices=MIXTURES, default=["qwen3-30b-a3b"], help="models of section experts")
    add("--m", type=count, nargs="+", default=list(ROWS), help="rows (tokens) of a product")
    add("--reps", type=count, default=15, help="timed calls; at most 7 for 4096 rows and more")
    add("--group-size", type=int, choices=(32, 64, 128), default=128, help="group size of int4 weights")
    return parser.parse_args(arguments)


def measure(options: argparse.Namespace, stopwatch: Stopwatch) -> Iterator[list[Row]]:
    """Yield the measurements of one layer and section at a time."""
    rows, how = sorted(set(options.m)), (stopwatch, options.reps, options.group_size)
    for layer in layers(options.models):
        for scheme in SCHEMES:
            if scheme in options.schemes:
                yield list(product_rows(*how, layer, scheme, rows))
    for model, scheme in product(options.mixtures, EXPERT_SCHEMES if "experts" in options.schemes else ()):
        yield list(expert_rows(*how, model, scheme, rows))


def ratios(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Return by section, for each case that qarl and a peer ran, the best peer's row and `ratio`: its time / qarl's."""
    cases: dict[tuple, dict[str, Row]] = defaultdict(dict)
    for row in rows:
        if "us" in row and "m" in row:  # older records have quantization, without rows
            cases[row["section"], *map(row.get, CASE)][row["who"]] = row
    found: dict[str, list[Row]] = defaultdict(list)
    for (section, *_), by in cases.items():
        ours = by.pop("qarl", None)
        if ours and by:
            best = min(by.values(), key=lambda row: row["us"])
            found[section].append(best | {"ratio": best["us"] / ours["us"]})
    return found


def _mean(cases: Sequence[Row]) -> str:
    return f"{geometric_mean([case['ratio'] for case in cases]):.2f}" if cases else "-"


def ratio_lines(rows: Sequence[Row]) -> list[str]:
    """Return one line per section: geometric means, the worst case, number of cases."""
    lines = []
    for section, cases in ratios(rows).items():
        worst = min(cases, key=lambda case: case["ratio"])
        means = [_mean([case for case in cases if (case["m"] <= FEW_ROWS) == few]) for few in (True, False)]
        where = f"{worst['n']}x{worst['k']}" if "n" in worst else f"{worst['model']} {worst['routing']}"
        where = f"M={worst['m']} {where} against {worst['who']}"
        lines.append([section, *means, f"{worst['ratio']:.2f}", str(len(cases)), where])
    return aligned([HEAD, *lines]) if lines else []


def failures(rows: Iterable[Row]) -> list[Row]:
    """Return the rows of qarl's kernels that raised or gave a wrong result."""
    return [row for row in rows if row["who"] == "qarl" and "skipped" in row]


def table(report: Row) -> str:
    """Return the summary of a report as text: ratios, and how often kernels did not run or were wrong."""
    rows = report["records"]
    skipped = Counter((row["section"], row["who"], row["skipped"]) for row in rows if "skipped" in row)
    lines = [f"skipped {count}x {section} {who}: {why}" for (section, who, why), count in skipped.items()]
    return "\n\n".join("\n".join(block) for block in (heads([report]), ratio_lines(rows), lines) if block)


def main() -> None:
    options = parse()
    if options.table is not None:
        print("\n\n".join(table(json.loads(path.read_text())) for path in options.table))
        return
    if not torch.cuda.is_available():
        sys.exit("bench_kernels needs a CUDA device; --table FILE prints an earlier result without one")
    stopwatch = Stopwatch(torch.device("cuda", torch.cuda.current_device()))
    report = Report(options.out, environment())
    for rows in measure(options, stopwatch):
        # Saved after every layer, so that a peer that kills the process loses only its own rows.
        report.add(rows, f"{rows[-1]['section']} {rows[-1].get('layer', '')}")
        gc.collect()
        torch.cuda.empty_cache()
    print(table(report.content))
    if failures(report.content["records"]):
        sys.exit("some of qarl's kernels failed, see the lines `skipped ... qarl` above")


if __name__ == "__main__":
    main()
