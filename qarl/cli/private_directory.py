"""The private rendezvous directory of `qarl train --nproc`. Imports no torch.

A launcher removes its own directory at the end, and at its start those of killed launchers. The launcher locks a file
in its directory, and its ranks inherit the file descriptor. If the lock is free, they have all ended.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from qarl.storage.disk import disk_errors

PREFIX = "qarl-ranks-"
LOCK = "lock"
ROOM = 2**17  # bytes for exit records and for output before the run directory is open


@contextmanager
def rendezvous_directory() -> Iterator[tuple[Path, tuple[int, ...]]]:
    """Create the directory, and remove it at the end.

    Yields:
        The directory, and the file descriptors that the ranks inherit (the lock, if the file system supports locks).

    Raises:
        UserError: The file system of TMPDIR does not have enough free space.
    """
    with suppress(OSError):
        _remove_abandoned(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True) as name:
        with disk_errors(Path(name), ROOM, "TMPDIR"):
            (Path(name) / "room").write_bytes(bytes(ROOM))
            (Path(name) / "room").unlink()
        lock = _locked(Path(name))
        try:
            yield Path(name), () if lock is None else (lock,)
        finally:
            if lock is not None:
                os.close(lock)


def _locked(folder: Path) -> int | None:
    """Create the lock; it gets its name only once it is held. None if the file system does not support locks."""
    fd = None
    try:
        fd = os.open(folder / f".{LOCK}", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        (folder / f".{LOCK}").rename(folder / LOCK)
    except OSError:
        if fd is not None:
            os.close(fd)
        return None
    return fd


def _remove_abandoned(place: Path) -> None:
    """Remove this user's directories in `place` whose lock nobody holds. Directories without a lock are kept."""
    for folder in place.glob(f"{PREFIX}*"):
        with suppress(OSError):
            found = folder.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
                continue
            fd = os.open(folder / LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
            finally:
                os.close(fd)
