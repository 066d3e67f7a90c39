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

import argparse
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from process_tree import ROOT, Started, start
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from qarl.utils.machine import visible_gpus

GRACE_S = 5.0  # between asking a job to end and killing it


class Job(BaseModel):
    """command: for bash. seconds: its time limit. gpus: how many it takes."""

    model_config = ConfigDict(extra="forbid", strict=True)
    name: str = Field(pattern=r"^[A-Za-z0-9_-]+$")  # of a log
    command: str = Field(pattern=r"^[^\x00]*$")
    seconds: float = Field(gt=0, allow_inf_nan=False)
    gpus: int = Field(default=1, ge=1)


@dataclass
class Running:
    job: Job
    gpus: list[str]
    started: Started
    began: float


def read_jobs(path: Path) -> list[Job]:
    """Raises ValueError, in one line, if the file is not a list of jobs."""
    try:
        jobs = TypeAdapter(list[Job]).validate_python(yaml.safe_load(path.read_text()))
    except ValidationError as error:
        first = error.errors()[0]
        place = "".join(f", {part}" for part in first["loc"])  # the index of the job and the key
        raise ValueError(f"{path}{place}: {first['msg']}; give a list of name, command, seconds and gpus") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: {' '.join(str(error).split())}") from error
    if twice := [name for name, times in Counter(job.name for job in jobs).items() if times > 1]:
        raise ValueError(f"{path}: two jobs are called {', '.join(twice)}; a name is that of a log")
    return jobs


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
    parser.add_argument("--out", type=Path, required=True, help="folder for logs and for what the commands write")
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
