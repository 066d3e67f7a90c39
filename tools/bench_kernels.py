#!/usr/bin/env python3
"""qarl's kernels beside vLLM's and torch's, on one GPU and in one process.

    python tools/bench_kernels.py --out benchmarks/results/kernels_h100.json
    python tools/bench_kernels.py --schemes w4a16 --models qwen3-8b --m 1 16 64
    python tools/bench_kernels.py --table benchmarks/results/kernels_h100.json

Sections are the schemes' products and `experts`. Every kernel's result is compared with the float32 product of the same
quantized operands before it is timed. A time is the median over repetitions of CUDA events around one call, each after
the L2 cache was overwritten. Activations are quantized beforehand on both sides. `experts` times the experts of a
layer, from normed states and their routing to the weighted sum, in all schemes.
Peers that are not installed are reported and left out.
"""

import argparse
import gc
import json
import sys
from collections.abc import Iterator, Sequence
from itertools import product

import torch
from harness import Report, command_line, count, environment
from kernel_bench.experts import SCHEMES as EXPERT_SCHEMES
from kernel_bench.experts import expert_rows
from kernel_bench.measure import Row, Stopwatch
from kernel_bench.products import product_rows
from kernel_bench.shapes import MIXTURES, MODELS, ROWS, SCHEMES, SECTIONS, layers
from kernel_bench.summary import failures, table


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__, out=None, table=None)
    add, sections, models = parser.add_argument, SECTIONS, MODELS
    add("--schemes", nargs="+", choices=sections, default=sections, metavar="SECTION", help=", ".join(sections))
    add("--models", nargs="+", choices=models, default=models, metavar="MODEL", help=", ".join(models))
    add("--mixtures", nargs="+", choices=MIXTURES, default=["qwen3-30b-a3b"], help="models of section experts")
    add("--m", type=count, nargs="+", default=list(ROWS), help="rows (tokens) of a product")
    add("--reps", type=count, default=15, help="timed calls; at most 7 for 4096 rows and more")
    add("--group-size", type=int, choices=(32, 64, 128), default=128, help="of int4 weights")
    return parser.parse_args(arguments)


def measure(options: argparse.Namespace, stopwatch: Stopwatch) -> Iterator[list[Row]]:
    """The rows of one layer and section at a time."""
    rows, how = sorted(set(options.m)), (stopwatch, options.reps, options.group_size)
    for layer in layers(options.models):
        for scheme in SCHEMES:
            if scheme in options.schemes:
                yield list(product_rows(*how, layer, scheme, rows))
    for model, scheme in product(options.mixtures, EXPERT_SCHEMES if "experts" in options.schemes else ()):
        yield list(expert_rows(*how, model, scheme, rows))


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
        # After every layer: a peer that kills the process takes only its own rows along.
        report.add(rows, f"{rows[-1]['section']} {rows[-1].get('layer', '')}")
        gc.collect()
        torch.cuda.empty_cache()
    print(table(report.content))
    if failures(report.content["records"]):
        sys.exit("some of qarl's kernels failed, see the lines `skipped ... qarl` above")


if __name__ == "__main__":
    main()
