"""Run a command with a time limit, and show its stacks if it exceeds the limit."""

import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from process_tree import start, tail


def run_traced(
    command: Sequence[str], environment: Mapping[str, str], limit_s: float
) -> subprocess.CompletedProcess[str]:
    """Run a command; returns its exit code and what it printed.

    Raises:
        TimeoutError: It took longer; the message has its output, with the stacks of its processes.
    """
    with tempfile.TemporaryDirectory() as place:
        files = Path(place, "stdout"), Path(place, "stderr")
        with files[0].open("wb") as out, files[1].open("wb") as errors:
            started = start(command, environment, out, errors)
            try:
                code = started.wait(limit_s)
            finally:
                started.end()
        if code is None:
            raise TimeoutError(f"{command[0]} took more than {limit_s:g} s\n" + "\n".join(map(tail, files)))
        return subprocess.CompletedProcess(command, code, *(file.read_text(errors="replace") for file in files))
