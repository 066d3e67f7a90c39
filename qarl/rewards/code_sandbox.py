"""Run untrusted Python programs, one process each, with resource limits (`code_child.py`) and a wall-clock limit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import IO, Literal

from qarl.errors import UserError

CHILD = Path(__file__).with_name("code_child.py")
SETUP_FAILED = 125
OUTPUT_BYTES = 1 << 20  # a program that writes more to stdout fails
Isolation = Literal["namespace", "process"]


@dataclass(frozen=True)
class Limits:
    """Limits of one program.

    Attributes:
        wall_s: Seconds until it is killed.
        cpu_s: CPU seconds per process.
        memory_bytes: Address space per process.
        file_bytes: Size of each written file, including standard output.
        scratch_bytes: Total size of /tmp, with namespaces.
        processes: Number of processes and threads.
    """

    wall_s: float = 6.0
    cpu_s: int = 6
    memory_bytes: int = 1 << 30
    file_bytes: int = 16 << 20
    scratch_bytes: int = 64 << 20
    processes: int = 32


@dataclass(frozen=True)
class ProgramResult:
    """Result of a program.

    Attributes:
        code: Exit code, or 128 + the signal that ended it; None if it hit the wall-clock limit.
        output: Standard output; None if larger than `OUTPUT_BYTES` or not UTF-8.
    """

    code: int | None
    output: str | None

    @property
    def ok(self) -> bool:
        return self.code == 0 and self.output is not None


def run_program(program: str, stdin: str, limits: Limits, isolation: Isolation) -> ProgramResult:
    """Run a program.

    Args:
        program: Python source.
        stdin: Text for its standard input.
        limits: Resource limits.
        isolation: `namespace` or `process`.

    Raises:
        UserError: The sandbox cannot be set up on this machine.
    """
    with tempfile.TemporaryDirectory(prefix="qarl-code-") as directory:
        given = {**asdict(limits), "namespaces": isolation == "namespace", "directory": directory}
        with tempfile.TemporaryFile() as order, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            order.write(json.dumps({"program": program, "stdin": stdin}).encode())
            order.seek(0)
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(CHILD), json.dumps(given)],
                stdin=order,
                stdout=out,
                stderr=err,
                env={},
                cwd=directory,
                start_new_session=True,
            )
            code = _wait(process, limits.wall_s)
            if code == SETUP_FAILED:
                err.seek(0)
                reason = err.read(2000).decode(errors="replace").strip() or "no reason given"
                raise UserError(
                    f"code: the sandbox cannot be set up on this machine: {reason}, or set the option "
                    "isolation: process, which limits resources but gives programs access to network and files"
                )
            return ProgramResult(code, _output(out))


def _wait(process: subprocess.Popen, wall_s: float) -> int | None:
    """Kill the process group when the process ends or at the time limit. Return the exit code; None: time limit."""
    try:
        return process.wait(wall_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # without namespaces, a program may leave processes behind
        process.wait()


def _output(out: IO[bytes]) -> str | None:
    if os.fstat(out.fileno()).st_size > OUTPUT_BYTES:
        return None
    out.seek(0)
    try:
        return out.read().decode()
    except UnicodeDecodeError:
        return None


@cache
def require_sandbox(isolation: Isolation) -> None:
    """Check once per process that programs can be run.

    Raises:
        UserError: The sandbox does not work.
    """
    result = run_program("print(6 * 7)", "", Limits(wall_s=30.0), isolation)
    if result != ProgramResult(0, "42\n"):
        raise UserError(
            f"code: a trivial program ended with {result} in the sandbox; set the option isolation: process"
        )
