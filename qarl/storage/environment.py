"""The environment of a run (environment.json), how it differs from the previous start, and its command line."""

import os
import platform
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qarl.inputs.files import Unreadable
from qarl.inputs.json import read_json_object
from qarl.utils.versions import package_versions


def describe_environment(seed: int, inputs: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the content of environment.json. Call after thread counts are set, because it records them.

    Args:
        seed: Seed of the run.
        inputs: Digests of the run's inputs.
    """
    import torch

    return {
        "packages": package_versions(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": socket.gethostname(),
        "cpu": _cpu_name(),
        "cpu_count": os.cpu_count(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "cuda": torch.version.cuda,
        "threads": torch.get_num_threads(),
        "git_revision": _git_revision(Path(__file__).parent),
        "seed": seed,
        "command": sys.argv,
        **({"inputs": inputs} if inputs else {}),
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _git_revision(source: Path) -> str | None:
    """Revision of the checkout this package runs from (`-dirty` with local changes), None for an installed copy."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(source), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    try:
        if not git("ls-files", "__init__.py"):  # site-packages inside somebody else's repository
            return None
        return git("rev-parse", "HEAD") + ("-dirty" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def environment_changes(path: Path, now: dict[str, Any]) -> list[str]:
    """Return one line for each package, device or thread count that differs from the environment.json at `path`.

    Each difference can prevent bit-identical resumption. Empty if the file is missing or damaged.
    """
    try:
        before = read_json_object(path)
    except Unreadable:
        return []
    packages = before.pop("packages", None)
    if not isinstance(packages, dict):
        return []
    before = packages | before
    after = {**now["packages"], **now}
    keys = [*now["packages"], "python", "cpu", "gpus", "cuda", "threads", "git_revision"]
    return [f"{key} was {before.get(key)}, is {after[key]}" for key in keys if before.get(key) != after[key]]


def command_line() -> list[str]:
    """Return `qarl ...` as typed, or `python SCRIPT ...` if a user's script calls qarl from Python."""
    program = Path(sys.argv[0])
    if program.suffix == ".py" and program.name != "__main__.py":
        return ["python", *sys.argv]
    return ["qarl", *sys.argv[1:]]
