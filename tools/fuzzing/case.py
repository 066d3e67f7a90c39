"""One case: a command line, the directory it runs in, what is known about it, and its execution in a fork.

This process has everything imported and never runs a command itself, so a case costs a fork. It must not start a pool
of threads: a process with one cannot be forked.
"""

import faulthandler
import os
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Never

import psutil

# Seconds of CPU, and bytes of address space beyond this process's. A command that only reads files must be fast.
READING, WORKING = (10.0, 2 * 2**30), (60.0, 6 * 2**30)
PATIENCE = 4  # wall seconds per second of CPU: other processes may keep a case from the cores
FILE_LIMIT = 256 * 2**20  # bytes of any file that a case writes
READ_LIMIT = 4 * 2**20  # bytes of output that are looked at

Command = Callable[[Sequence[str]], object]


@dataclass
class Case:
    """One case."""

    name: str  # kind, and number in the seed's series of that kind
    directory: Path
    mutation: str = ""  # in one line
    argv: list[str] = field(default_factory=list)  # of `qarl`
    must_refuse: bool = False  # exit code 0 is wrong

    @property
    def kind(self) -> str:
        """What was mutated."""
        return self.name.rpartition("-")[0]

    @property
    def command(self) -> str:
        return self.argv[0] if self.argv else "-"

    @property
    def reads_only(self) -> bool:
        """Whether it runs no model."""
        return self.command in ("check", "schema", "runs")

    @property
    def cwd(self) -> Path:
        """Three levels below the case's directory, so that `..` stays inside it."""
        return self.directory / "a" / "b" / "work"

    @property
    def limits(self) -> tuple[float, int]:
        """Seconds of CPU, and bytes beyond those it starts with."""
        return READING if self.reads_only else WORKING

    def remove(self) -> None:
        """Remove the directory."""
        with suppress(FileNotFoundError):
            shutil.rmtree(self.directory)


@dataclass(frozen=True)
class Outcome:
    """How a case ended."""

    code: int  # negative for a signal
    timed_out: bool
    seconds: float  # wall seconds
    out: bytes
    err: bytes
    stack: str  # where it was when a signal or the limit ended it


def execute(case: Case, command: Command) -> Outcome:
    """Run `command(case.argv)` in `case.cwd`; its output and the stack of a cut-off go to `case.directory`."""
    for name in ("home", "tmp"):
        (case.directory / name).mkdir(exist_ok=True)
    begin, limit_s = time.monotonic(), case.limits[0]
    pid = os.fork()
    if pid == 0:
        _child(case, command)
    watch = os.pidfd_open(pid)
    timed_out = not select.select([watch], [], [], PATIENCE * limit_s)[0]
    os.close(watch)
    try:
        os.killpg(pid, signal.SIGKILL)  # what it started too; it is not reaped yet, so the id is still its own
    except ProcessLookupError:
        os.kill(pid, signal.SIGKILL)  # not yet the head of its group
    _, status, usage = os.wait4(pid, 0)
    timed_out |= usage.ru_utime + usage.ru_stime > limit_s
    out, err, stack = (_head(case.directory / name) for name in ("out", "err", "stack"))
    code, seconds = os.waitstatus_to_exitcode(status), time.monotonic() - begin
    return Outcome(code, timed_out, seconds, out, err, stack.decode(errors="replace"))


def _child(case: Case, command: Command) -> Never:
    os.setpgid(0, 0)
    stack = open(case.directory / "stack", "w")  # noqa: SIM115 - open until the process ends
    _redirect(case.directory)
    home, tmp = str(case.directory / "home"), str(case.directory / "tmp")
    os.environ |= {"HOME": home, "HF_HOME": home, "XDG_CACHE_HOME": home, "TMPDIR": tmp, "HF_HUB_OFFLINE": "1"}
    tempfile.tempdir = None  # which was looked up in the environment before
    os.chdir(case.cwd)
    limit_s, memory = case.limits
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + memory,) * 2)
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_LIMIT,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.enable(stack)
    faulthandler.dump_traceback_later(PATIENCE * limit_s - 0.5, file=stack)
    sys.argv = ["qarl", *case.argv]
    code: object = 0
    try:
        command(case.argv)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # as an interpreter ends, without taking down what was imported
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(int(code) & 0xFF)


def _redirect(directory: Path) -> None:
    """Standard input from nothing, output to files, as a user's terminal takes it: UTF-8, surrogates refused."""
    for fd, path in enumerate((os.devnull, directory / "out", directory / "err")):
        target = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND if fd else os.O_RDONLY)
        os.dup2(target, fd)
        os.close(target)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)  # noqa: SIM115


def _head(path: Path) -> bytes:
    """The first bytes of a file."""
    with path.open("rb") as file:
        return file.read(READ_LIMIT)
