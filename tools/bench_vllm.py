#!/usr/bin/env python3
"""vLLM as the rollout engine: what starting, publishing, generating and sleeping cost.

    python tools/bench_vllm.py --shapes qwen3-8b --schemes w4a16 --kernels vllm exact --out FILE
    python tools/bench_vllm.py --shapes qwen3-8b --schemes bf16 --kernels vllm invariant exact \\
        --batch 8 64 256 --modes --reps 1 --out FILE
    python tools/bench_vllm.py --table FILE...

vLLM starts once per shape, scheme and set of kernels, on random weights: start; publish of a whole new version, of an
unchanged one, and of one after a simulated first AdamW step, by patches and by changed layers; tokens per second; sleep
and wake. Times are medians after a warm-up. How far vLLM's log-probs are off is measured by `qarl compare` with
rollout.engine=vllm.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

import torch
from harness import Record, Report, count, environment, out_file, positive, read_reports
from model_sizes import SHAPES
from qarl_formats.registry import scheme_names
from vllm_bench.case import KERNELS, Case
from vllm_bench.summary import table

from qarl.errors import UserError
from qarl.policy.device import pick_device
from qarl.training.allocator import keep_freed_memory

SCHEMES = ("bf16", "w4a16", "w8a8", "fp8")  # the default
LOG_LINES = 30  # of the sampler's log, shown when it fails


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--shapes", nargs="+", choices=list(SHAPES), default=["smollm2"], metavar="SHAPE", help=", ".join(SHAPES))
    add("--schemes", nargs="+", choices=scheme_names(), default=list(SCHEMES), metavar="SCHEME")
    kernels = "vllm: its own; exact: rollout.numerics; invariant: VLLM_BATCH_INVARIANT=1"
    add("--kernels", nargs="+", choices=KERNELS, default=["vllm", "exact"], metavar="KERNELS", help=kernels)
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--seed", type=int, default=0)
    add("--threads", type=count, help="CPU threads; default torch's own choice")
    add("--memory-frac", type=positive, default=0.45, help="share of the GPU for vLLM's weights and KV cache")
    add("--kv-cache-dtype", choices=("auto", "fp8"), default="auto", help="quant.kv_cache_dtype")
    add("--batch", type=count, nargs="+", default=[8, 256], help="prompts generated together")
    add("--prompt-tokens", type=count, default=128)
    add("--new-tokens", type=count, default=256)
    add("--generations", type=count, default=3, help="timed generations and sleeps of each kind")
    add("--reps", type=count, default=5, help="timed publishes of each kind")
    modes = "publishing after a step; delta needs memory for one more model"
    add("--modes", nargs="*", choices=("delta", "full"), default=["delta", "full"], help=modes)
    add("--lr", type=positive, default=1e-6, help="of the simulated AdamW step")
    add("--out", type=out_file, help="JSON file to write")
    add("--table", type=Path, nargs="+", metavar="FILE", help="print the summary of earlier results and stop")
    parsed = parser.parse_args(arguments)
    if parsed.table is None and parsed.out is None:
        parser.error("--out is needed, or --table")
    if parsed.memory_frac > 1:
        parser.error("--memory-frac takes a share of the GPU, at most 1")
    return parsed


def run(options: argparse.Namespace, device: torch.device, report: Report) -> None:
    """All cases; one that fails leaves a record of why, and the others run."""
    from vllm_bench.engine_part import engine_records

    for shape, scheme, kernels in product(options.shapes, options.schemes, options.kernels):
        with tempfile.TemporaryDirectory() as place:
            case = Case(scheme, kernels, device, Path(place))
            collect(engine_records(case, shape, options), {"shape": shape, **case.labels()}, case, report)


def collect(records: Iterator[Record], labels: Record, case: Case, report: Report) -> None:
    """Write the records as they come, and what ended them early."""
    what = " ".join(labels.values())
    try:
        for record in records:
            report.add([labels | record], f"{what} {record['what']}")
    except (UserError, torch.OutOfMemoryError) as error:
        traceback.print_exc()
        log = case.place / "sampler.log"
        if log.exists():
            print(*log.read_text(errors="replace").splitlines()[-LOG_LINES:], sep="\n", file=sys.stderr)
        report.add([labels | {"error": str(error).splitlines()[0]}], what)


def main() -> None:
    options = parse()
    if options.table is not None:
        print(table(read_reports(options.table)))
        return
    try:
        device = pick_device(options.device)
    except UserError as error:
        sys.exit(f"error: {error}")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    if device.type == "cpu":
        keep_freed_memory()
    report = Report(options.out, environment())
    run(options, device, report)
    print(table([report.content]))
    sys.exit(int(report.failed))


if __name__ == "__main__":
    main()
