"""Start processes with a time limit, and end them with all their descendants.

`start` puts a mark into the environment of a process. All descendants inherit it, also those in a session of their own.
A hung process prints the stacks of its Python threads before it is killed, even if it waits in an NCCL collective that
never returns.
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
TAIL = 6000  # last characters of an output that are shown after a failure
_numbers = itertools.count()  # one mark per start, because a started process may itself use `start`


@dataclass
class Started:
    """A process, and its mark: the environment variable of it and all its descendants, as NAME=VALUE."""

    process: subprocess.Popen[bytes]
    mark: str

    def wait(self, limit_s: float) -> int | None:
        """Return the exit code, or None if the process runs longer. Its descendants may still run; see `end`."""
        with suppress(subprocess.TimeoutExpired):
            return self.process.wait(limit_s)
        return None

    def end(self, grace_s: float = 0.0) -> None:
        """End the process and its descendants, `grace_s` seconds after SIGTERM. 0: no SIGTERM, so that stacks show
        the hang."""
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
    """Return the ids of processes whose environment had the mark NAME=VALUE at their start, whoever their parents are.

    As a rule parents come before their children. A process that is just executing another program may be missing.
    """
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if mark.encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return sorted(pid for pid in found if pid != os.getpid())


def abort(pids: Sequence[int]) -> None:
    """Let processes that still run print their stacks, then kill them: children, the last of `pids`, before parents,
    whose end could end them without stacks."""
    for pid in reversed(pids):
        if not runs(pid):
            continue
        send(pid, signal.SIGABRT)
        end = time.monotonic() + DUMP_S
        while runs(pid) and time.monotonic() < end:
            time.sleep(0.02)
        send(pid, signal.SIGKILL)


def tail(file: Path) -> str:
    """Return the name and the last characters of a file."""
    return f"--- {file.name}\n{file.read_text(errors='replace')[-TAIL:]}"


def tails(directory: Path) -> str:
    """Return the last characters of every log below a directory."""
    return "".join(f"{tail(file)}\n" for file in sorted(directory.rglob("*.log")) if file.is_file())


def send(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def runs(pid: int) -> bool:
    """Return whether the process still runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
