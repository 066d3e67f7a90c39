#!/usr/bin/env python3
"""What the messages between ranks cost: sums of gradients beside a reduce-scatter, codes beside 16-bit weights.

    python tools/bench_ranks.py --nproc 2 --out out.json
    python tools/bench_ranks.py --nproc 2 --shape tiny --device cpu --out out.json
    python tools/bench_ranks.py --nproc 2 --part learn zero3 --scheme w4a16 --out out.json

Each rank is a process with a GPU of its own, over NCCL, or one of gloo on the CPU. Parts:
  check    sums and codes on this backend are those of one process, to the bit; anything else ends with exit code 1
  sum      a layer's gradients and the embedding's, each rank getting its rows of the sum
  overlap  sums of layers while matrix products run
  gather   codes of a whole model, quantized from rows on every rank, beside one pass of ZeRO-3's gathers
  learn    a learner whose masters lie in rows: micro-batches with and without messages, idle rounds, updates
  zero3    its peer: a Hugging Face model under DeepSpeed's own ZeRO-3, the same tokens; with learn a table of both
All parts but the last two, unless --part says others. Times are medians after a warm-up, of the slowest rank.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
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

from process_tree import abort, leaving_at_once, traced
from ranks_bench.shapes import SHAPES

ROOT = Path(__file__).parents[1]
SOURCES = [str(ROOT / folder) for folder in (".", "kernels", "quant_formats")]
sys.path[:0] = SOURCES

PARTS = ("check", "sum", "overlap", "gather", "learn", "zero3")
ALONE = ("learn", "zero3")  # parts that --part names, or they do not run
LOG_LINES = 60  # shown of a rank that failed
Record = dict[str, Any]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--nproc", type=int, default=2, help="ranks")
    add(
        "--part",
        nargs="+",
        choices=PARTS,
        default=[part for part in PARTS if part not in ALONE],
        metavar="PART",
        help=f"of {', '.join(PARTS)}",
    )
    add("--shape", default="qwen3-8b", choices=list(SHAPES), help="of the model")
    add("--layers", type=int, help="of the model; default the shape's")
    add("--scheme", nargs="+", default=["w4a16", "fp8", "bf16"], metavar="SCHEME", help="whose codes are gathered")
    add("--tokens", type=int, default=16_384, help="learn, zero3: of a micro-batch, in sequences of 1024")
    add(
        "--hf-head",
        choices=("logits", "trl"),
        default="logits",
        help="zero3: logits of the whole batch, or TRL's chunks",
    )
    add("--offload", choices=("moments", "all"), help="learn: what the host keeps")
    add("--messages-only", action="store_true", help="learn: nothing of how it is without messages")
    add("--gpu-memory", type=float, metavar="GIB", help="of its GPU that a rank may have, as if that were smaller")
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--iterations", type=int, default=5, help="calls that are timed")
    add("--products", type=int, default=10, help="overlap: matrix products of a layer")
    add("--timeout", type=float, default=300.0, help="seconds of all")
    add("--out", type=Path, required=True, help="the JSON file")
    parsed = parser.parse_args(arguments)
    if parsed.nproc < 2 or parsed.iterations < 1 or parsed.tokens < 1:
        parser.error("--nproc takes numbers from 2, --iterations and --tokens from 1")
    if parsed.gpu_memory is not None and (parsed.gpu_memory <= 0 or parsed.device == "cpu"):
        parser.error("--gpu-memory takes GiB above 0, of --device cuda")
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
    from ranks_bench.learn import learn_records
    from ranks_bench.parts import Bench
    from step_bench.measure import cap_memory

    from qarl.distributed.exchange import GroupExchange
    from qarl.storage.environment import describe_environment

    device = torch.device("cpu")
    if options.device == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        if options.gpu_memory:
            cap_memory(options.gpu_memory, device)
    begin = time.perf_counter()
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
    bench = Bench(GroupExchange(group, rank, options.nproc, device), group, shape, options.iterations, options.products)
    records: list[Record] = []
    for part in options.part:
        if part == "gather":
            found = bench.gather(options.scheme)
        elif part == "learn":
            found = learn_records(
                bench, options.scheme, options.tokens, options.offload or False, not options.messages_only
            )
        elif part == "zero3":
            from ranks_bench.zero3 import zero3_records

            found = zero3_records(bench, options.tokens, options.hf_head, options.timeout)
        else:
            found = getattr(bench, part)()
        for record in found:
            records.append(record | {"elapsed_s": time.perf_counter() - begin})
            if rank == 0:
                print(json.dumps(records[-1]), file=sys.stderr, flush=True)
    # the host's name says nothing to a reader
    environment = {k: v for k, v in describe_environment(0).items() if k not in ("command", "host", "seed")}
    nccl = {"nccl": ".".join(map(str, torch.cuda.nccl.version()))} if device.type == "cuda" else {}
    (folder / f"records-{rank}.json").write_text(json.dumps({"environment": environment | nccl, "records": records}))
    dist.destroy_process_group()


def run_all(options: argparse.Namespace, folder: Path) -> list[Record]:
    """The ranks' results. Ends with exit code 1 where one failed, with what it printed."""
    paths = [*SOURCES, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = traced(os.environ | {"PYTHONPATH": os.pathsep.join(paths)})
    if options.device == "cpu":
        environment |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ranks, logs = [], [folder / f"log-{rank}" for rank in range(options.nproc)]
    for rank, log in enumerate(logs):
        own = environment | {"QARL_BENCH_RANK": str(rank), "QARL_BENCH_FOLDER": str(folder)}
        with log.open("wb") as out:
            errors = None if rank == 0 else out
            ranks.append(
                subprocess.Popen([sys.executable, __file__, *sys.argv[1:]], stdout=out, stderr=errors, env=own)
            )
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
        if "seconds" in record:
            record["seconds"] = max(one["seconds"] for one in several)
            record["seconds_by_rank"] = [one["seconds"] for one in several]
            record["peak_gib"] = max(one["peak_gib"] for one in several)
        if "tokens_per_s" in record:
            record["tokens_per_s"] = record["tokens"] / record["seconds"]
        if "received_gb_per_s" in record:
            record["received_gb_per_s"] = 1e-9 * record["received_bytes"] / record["seconds"]
        if "wrong_tensors" in record:
            record["wrong_tensors"] = sum(one["wrong_tensors"] for one in several)
        found.append(record)
    return found


def main() -> None:
    from ranks_bench.summary import table

    options = parse()
    if rank := os.environ.get("QARL_BENCH_RANK"):
        with leaving_at_once():
            run_rank(options, int(rank), Path(os.environ["QARL_BENCH_FOLDER"]))
        return
    with tempfile.TemporaryDirectory() as place:
        results = run_all(options, Path(place))
    report = {
        "command": shlex.join(["python", *sys.argv]),
        "environment": results[0]["environment"],
        "ranks": options.nproc,
        "shape": options.shape,
        "gpu_memory_gib": options.gpu_memory,
        "records": joined(results),
    }
    if lines := table(report["records"], options.shape, options.nproc):
        print(lines)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    if any(record.get("wrong_tensors") for record in report["records"]):
        print("results differ from one process's: see wrong_tensors", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
