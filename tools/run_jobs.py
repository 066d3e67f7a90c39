#!/usr/bin/env python3
"""Run many commands on the GPUs of one machine, each with GPUs of its own, a time limit and a log.

    python tools/run_jobs.py benchmarks/gpu_jobs.yaml --out DIR
    python tools/run_jobs.py benchmarks/gpu_jobs.yaml --only canary experts --out DIR

The file is a YAML list of jobs: `name`, `command` (run by bash in the repository's root; `python` is the interpreter
that runs this tool), `gpus` (number, default 1) and `seconds` (time limit). Jobs start in the file's order as soon as
enough GPUs are free; a job that waits for several GPUs holds up those after it. A command sees only its own GPUs
(CUDA_VISIBLE_DEVICES), and DIR as $OUT. DIR/NAME.log has its output, DIR/status.txt when it started and how it ended. A
job that exceeds its limit gets SIGTERM, with all processes that it started; those that go on print their Python stacks
and are killed. The exit code is 1 if a job failed or exceeded its limit.
"""

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import yaml
from process_tree import ROOT, Started, start
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from qarl.utils.machine import visible_gpus

GRACE_S = 5.0  # between asking a job to end and killing it


class Job(BaseModel):
    """An entry of the file, see above."""

    model_config = ConfigDict(extra="forbid", strict=True)
    name: str = Field(pattern=r"^[A-Za-z0-9_-]+$")  # also the name of the log
    command: str
    seconds: float = Field(gt=0, allow_inf_nan=False)
    gpus: int = Field(default=1, ge=1)


def read_jobs(path: Path) -> list[Job]:
    """Read the jobs of a file. Raises ValueError if it is not a list of jobs with distinct names."""
    jobs = TypeAdapter(list[Job]).validate_python(yaml.safe_load(path.read_text()))
    if len({job.name for job in jobs}) < len(jobs):
        raise ValueError(f"{path}: two jobs have one name; their logs would be the same file")
    return jobs


def run(jobs: Sequence[Job], gpus: Sequence[str], out: Path) -> list[str]:
    """Run jobs until all have ended, and return the names of those that failed. An exception also ends running jobs.

    Args:
        jobs: Jobs in the order of their start.
        gpus: GPUs to use, named as in CUDA_VISIBLE_DEVICES.
        out: Directory of the logs.
    """
    waiting, free, failed = list(jobs), list(gpus), list[str]()
    running: list[tuple[Job, list[str], Started, float]] = []  # job, its GPUs, its process, time of its start
    begin = time.monotonic()
    tools = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])

    def say(what: str) -> None:
        line = f"{time.monotonic() - begin:7.1f}  {what}"
        print(line, flush=True)
        with (out / "status.txt").open("a") as file:
            file.write(line + "\n")

    try:
        while waiting or running:
            while waiting and waiting[0].gpus <= len(free):
                job = waiting.pop(0)
                own, free = free[: job.gpus], free[job.gpus :]
                environment = {"CUDA_VISIBLE_DEVICES": ",".join(own), "OUT": str(out), "PATH": tools}
                with (out / f"{job.name}.log").open("wb") as log:
                    started = start(["bash", "-c", job.command], os.environ | environment, log, cwd=ROOT)
                running.append((job, own, started, time.monotonic()))
                say(f"{job.name}: started on GPU {','.join(own)}")
            time.sleep(0.1)
            for one in list(running):
                job, own, started, began = one
                took, code = time.monotonic() - began, started.process.poll()
                if code is None and took < job.seconds:
                    continue
                started.end(GRACE_S)  # also descendants that it left
                running.remove(one)
                free = sorted(free + own, key=gpus.index)
                failed += [job.name] if code != 0 else []
                how = f"exceeded its limit of {job.seconds:g} s" if code is None else f"exit code {code}"
                say(f"{job.name}: {how}, {took:.0f} s")
    finally:
        for job, _, started, _ in running:
            started.end(GRACE_S)
            say(f"{job.name}: ended early")
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="YAML list of jobs")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="run only these jobs, in this order")
    parser.add_argument("--out", type=Path, required=True, help="directory of the logs and of the commands' files")
    parser.add_argument("--gpus", nargs="+", metavar="INDEX", help="GPUs to use; default: all")
    options = parser.parse_args()
    by_name, gpus = {job.name: job for job in read_jobs(options.file)}, options.gpus or visible_gpus()
    if unknown := sorted(set(options.only or []) - set(by_name)):
        sys.exit(f"error: --only: no job is called {', '.join(unknown)}; use the names in {options.file}")
    jobs = [by_name[name] for name in options.only or by_name]
    if greedy := [job.name for job in jobs if job.gpus > len(gpus)]:
        sys.exit(
            f"error: {', '.join(greedy)}: needs more than the {len(gpus)} GPUs available; leave it out with --only"
        )
    options.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that `finally` in `run` is executed
    if failed := run(jobs, gpus, options.out.resolve()):
        sys.exit(f"failed: {', '.join(failed)}; see {options.out}/NAME.log")


if __name__ == "__main__":
    main()
