"""Writing files that a full disk or a crash cannot leave half-done."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from qarl.errors import UserError


def free_bytes(path: Path) -> int:
    """Bytes an unprivileged process can still write on the file system of `path` (or of its nearest parent)."""
    while not path.exists():
        path = path.parent
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize


@contextmanager
def disk_errors(path: Path, needed: int | None = None, place: str = "train.run_dir") -> Iterator[None]:
    """Turn an OSError of the body into a one-line UserError: path, reason, bytes needed and free, fix.

    place: what the user gave that says where to write.
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            need = "" if needed is None else f"{needed:,} bytes needed, "
            reason += f" ({need}{free_bytes(path):,} free)"
            fix = f"free some space, or choose another {place}, on another disk"
        elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            fix = f"make it writable, or choose another {place}"
        else:
            fix = f"check the path and the disk, or choose another {place}"
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
