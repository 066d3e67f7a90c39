"""qarl's kernels beside vLLM's, torch's and Gemlite's, on one GPU and in one process.

    python tools/bench_kernels.py --out benchmarks/results/kernels_h100.json
    python tools/bench_kernels.py --schemes w4a16 --models qwen3-8b --m 1 16 64
    python tools/bench_kernels.py --table benchmarks/results/kernels_h100.json

Every kernel's result is compared with the float32 product of the same quantized operands before it is timed. A time is
the median over repetitions of CUDA events around one call, each after the L2 cache was overwritten. `gemm` rows start
from quantized activations, `end_to_end` rows from bf16. Peers that are not installed are reported and left out.
"""

from __future__ import annotations

import argparse
import gc
import json
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from kernel_bench.learner import learner_rows
from kernel_bench.measure import Stopwatch
from kernel_bench.memory import memory_rows
from kernel_bench.precompile import precompile, record
from kernel_bench.products import Products
from kernel_bench.shapes import MODELS, ROWS, SCHEMES, SECTIONS, layers
from kernel_bench.summary import failures, table

PACKAGES = ("torch", "triton", "vllm", "gemlite")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--schemes",
        nargs="+",
        choices=SECTIONS,
        default=list(SECTIONS),
        metavar="SECTION",
        help=f"what to measure, of {', '.join(SECTIONS)}; default all",
    )
    parser.add_argument(
        "--models",
        nargs="+",
        choices=list(MODELS),
        default=list(MODELS),
        metavar="MODEL",
        help=f"whose linear layers, of {', '.join(MODELS)}; default all",
    )
    parser.add_argument("--m", type=int, nargs="+", default=list(ROWS), help="rows (tokens) of a product")
    parser.add_argument("--reps", type=int, default=15, help="timed calls; at most 7 for 4096 rows and more")
    parser.add_argument("--group-size", type=int, choices=(32, 64, 128), default=128, help="of int4 weights")
    parser.add_argument(
        "--gemlite-autotune",
        choices=("default", "fast", "max"),
        default="default",
        help="how Gemlite picks its tiles; anything but default takes minutes a shape",
    )
    parser.add_argument("--jobs", type=int, help="processes that compile qarl's kernels beforehand; default all cores")
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    parser.add_argument("--table", type=Path, metavar="FILE", help="print the summary of an earlier result and stop")
    parsed = parser.parse_args(arguments)
    if min(parsed.m) < 1 or parsed.reps < 1:
        parser.error("--m and --reps take numbers from 1")
    return parsed


def versions() -> dict[str, str | None]:
    """Versions of `PACKAGES`, None for what is not installed."""
    found: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def measure(arguments: argparse.Namespace, stopwatch: Stopwatch, bandwidth: float) -> Iterator[list[dict[str, Any]]]:
    """The rows of one layer and section at a time."""
    products = Products(stopwatch, arguments.reps, arguments.group_size, arguments.gemlite_autotune)
    for layer in layers(arguments.models):
        for scheme in SCHEMES:
            if scheme in arguments.schemes:
                yield list(products.rows(scheme, layer, sorted(set(arguments.m))))
        if "learner" in arguments.schemes:
            yield list(learner_rows(stopwatch, min(arguments.reps, 7), arguments.group_size, layer))
    if "quantize" in arguments.schemes:
        yield list(memory_rows(stopwatch, arguments.reps, arguments.group_size, bandwidth))


def main() -> None:
    arguments = parse()
    if arguments.table is not None:
        print(table(json.loads(arguments.table.read_text())))
        return
    if not torch.cuda.is_available():
        sys.exit("bench_kernels needs a CUDA device; --table FILE prints an earlier result without one")
    device = torch.device("cuda", torch.cuda.current_device())
    begin = time.perf_counter()
    schemes = [scheme for scheme in SCHEMES if scheme in arguments.schemes]
    capability = torch.cuda.get_device_capability(device)
    launches = record(layers(arguments.models), schemes, arguments.m, arguments.group_size, capability)
    failed = precompile(launches, capability, arguments.jobs)
    print(f"{time.perf_counter() - begin:6.1f} s  compiled {len(launches)} kernels", *failed, file=sys.stderr, sep="\n")
    stopwatch = Stopwatch(device)
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device),
        "versions": versions(),
        "command": shlex.join(sys.argv),
        "copy_tbps": stopwatch.copy_bandwidth(),
        "rows": [],
    }
    for rows in measure(arguments, stopwatch, report["copy_tbps"]):
        report["rows"] += rows
        report["seconds"] = time.perf_counter() - begin
        gc.collect()
        torch.cuda.empty_cache()
        if arguments.out is not None:  # after every layer: a peer that kills the process takes only its own rows along
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
            arguments.out.write_text(json.dumps(report, indent=1) + "\n")
        last = rows[-1]
        print(f"{report['seconds']:6.1f} s  {last['section']} {last['n']}x{last['k']}", file=sys.stderr, flush=True)
    print(table(report))
    if failures(report["rows"]):
        sys.exit("some of qarl's kernels failed, see the lines `skipped ... qarl` above")


if __name__ == "__main__":
    main()
