#!/usr/bin/env python3
"""The largest model that trains on so many GPUs: what `qarl check` expects of it, and what happened.

    python tools/largest_shape.py --gpus 1 2 --offload none moments all --out out.json
    python tools/largest_shape.py --gpus 1 --offload all --gpu-memory 78 --out out.json
    python tools/largest_shape.py --gpus 1 2 --estimate

For each number of GPUs and each `optim.offload` it runs the largest shape whose estimate has room, and then larger ones
until one runs out of memory, or smaller ones until one trains. To train is a whole optimizer step on random weights and
tokens with nothing that samples beside it: a micro-batch with its backward, AdamW, the next version (`--part learn` of
bench_step.py, on several GPUs of bench_ranks.py, which time it too). What the host would not hold is not run.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from arguments import count, out_file, positive
from model_sizes import DENSE, SHAPES

TOOLS = Path(__file__).parent
sys.path[:0] = [str(TOOLS.parent / folder) for folder in (".", "kernels", "quant_formats")]

OFFLOAD = ("none", "moments", "all")
ROOM = 0.95  # of a GPU's memory, that an estimate may reach: it leaves out CUDA's context and fragments
LENGTH = 1024  # of a sequence
PROMPT = 81  # tokens of the longest prompt of bench_step's learn
BESIDE_TORCH = ("reserved_gib", "beside_gib")  # of a process whose GPU counted as smaller
MEMORY_SIGNS = ("OutOfMemoryError", "CUDA out of memory")
TRAINED, OUT_OF_MEMORY = "trained", "out of GPU memory"
Record = dict[str, Any]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    from qarl_formats.registry import scheme_names

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--gpus", type=count, nargs="+", default=[1], help="ranks, a GPU each")
    add("--offload", nargs="+", choices=OFFLOAD, help="optim.offload; default all three, on a CPU none")
    add(
        "--shapes", nargs="+", choices=("tiny", *DENSE), default=list(DENSE), metavar="SHAPE", help="the smallest first"
    )
    add("--scheme", choices=scheme_names(), default="w4a16")
    add("--tokens", type=int, default=16_384, help="of a micro-batch of a rank")
    add("--gpu-memory", type=positive, metavar="GIB", help="of a GPU that a rank may have, as if that were smaller")
    add("--host-memory", type=positive, metavar="GIB", help="that there is; default what this machine says of itself")
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--timeout", type=positive, default=240.0, help="seconds of one run")
    add("--budget", type=float, default=math.inf, help="seconds after which no other run begins")
    add("--estimate", action="store_true", help="print what is expected and stop")
    add("--out", type=out_file, help="JSON file to write")
    parsed = parser.parse_args(arguments)
    if parsed.out is None and not parsed.estimate:
        parser.error("--out is needed, or --estimate")
    if parsed.tokens < 2 * (LENGTH + PROMPT):
        parser.error(f"--tokens takes numbers from {2 * (LENGTH + PROMPT)}")
    if parsed.tokens % LENGTH:
        parser.error(f"--tokens takes multiples of {LENGTH}")
    if parsed.device == "cpu" and parsed.gpu_memory is not None:
        parser.error("--gpu-memory is of --device cuda")
    if parsed.offload is None:
        parsed.offload = ["none"] if parsed.device == "cpu" else list(OFFLOAD)
    if parsed.device == "cpu" and parsed.offload != ["none"]:
        parser.error("--offload is of --device cuda: a CPU has nothing to offload from")
    return parsed


def expected(options: argparse.Namespace, shape: str, ranks: int, offload: str) -> Record:
    """GiB that `qarl check` expects of the learner and its optimizer on a rank's device, and at least of the host."""
    from step_bench.settings import learner_sections

    from qarl.config.load import make_config
    from qarl.memory import certain_bytes, estimate, peak_bytes

    model = SHAPES[shape]
    sections = learner_sections(options.scheme, model, options.device, options.tokens, "layer")
    given = [f"rollout.max_response_length={LENGTH}", *overrides(offload)]
    config, architecture = make_config(sections, "largest_shape", given), model.architecture()
    items = estimate(config, architecture, options.device, options.tokens, ranks)
    own = [item for item in items if item.owner in ("learner", "optimizer")]
    host = certain_bytes(config, architecture, options.device, ranks)
    return {"parameters": architecture.parameters, "expected_gib": peak_bytes(own) / 2**30, "host_gib": host / 2**30}


def command(options: argparse.Namespace, shape: str, ranks: int, offload: str, out: Path) -> list[str]:
    """What trains the shape, and writes its measures to `out`."""
    common = ["--part", "learn", "--shape", shape, "--scheme", options.scheme, "--tokens", str(options.tokens)]
    common += ["--iterations", "1", "--device", options.device, "--timeout", f"{options.timeout:g}", "--out", str(out)]
    if options.gpu_memory is not None:
        common += ["--gpu-memory", f"{options.gpu_memory:g}"]
    if ranks > 1:
        kept = [] if offload == "none" else ["--offload", offload]
        return [str(TOOLS / "bench_ranks.py"), "--nproc", str(ranks), "--messages-only", *common, *kept]
    prompts = options.tokens // (2 * (LENGTH + PROMPT))  # two responses each, in one micro-batch
    sizes = ["--vocabulary", str(SHAPES[shape].vocabulary), "--new-tokens", str(LENGTH), "--warmup", "0"]
    sizes += ["--prompts", str(prompts), "--responses", "2", "--recompute", "layer"]
    return [str(TOOLS / "bench_step.py"), *common, *sizes, "--set", *overrides(offload)]


