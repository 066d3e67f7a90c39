"""Start processes that must end by a time, and end everything that they started.

A process that `start` makes carries a mark in its environment, which everything that it starts inherits, whatever
session that leads. Before a hung process is killed it prints the stacks of its Python threads, also if it waits in a
NCCL collective that never returns.
"""

import itertools
import os
import resource
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parents[1]
SOURCES = [str(ROOT / folder) for folder in (".", "kernels", "quant_formats")]
DUMP_S = 3.0  # time for a process to print its stacks
TAIL = 6000  # characters of an output that a failure shows
_numbers = itertools.count()  # one mark per start, because a process that was started may start others in the same way


@dataclass
class Started:
    """A process, and the environment variable that it and everything it starts have, as NAME=VALUE."""

    process: subprocess.Popen[bytes]
    mark: str

    def wait(self, limit_s: float) -> int | None:
        """The exit code, or None if the process still runs after `limit_s`. What it started may be left; see `end`."""
        with suppress(subprocess.TimeoutExpired):
            return self.process.wait(limit_s)
        return None

    def end(self, grace_s: float = 0.0) -> None:
        """End the process and all that it started, `grace_s` seconds after SIGTERM; 0: without, so that the stacks are
        those of the hang."""
        deadline = time.monotonic() + grace_s
        for pid in marked(self.mark) if grace_s else ():
            send(pid, signal.SIGTERM)
        while any(map(runs, left := marked(self.mark))) and time.monotonic() < deadline:
            time.sleep(0.05)
        abort(left)
        self.process.kill()
        self.process.wait()


def start(
    command: Sequence[str],
    environment: Mapping[str, str],
    out: IO[bytes],
    errors: IO[bytes] | int = subprocess.STDOUT,
    cwd: Path | None = None,
) -> Started:
    """Start a command that imports this checkout's packages, prints its stacks at SIGABRT and leaves no core file."""
    _, most = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, most))
    paths = [*SOURCES, *filter(None, [environment.get("PYTHONPATH")])]
    mark = f"QARL_STARTED_{os.getpid()}_{next(_numbers)}"
    own = {"PYTHONPATH": os.pathsep.join(paths), "PYTHONFAULTHANDLER": "1", mark: "1"}
    streams = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": errors}
    process = subprocess.Popen(command, env={**environment, **own}, cwd=cwd, start_new_session=True, **streams)
    return Started(process, f"{mark}=1")


def marked(mark: str) -> list[int]:
    """Processes whose environment had NAME=VALUE at their start, whoever their parents are now.

    As a rule parents come before their children. A process has no environment while it executes another program.
    """
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if mark.encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return sorted(pid for pid in found if pid != os.getpid())


def abort(pids: Sequence[int]) -> None:
    """Let processes that still run print their stacks, and end them: children, which come last, before the parents
    whose end would kill them."""
    for pid in reversed(pids):
        if not runs(pid):
            continue
        send(pid, signal.SIGABRT)
        end = time.monotonic() + DUMP_S
        while runs(pid) and time.monotonic() < end:
            time.sleep(0.02)
        send(pid, signal.SIGKILL)


def tail(file: Path) -> str:
    """The end of a file, after its name."""
    return f"--- {file.name}\n{file.read_text(errors='replace')[-TAIL:]}"


def tails(folder: Path) -> str:
    """The end of every log below a folder."""
    return "".join(f"{tail(file)}\n" for file in sorted(folder.rglob("*.log")) if file.is_file())


def send(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def runs(pid: int) -> bool:
    """Whether the process has not ended. A zombie has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
