#!/usr/bin/env python3
"""Run many commands on the GPUs of one machine: each has GPUs of its own, a time limit and a log.

    python tools/run_jobs.py benchmarks/gpu_jobs.yaml --out DIR
    python tools/run_jobs.py benchmarks/gpu_jobs.yaml --only canary experts --out DIR

The file is a YAML list of jobs: `name`, `command` (for bash, in the repository's root; python is the one that runs this
tool), `gpus` (how many, default 1) and `seconds` (its limit). Jobs start in the file's order as GPUs come free; one of
several GPUs makes those behind it wait. A command sees its GPUs alone (CUDA_VISIBLE_DEVICES), and DIR as $OUT.
DIR/NAME.log has what it printed, DIR/status.txt when it started and how it ended. What a job started that ran out of
time is asked to end, and prints its Python stacks where it does not. The exit code is 1 where a job failed or ran out
of time.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml
from process_tree import ROOT, Started, start

from qarl.utils.machine import visible_gpus

GRACE_S = 5.0  # between asking a job to end and killing it


@dataclass(frozen=True)
class Job:
    """command: for bash. seconds: its time limit. gpus: how many it takes."""

    name: str
    command: str
    seconds: float
    gpus: int = 1


@dataclass
class Running:
    job: Job
    gpus: list[str]
    started: Started
    began: float


def read_jobs(path: Path) -> list[Job]:
    """Raises ValueError, in one line, where the file is not a list of jobs."""
    try:
        entries = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: {' '.join(str(error).split())}") from error
    if not isinstance(entries, list) or not entries:
        raise ValueError(f"{path}: must be a list of jobs, each with name, command and seconds")
    jobs = [_job(entry, f"{path}, job {number}") for number, entry in enumerate(entries, 1)]
    names = [job.name for job in jobs]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{path}: two jobs are called {', '.join(twice)}; a name is that of a log")
    return jobs


def _job(entry: Any, place: str) -> Job:
    known = {field.name for field in fields(Job)}
    if not isinstance(entry, dict) or not {"name", "command", "seconds"} <= set(entry) <= known:
        raise ValueError(f"{place}: needs name, command and seconds, may have gpus, and nothing else")
    job = Job(**entry)
    if not (isinstance(job.name, str) and job.name and all(c.isalnum() or c in "-_" for c in job.name)):
        raise ValueError(f"{place}: name must be letters, digits, - and _, as it is that of a log")
    if not isinstance(job.command, str) or "\0" in job.command:
        raise ValueError(f"{place}: command must be a text, without a null")
    if type(job.gpus) is not int or job.gpus < 1 or type(job.seconds) not in (int, float) or not job.seconds > 0:
        raise ValueError(f"{place}: gpus must be an integer from 1, seconds a number above 0")
    return job


class Queue:
    """The jobs of one call. out: the folder of logs. gpus: for jobs, named as in CUDA_VISIBLE_DEVICES."""

    def __init__(self, jobs: Sequence[Job], gpus: Sequence[str], out: Path) -> None:
        self.waiting, self.free, self.out, self._gpus = list(jobs), list(gpus), out, list(gpus)
        self.running: list[Running] = []
        self.failed: list[str] = []
        self.stopped = 0
        self._began = time.monotonic()

    def run(self) -> None:
        """Until all ended, or `stop`. An exception ends those that run, too."""
        try:
            while (self.waiting or self.running) and not self.stopped:
                while self.waiting and self.waiting[0].gpus <= len(self.free) and not self.stopped:
                    self._start(self.waiting.pop(0))
                time.sleep(0.1)
                for one in list(self.running):
                    self._look(one)
        finally:
            for one in self.running:
                one.started.end(GRACE_S)
                self._say(f"{one.job.name}: ended early")

    def stop(self, number: int, _: object) -> None:
        """A handler of signals. It raises nothing, which between a start and its note would leave a job behind."""
        self.stopped = self.stopped or number

    def _start(self, job: Job) -> None:
        gpus, self.free = self.free[: job.gpus], self.free[job.gpus :]
        tools = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
        visible = ",".join(gpus)
        own = {"CUDA_VISIBLE_DEVICES": visible, "OUT": str(self.out), "PATH": tools}
        with (self.out / f"{job.name}.log").open("wb") as log:
            started = start(["bash", "-c", job.command], os.environ | own, log, cwd=ROOT)
        self.running.append(Running(job, gpus, started, time.monotonic()))
        self._say(f"{job.name}: started on GPU {visible}")

    def _look(self, one: Running) -> None:
        took = time.monotonic() - one.began
        code = one.started.process.poll()
        if code is None and took < one.job.seconds:
            return
        one.started.end(GRACE_S)  # and what it may have left behind
        self.running.remove(one)
        self.free = sorted(self.free + one.gpus, key=self._gpus.index)
        if code != 0:
            self.failed.append(one.job.name)
        how = f"ran out of its {one.job.seconds:g} s" if code is None else f"exit code {code}"
        self._say(f"{one.job.name}: {how}, {took:.0f} s")

    def _say(self, what: str) -> None:
        line = f"{time.monotonic() - self._began:7.1f}  {what}"
        print(line, flush=True)
        with (self.out / "status.txt").open("a") as file:
            file.write(line + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="the jobs")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these jobs alone, in this order")
    parser.add_argument("--out", type=Path, help="folder for logs and for what the commands write")
    parser.add_argument("--gpus", type=int, nargs="+", metavar="INDEX", help="default: all that there are")
    options = parser.parse_args()
    try:
        jobs = read_jobs(options.file)
    except ValueError as error:
        sys.exit(f"error: {error}")
    by_name = {job.name: job for job in jobs}
    if unknown := sorted(set(options.only or []) - set(by_name)):
        sys.exit(f"error: --only: no job is called {', '.join(unknown)}; use the names in {options.file}")
    jobs = [by_name[name] for name in options.only or by_name]
    if options.out is None:
        sys.exit("error: --out is needed: a folder for logs and results")
    if options.gpus and (len(set(options.gpus)) < len(options.gpus) or min(options.gpus) < 0):
        sys.exit("error: --gpus: takes indices from 0, each once")
    gpus = visible_gpus() if options.gpus is None else [str(index) for index in options.gpus]
    if greedy := [job.name for job in jobs if job.gpus > len(gpus)]:
        sys.exit(f"error: {', '.join(greedy)}: needs more GPUs than the {len(gpus)} here; leave it out with --only")
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        sys.exit(f"error: --out: {options.out}: {error.strerror}; name a folder of yours")
    queue = Queue(jobs, gpus, options.out.resolve())
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, queue.stop)
    queue.run()
    if queue.stopped:
        sys.exit(128 + queue.stopped)
    if queue.failed:
        sys.exit(f"failed: {', '.join(queue.failed)}; see {options.out}/NAME.log")


if __name__ == "__main__":
    main()