def overrides(offload: str) -> list[str]:
    """What the learner's configuration has beside sizes."""
    return ["train.logprob_chunk=4096", f"optim.offload={'false' if offload == 'none' else offload}"]


def run(options: argparse.Namespace, shape: str, ranks: int, offload: str) -> tuple[Record, Record | None]:
    """(outcome, seconds of all, and of a shape that trained peak_gib, of a capped one also what its allocator reserved
    and what was beside it; the environment, where there is one)."""
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as place:
        out = Path(place) / "out.json"
        done = subprocess.run(
            [sys.executable, *command(options, shape, ranks, offload, out)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        )
        report = json.loads(out.read_text()) if out.exists() else {"records": [], "environment": None}
    found: Record = {"outcome": outcome(done.returncode, done.stdout), "seconds": time.perf_counter() - begin}
    if done.returncode == 0:
        found["peak_gib"] = max(record["peak_gib"] for record in report["records"] if "peak_gib" in record)
        found |= {key: record[key] for record in report["records"] for key in BESIDE_TORCH if key in record}
    elif found["outcome"] != OUT_OF_MEMORY:
        print(done.stdout[-4000:], file=sys.stderr)
    return found, report["environment"]


def outcome(code: int, printed: str) -> str:
    """In a few words. printed: by a run that ended with the exit code."""
    if code == 0:
        return TRAINED
    if any(sign in printed for sign in MEMORY_SIGNS):
        return OUT_OF_MEMORY
    last = next((line for line in reversed(printed.splitlines()) if line.strip()), "it printed nothing")
    return f"failed with exit code {code}: {last.strip()[:200]}"


def search(shapes: Sequence[str], fits: Callable[[str], bool], trains: Callable[[str], bool]) -> None:
    """Run the largest shape that should fit; then larger ones until one does not train, or smaller until one does.

    shapes: the smallest first. trains: runs one, False where it may not either.
    """
    first = max((place for place, shape in enumerate(shapes) if fits(shape)), default=0)
    if trains(shapes[first]):
        for shape in shapes[first + 1 :]:
            if not trains(shape):
                return
    else:
        for shape in reversed(shapes[:first]):
            if trains(shape):
                return


def cases(options: argparse.Namespace) -> Iterator[tuple[int, str]]:
    return product(options.gpus, options.offload)


def measure(options: argparse.Namespace, memory_gib: float, host_gib: float) -> None:
    """All cases; the file is complete after each run. memory_gib: of a GPU. host_gib: of the host."""
    begin = time.monotonic()
    report: Record = {
        "command": shlex.join(["python", *sys.argv]),
        "environment": None,
        "memory_gib": memory_gib,
        "host_memory_gib": host_gib,
        "records": [],
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for ranks, offload in cases(options):
        measure_case(options, ranks, offload, report, begin)


def measure_case(options: argparse.Namespace, ranks: int, offload: str, report: Record, begin: float) -> None:
    """Search among the shapes, with a record of each that is looked at. begin: when the first case began."""
    asked = {shape: expected(options, shape, ranks, offload) for shape in options.shapes}
    memory_gib, host_gib = report["memory_gib"], report["host_memory_gib"]

    def fits(shape: str) -> bool:
        return asked[shape]["expected_gib"] <= ROOM * memory_gib and asked[shape]["host_gib"] <= host_gib

    def trains(shape: str) -> bool:
        if asked[shape]["host_gib"] > host_gib:
            found: Record = {"outcome": f"not run: the host has {host_gib:.0f} GiB"}
        elif time.monotonic() - begin > options.budget:
            found = {"outcome": "not run: no time left"}
        else:
            found, environment = run(options, shape, ranks, offload)
            report["environment"] = report["environment"] or environment
        labels = {"gpus": ranks, "offload": offload, "shape": shape, "scheme": options.scheme}
        report["records"].append(labels | {"tokens": options.tokens} | asked[shape] | found)
        options.out.write_text(json.dumps(report, indent=1) + "\n")
        print(line(report["records"][-1]), flush=True)
        return found["outcome"] == TRAINED

    search(options.shapes, fits, trains)


HEAD = f"{'GPUs':>4} {'offload':8} {'shape':12} {'expected GiB':>12} {'host GiB':>9} {'peak GiB':>9}  outcome"


def line(record: Record) -> str:
    peak = f"{record['peak_gib']:9.1f}" if "peak_gib" in record else f"{'':9}"
    return (
        f"{record['gpus']:4} {record['offload']:8} {record['shape']:12} {record['expected_gib']:12.1f} "
        f"{record['host_gib']:9.1f} {peak}  {record.get('outcome', '')}"
    ).rstrip()


def main() -> None:
    options = parse()
    from qarl.machine import gpu_bytes, machine_bytes

    if options.estimate:
        print(HEAD)
        for ranks, offload in cases(options):
            for shape in options.shapes:
                labels = {"gpus": ranks, "offload": offload, "shape": shape}
                print(line(labels | expected(options, shape, ranks, offload)))
        return
    memory = machine_bytes() if options.device == "cpu" else gpu_bytes()
    if memory is None:
        sys.exit("error: no GPU here; --estimate runs nothing, --device cpu takes none")
    host = options.host_memory or machine_bytes() / 2**30
    print(HEAD)
    measure(options, options.gpu_memory or memory / 2**30, host)


if __name__ == "__main__":
    main()
