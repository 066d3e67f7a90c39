#!/usr/bin/env python3
"""A learner whose masters are sharded over ranks, beside a Hugging Face model under DeepSpeed's own ZeRO-3.

    python tools/bench_ranks.py --nproc 2 --scheme w4a16 --out out.json
    python tools/bench_ranks.py --nproc 2 --shape tiny --device cpu --tokens 64 --out out.json

Each rank is a process with a GPU of its own, over NCCL, or one of gloo on the CPU. Parts:
  learn    qarl's learner: micro-batches and updates
  zero3    the same tokens under ZeRO-3
Times are medians after a warm-up, of the slowest rank.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from model_sizes import SHAPES
from process_tree import SOURCES, abort, leaving_at_once, traced, with_sources

sys.path[:0] = SOURCES

PARTS = ("learn", "zero3")
LOG_LINES = 60  # shown of a rank that failed
Record = dict[str, Any]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    from harness import count, out_file, positive

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--nproc", type=count, default=2, help="ranks, at least 2")
    add("--part", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help=f"of {', '.join(PARTS)}")
    add("--shape", default="qwen3-8b", choices=[n for n in SHAPES if SHAPES[n].family.startswith("qwen3")])
    add("--layers", type=count, help="of the model; default the shape's")
    add("--scheme", nargs="+", default=["w4a16", "fp8", "bf16"], metavar="SCHEME", help="of the learner's codes")
    add("--tokens", type=count, default=16_384, help="of a micro-batch, in sequences of 1024")
    add("--hf-head", choices=("logits", "trl"), default="logits", help="zero3: logits of all tokens, or TRL's chunks")
    add("--offload", choices=("moments", "all"), help="learn: what the host keeps")
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--iterations", type=count, default=5, help="calls that are timed")
    add("--timeout", type=positive, default=300.0, help="seconds of all")
    add("--out", type=out_file, required=True, help="the JSON file")
    parsed = parser.parse_args(arguments)
    if parsed.nproc < 2:
        parser.error("--nproc takes numbers from 2")
    if parsed.tokens > 1024 and parsed.tokens % 1024:
        parser.error("--tokens above 1024 takes multiples of it")
    if "zero3" in parsed.part:
        if find_spec("deepspeed") is None:
            parser.error("--part zero3 needs deepspeed: pip install 'qarl[deepspeed]'")
        if parsed.hf_head == "trl" and find_spec("trl") is None:
            parser.error("--hf-head trl needs trl: pip install 'trl>=1.16'")
    return parsed


def run_rank(options: argparse.Namespace, rank: int, folder: Path) -> None:
    """Measure, and write the records of this rank."""
    import torch
    import torch.distributed as dist
    from harness import environment
    from ranks_bench.rank import Bench

    from qarl.distributed.exchange import GroupExchange

    device = torch.device("cpu")
    if options.device == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=dist.FileStore(str(folder / "store"), options.nproc),
        rank=rank,
        world_size=options.nproc,
        timeout=timedelta(seconds=options.timeout),
        device_id=device if device.type == "cuda" else None,
    )
    group = dist.group.WORLD
    assert group is not None
    shape = SHAPES[options.shape]
    shape = replace(shape, layers=options.layers or shape.layers)
    bench = Bench(GroupExchange(group, rank, options.nproc, device), group, shape, options)
    records: list[Record] = []
    for part in options.part:
        if part == "learn":
            from ranks_bench.learn import learn_records as found
        else:
            from ranks_bench.zero3 import zero3_records as found
        for record in found(bench):
            records.append(record)
            if rank == 0:
                print(json.dumps(record), file=sys.stderr, flush=True)
    nccl = {"nccl": ".".join(map(str, torch.cuda.nccl.version()))} if device.type == "cuda" else {}
    result = {"environment": environment() | nccl, "records": records}
    (folder / f"records-{rank}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


def run_all(options: argparse.Namespace, folder: Path) -> list[Record]:
    """The ranks' results. Exits with code 1 if one failed, after printing its output."""
    environment = traced(with_sources(os.environ))
    if options.device == "cpu":
        environment |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ranks, logs = [], [folder / f"log-{rank}" for rank in range(options.nproc)]
    for rank, log in enumerate(logs):
        own = environment | {"QARL_BENCH_RANK": str(rank), "QARL_BENCH_FOLDER": str(folder)}
        with log.open("wb") as out:
            errors = None if rank == 0 else out
            command = [sys.executable, __file__, *sys.argv[1:]]
            ranks.append(subprocess.Popen(command, stdout=out, stderr=errors, env=own))
    end = time.monotonic() + options.timeout
    try:
        while any(rank.poll() is None for rank in ranks) and time.monotonic() < end:
            if any(rank.poll() for rank in ranks):  # the others wait for it
                time.sleep(1)
                break
            time.sleep(0.1)
        if any(rank.poll() is None for rank in ranks):
            print(f"--- not all ranks ended, after {options.timeout:g} s or a failure: their stacks", file=sys.stderr)
            abort([rank.pid for rank in ranks])
    finally:
        for process in ranks:
            process.kill()
    codes = [process.wait() for process in ranks]
    if any(codes):
        for rank, log in enumerate(logs):
            print(f"--- rank {rank}: exit code {codes[rank]}", file=sys.stderr)
            print(*log.read_text(errors="replace").splitlines()[-LOG_LINES:], sep="\n", file=sys.stderr)
        sys.exit(1)
    return [json.loads((folder / f"records-{rank}.json").read_text()) for rank in range(options.nproc)]


def joined(results: list[Record]) -> list[Record]:
    """Records of all ranks as one each: the first's, with the slowest one's seconds."""
    found = []
    for several in zip(*(result["records"] for result in results), strict=True):
        record = dict(several[0])
        record["seconds"] = max(one["seconds"] for one in several)
        record["seconds_by_rank"] = [one["seconds"] for one in several]
        record["peak_gib"] = max(one["peak_gib"] for one in several)
        if "tokens_per_s" in record:
            record["tokens_per_s"] = record["tokens"] / record["seconds"]
        found.append(record)
    return found


def main() -> None:
    from harness import Report
    from ranks_bench.summary import table

    options = parse()
    if rank := os.environ.get("QARL_BENCH_RANK"):
        with leaving_at_once():
            run_rank(options, int(rank), Path(os.environ["QARL_BENCH_FOLDER"]))
        return
    with tempfile.TemporaryDirectory() as place:
        results = run_all(options, Path(place))
    report = Report(options.out, results[0]["environment"], ranks=options.nproc, shape=options.shape)
    report.add(joined(results), " ".join(options.part))
    print(table(report.content["records"], options.shape, options.nproc))


if __name__ == "__main__":
    main()
