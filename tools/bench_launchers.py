"""What a user sees if one of two ranks fails: `qarl train --nproc 2` beside torchrun (torch's elastic agent).

    python tools/bench_launchers.py --out launchers_cpu.json

Both start the same tiny program: two ranks on the CPU that sum a tensor (gloo) until rank 1 fails. Under qarl the
program is the loop of tests/distributed/fake_loop.py, under torchrun a plain loop with `torch.distributed` and
`torch.distributed.elastic.multiprocessing.errors.record`. Recorded per fault: the time from the fault until the
launcher ended, its exit code, the rank that stderr blames, the number of lines on stderr, and processes left.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from harness import Record, Report, environment, out_file
from process_tree import ROOT, descendants, runs, with_sources

TIMEOUT_S = 10  # of a collective, in both programs
LIMIT_S = 120
SAVE_S = 40  # time from the signal to a safe stop: the step in progress, then a checkpoint
FAULTS = ("user error", "killed", "stopped", "hung in Python", "Ctrl-C in a long step")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
CONFIG = """\
model: {path: model, device: cpu}
quant: {group_size: 32}
data: {source: "task:arithmetic", max_prompt_length: 64}
reward: {functions: [{name: exact}]}
rollout: {max_response_length: 64}
train: {steps: 3}
distributed: {timeout_s: 10}
"""
MODEL = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
MODEL |= {"num_attention_heads": 4, "vocab_size": 1000, "max_position_embeddings": 1024}
OF_FAKE_LOOP = dict(zip(FAULTS, ("user 1", "kill 1", "stop 1", "late 1", "long 1"), strict=True))


def worker(fault: str) -> None:
    """One rank under torchrun."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    rank, asked = dist.get_rank(), []
    signal.signal(signal.SIGINT, lambda *_: asked.append(True))
    signal.signal(signal.SIGTERM, lambda *_: asked.append(True))
    for turn in range(10_000):
        if turn == 3:
            Path(f"began-{rank}").write_text(str(os.getpid()))
        if turn == 3 and rank == 1:
            fail(fault)
        if asked:
            time.sleep(SAVE_S)
            Path(f"saved-{rank}").touch()
            return
        dist.all_reduce(torch.ones(4))
        time.sleep(0.02)


def fail(fault: str) -> None:
    if fault == "user error":
        raise SystemExit("error: reward.functions: `x.py:f`: is broken")
    if fault in ("killed", "stopped"):
        os.kill(os.getpid(), signal.SIGKILL if fault == "killed" else signal.SIGSTOP)
    if fault == "hung in Python":
        time.sleep(1000)


def measure(launcher: str, fault: str, folder: Path) -> Record:
    """One start of `launcher` in an empty folder, with `fault` in rank 1."""
    if launcher == "torchrun":
        command = [*TORCHRUN, str(Path(__file__).resolve()), "--worker", fault]
    else:
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text(json.dumps(MODEL))
        (folder / "tiny.yaml").write_text(CONFIG)
        command = [sys.executable, str(ROOT / "tests/distributed/fake_loop.py"), "train", "--nproc", "2", "tiny.yaml"]
        command.append("train.run_dir=.")
    asked = {"FAULT": OF_FAKE_LOOP[fault], "SAVE_S": str(SAVE_S), "OMP_NUM_THREADS": "1"}
    begun = time.monotonic()
    with (folder / "stderr").open("w") as said:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=with_sources(os.environ) | asked,
            stdout=subprocess.DEVNULL,
            stderr=said,
            start_new_session=True,
        )
    marks = [folder / f"{'began' if launcher == 'torchrun' else 'pid'}-{rank}" for rank in (0, 1)]
    while not all(mark.exists() for mark in marks) and process.poll() is None:
        time.sleep(0.02)
    began = time.monotonic()
    started = descendants(process.pid)
    if fault.startswith("Ctrl-C"):
        time.sleep(1)
        process.send_signal(signal.SIGINT)
    try:
        code: int | None = process.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        code = None
        process.kill()
    took = time.monotonic() - began
    left = [pid for pid in started if runs(pid)]
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    text = (folder / "stderr").read_text()
    blamed = re.search(r"error: rank (\d)|Root Cause.*?rank *: (\d)", text, re.DOTALL)
    return {
        "launcher": launcher,
        "fault": fault,
        "start_s": began - begun,
        "end_s": took,
        "code": code,
        "lines": len(text.splitlines()),
        "blames_rank": None if blamed is None else int(blamed[blamed.lastindex or 1]),
        "left": len(left),
        "saved": sum((folder / f"saved-{rank}").exists() for rank in (0, 1)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=out_file, help="JSON file for the records")
    parser.add_argument("--worker", choices=FAULTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        from torch.distributed.elastic.multiprocessing.errors import record

        record(worker)(args.worker)
        return
    report = Report(args.out, environment())
    for fault in FAULTS:
        for launcher in ("qarl", "torchrun"):
            with tempfile.TemporaryDirectory() as folder:
                found = measure(launcher, fault, Path(folder))
            report.add([found], f"{launcher}: {fault}: {found['end_s']:.1f} s, code {found['code']}")


if __name__ == "__main__":
    main()
