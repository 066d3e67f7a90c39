"""One case: a command line, the directory it runs in, its expected result, and its execution in a fork.

This process has imported everything and never runs a command itself, so a case costs only a fork. It must not start a
thread pool, because a process with one must not fork.
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
PATIENCE = 4  # wall-clock limit in multiples of the CPU limit, because other processes may use the cores
FILE_LIMIT = 256 * 2**20  # maximum bytes of any file that a case writes
READ_LIMIT = 4 * 2**20  # bytes of output that are examined

Command = Callable[[Sequence[str]], object]


@dataclass
class Case:
    """One case."""

    name: str  # kind, and number in the seed's series of that kind
    directory: Path
    mutation: str = ""  # description in one line
    argv: list[str] = field(default_factory=list)  # arguments of `qarl`
    must_refuse: bool = False  # exit code 0 is wrong

    @property
    def kind(self) -> str:
        """Return the kind of input that was mutated."""
        return self.name.rpartition("-")[0]

    @property
    def command(self) -> str:
        return self.argv[0] if self.argv else "-"

    @property
    def reads_only(self) -> bool:
        """Whether the command runs no model."""
        return self.command in ("check", "schema", "runs")

    @property
    def cwd(self) -> Path:
        """Return the working directory, three levels below the case's directory, so that `..` stays inside it."""
        return self.directory / "a" / "b" / "work"

    @property
    def limits(self) -> tuple[float, int]:
        """Return the limits: seconds of CPU, and bytes of address space on top of those at the start."""
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
    stack: str  # stack traces at the time when a signal or the limit ended it


def execute(case: Case, command: Command) -> Outcome:
    """Run `command(case.argv)` in `case.cwd`. Its output, and stacks if it is killed, go to `case.directory`."""
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
        os.killpg(pid, signal.SIGKILL)  # and its children; it is not reaped yet, so the id is still its own
    except ProcessLookupError:
        os.kill(pid, signal.SIGKILL)  # it has not created its process group yet
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
    tempfile.tempdir = None  # cached before TMPDIR changed
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
    except BaseException:  # like the interpreter, but without its cleanup
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(int(code) & 0xFF)


def _redirect(directory: Path) -> None:
    """Read standard input from /dev/null and write output to files, encoded as on a terminal: strict UTF-8."""
    for fd, path in enumerate((os.devnull, directory / "out", directory / "err")):
        target = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND if fd else os.O_RDONLY)
        os.dup2(target, fd)
        os.close(target)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)  # noqa: SIM115


def _head(path: Path) -> bytes:
    """Return the first READ_LIMIT bytes of a file."""
    with path.open("rb") as file:
        return file.read(READ_LIMIT)
