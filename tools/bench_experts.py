#!/usr/bin/env python3
"""The experts of a layer: qarl's grouped products beside vLLM's fused experts and torch's grouped product, on one GPU.

    python tools/bench_experts.py --out benchmarks/results/experts_gpu.json
    python tools/bench_experts.py --schemes w4a16 --models qwen3-30b-a3b --m 1 16 256 --out out.json
    python tools/bench_experts.py --table benchmarks/results/experts_gpu.json

A case is a scheme, a model's layer, how tokens are shared out among experts, and a number of tokens. It goes from
normed states and their routing to the weighted sum of a token's experts. Results are compared with float32 products of
the dequantized weights before they are timed; a time is the median of CUDA events around one call with a cold L2 cache.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from harness import Report, count, environment, heads, out_file, read_reports
from kernel_bench.experts import CHECKED, MODELS, ROUTINGS, Experts, make_routing, runners
from kernel_bench.measure import Stopwatch, Wrong
from kernel_bench.peers import ERRORS, reason
from kernel_bench.shapes import repetitions
from kernel_bench.summary import geometric_mean, ratios, skipped_lines

SCHEMES = ("bf16", "w4a16", "w8a8", "fp8", "fp8_block", "w4a8", "nvfp4a16")
TOKENS = (1, 8, 16, 64, 256, 1024, 4096, 16_384)
# Relative Frobenius error: activations in 8 bits cost 3e-2 in two products, a wrong scale or expert 1.
TOLERANCE = 8e-2

Row = dict[str, Any]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--schemes", nargs="+", choices=SCHEMES, default=list(SCHEMES), metavar="SCHEME", help=", ".join(SCHEMES))
    add("--models", nargs="+", choices=list(MODELS), default=["qwen3-30b-a3b"], metavar="MODEL", help=", ".join(MODELS))
    add("--routing", nargs="+", choices=ROUTINGS, default=list(ROUTINGS), metavar="KIND", help=", ".join(ROUTINGS))
    add("--m", type=count, nargs="+", default=list(TOKENS), help="tokens")
    add("--reps", type=count, default=15, help="timed calls; at most 7 for 4096 tokens and more")
    add("--group-size", type=int, choices=(32, 64, 128), default=128, help="of int4 weights")
    add("--out", type=out_file, help="write the result as JSON")
    add("--table", type=Path, metavar="FILE", help="print the summary of an earlier result and stop")
    return parser.parse_args(arguments)


def rows_of(arguments: argparse.Namespace, scheme: str, model: str, stopwatch: Stopwatch) -> Iterator[Row]:
    """One row for every runner, routing and number of tokens; what did not run has `skipped`, the reason."""
    sizes, device = MODELS[model], stopwatch.device
    base: Row = {"section": scheme, "model": model}
    experts = Experts(scheme, sizes, arguments.group_size, device)
    bound = {}
    for who, build in runners(experts):
        try:
            bound[who] = build(experts)
        except ERRORS as error:
            yield base | {"who": who, "skipped": reason(error)}
    states = torch.randn(max(arguments.m), sizes.hidden, device=device, dtype=torch.bfloat16)
    for tokens in sorted(set(arguments.m)):
        for kind in arguments.routing:
            routing, x = make_routing(kind, tokens, sizes, device), states[:tokens]
            picked = torch.linspace(0, tokens - 1, min(tokens, CHECKED), device=device).round().long()
            expected = experts.expected(x, routing, picked)
            for who, bind in bound.items():
                labels = base | {"who": who, "routing": kind, "m": tokens}
                try:
                    call = bind(x, routing)
                    error = checked(call(), expected, picked)
                    us = stopwatch.microseconds(call, repetitions(arguments.reps, tokens))
                except ERRORS as failure:
                    yield labels | {"skipped": reason(failure)}
                    continue
                flops = 6 * tokens * sizes.per_token * sizes.hidden * sizes.inner
                yield labels | {"us": us, "relative_error": error, "tflops": flops / us / 1e6}
    experts.forget()


def checked(result: torch.Tensor, expected: torch.Tensor, picked: torch.Tensor) -> float:
    """Relative error of the picked rows. Raises Wrong where it is above TOLERANCE, or a value is not finite."""
    if not result.isfinite().all():
        raise Wrong("wrong: values that are not finite")
    error = float((result[picked].float() - expected).norm() / expected.norm())
    if not error < TOLERANCE:
        raise Wrong(f"wrong: relative error {error:.1e}")
    return error


def table(report: Row) -> str:
    """One line per scheme, and what did not run."""
    lines = [*heads([report]), "best peer's time / qarl's"]
    by_scheme: dict[str, list[Row]] = defaultdict(list)
    for case in ratios(report["records"], "model", "routing", "m"):
        by_scheme[case["scheme"]].append(case)
    for scheme, cases in by_scheme.items():
        worst = min(cases, key=lambda case: case["ratio"])
        mean = geometric_mean([case["ratio"] for case in cases])
        where = f"of {len(cases):3} cases, at {worst['routing']} m={worst['m']} against {worst['peer']}"
        lines.append(f"  {scheme:10} mean {mean:5.2f}  worst {worst['ratio']:5.2f}  {where}")
    return "\n".join([*lines, *skipped_lines(report["records"])])


def main() -> None:
    options = parse()
    if options.table is not None:
        print(table(*read_reports([options.table])))
        return
    if not torch.cuda.is_available():
        sys.exit("bench_experts needs a CUDA device; --table FILE prints an earlier result without one")
    stopwatch = Stopwatch(torch.device("cuda", torch.cuda.current_device()))
    report = Report(options.out, environment())
    for model in options.models:
        for scheme in options.schemes:
            # After every scheme: a peer that kills the process takes only its own along.
            report.add(list(rows_of(options, scheme, model, stopwatch)), f"{model} {scheme}")
            gc.collect()
            torch.cuda.empty_cache()
    print(table(report.content))
    if any(row["who"] == "qarl" and "skipped" in row for row in report.content["records"]):
        sys.exit("some of qarl's kernels failed, see the lines `skipped ... qarl` above")


if __name__ == "__main__":
    main()
