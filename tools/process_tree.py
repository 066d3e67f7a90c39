"""Processes that are to end by a time: what they were doing where they did not, and the end of all that they started.

Those whose environment is `traced` print the stacks of all their Python threads when `end_hung` ends them, also out of
a collective of NCCL's that never returns.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = [str(ROOT / folder) for folder in (".", "kernels", "quant_formats")]
DUMP_S = 3.0  # for a process to print its stacks
EXEC_S = 0.2  # for a process to have its environment again, which has none while it executes another program
TAIL = 6000  # characters of an output that a failure shows


def with_sources(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` for a process that imports this checkout's packages."""
    paths = [*SOURCES, *filter(None, [environment.get("PYTHONPATH")])]
    return {**environment, "PYTHONPATH": os.pathsep.join(paths)}


def traced(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` for a process that prints its stacks at SIGABRT, and leaves no core file; so do those it starts."""
    _, most = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, most))
    return {**environment, "PYTHONFAULTHANDLER": "1"}


def descendants(pid: int) -> list[int]:
    """What the process has started, and what that has, whatever session it leads; parents before their children."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    found = [pid]
    for one in found:
        found += children.get(one, [])
    return found[1:]


def marked(name: str, value: str) -> list[int]:
    """Processes in whose environment a variable was set at their start, whoever their parents are now; as a rule
    parents before their children."""
    unsure, found, wanted = [int(path.name) for path in Path("/proc").glob("[0-9]*")], set(), f"{name}={value}".encode()
    end = time.monotonic() + EXEC_S
    while unsure:
        empty = []
        for pid in unsure:
            with suppress(OSError):
                environment = Path(f"/proc/{pid}/environ").read_bytes()
                if wanted in environment.split(b"\0"):
                    found.add(pid)
                elif not environment and os.readlink(f"/proc/{pid}/exe"):  # which threads of the kernel have not
                    empty.append(pid)  # as a rule in the middle of an exec
        if not empty or time.monotonic() > end:
            break
        time.sleep(0.002)
        unsure = empty
    return sorted(found - {os.getpid()})


def end_tree(process: subprocess.Popen[bytes]) -> None:
    """Kill the process, where it has not ended, and all that it started."""
    if process.poll() is not None:
        return
    for pid in [*reversed(descendants(process.pid)), process.pid]:
        send(pid, signal.SIGKILL)
    process.wait()


def end_hung(process: subprocess.Popen[bytes]) -> None:
    """`end_tree`, of processes that first print their stacks."""
    abort([process.pid, *descendants(process.pid)])
    end_tree(process)


def abort(pids: Sequence[int]) -> None:
    """Have those that still run print their stacks, and end them: children, which come last, before the parents whose
    end would kill them."""
    for pid in reversed(pids):
        if not runs(pid):
            continue
        send(pid, signal.SIGABRT)
        end = time.monotonic() + DUMP_S
        while runs(pid) and time.monotonic() < end:
            time.sleep(0.02)
        send(pid, signal.SIGKILL)


def run_traced(
    command: Sequence[str], environment: Mapping[str, str], limit_s: float
) -> subprocess.CompletedProcess[str]:
    """Run a command, with what it printed as text. Raises TimeoutError, with the stacks of its processes among what
    they printed, where it takes longer; then all of them are ended."""
    with tempfile.TemporaryDirectory() as place:
        files = Path(place, "stdout"), Path(place, "stderr")
        with files[0].open("wb") as out, files[1].open("wb") as errors:
            process = subprocess.Popen(
                command, env=traced(environment), stdin=subprocess.DEVNULL, stdout=out, stderr=errors
            )
            try:
                process.wait(limit_s)
            except subprocess.TimeoutExpired:
                end_hung(process)
                said = "\n".join(tail(file) for file in files)
                raise TimeoutError(f"{command[0]} took more than {limit_s:g} s\n{said}") from None
            finally:
                end_tree(process)
        stdout, stderr = (file.read_text(errors="replace") for file in files)
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


@contextmanager
def leaving_at_once() -> Iterator[None]:
    """In a rank: the process ends with a block that fails, with exit code 1. An exit as usual would first take the
    process groups down, which on a GPU waits for collectives that the other ranks never come to."""
    try:
        yield
    except BaseException:
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def tail(file: Path) -> str:
    """The last of what a file says, under its name."""
    return f"--- {file.name}\n{file.read_text(errors='replace')[-TAIL:]}"


def tails(folder: Path) -> str:
    """The last of every log below a folder; empty where there is none."""
    return "".join(f"{tail(file)}\n" for file in sorted(folder.rglob("*.log")) if file.is_file())


def send(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def runs(pid: int) -> bool:
    """Whether the process has not ended; one that nobody has asked for its exit code has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
