"""Atomic creation of an output directory: it appears complete or not at all. Does not import torch."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from qarl.errors import UserError
from qarl.storage.disk import disk_errors, fsync_directory, remove_empty, require_output


def require_vacant(out: Path) -> None:
    """Raise UserError unless `out` does not exist or is an empty directory."""
    require_output(out, "OUT", folder=True)
    with disk_errors(out, place="OUT"):
        if out.exists() and any(out.iterdir()):
            raise UserError(f"{out}: exists and is not empty; remove it, or choose another OUT")


@contextmanager
def staged(out: Path) -> Iterator[Path]:
    """Yield a hidden directory beside `out` that is renamed to `out` when the block ends, and removed if it raises.

    Leftovers of killed processes are removed first.
    Raises UserError if `out` is not empty, another process is writing it, or it cannot be written.
    """
    require_vacant(out)
    final = out.resolve()
    hidden = final.with_name(f".{final.name}.partial")
    created = [folder for folder in final.parents if not folder.exists()]
    try:
        with disk_errors(out, place="OUT"):
            final.parent.mkdir(parents=True, exist_ok=True)
            lock = _claim(hidden, out)
            try:
                yield hidden
                fsync_directory(hidden)
                require_vacant(out)
                os.rename(hidden, final)
                created = []
                fsync_directory(final.parent)
            finally:
                shutil.rmtree(hidden, ignore_errors=True)  # exists only if something above failed
                os.close(lock)
    finally:
        remove_empty(created)


def _claim(hidden: Path, out: Path) -> int:
    """Create or take over `hidden`, lock it and empty it. Returns the lock, which the end of this process releases."""
    hidden.mkdir(exist_ok=True)
    fd = os.open(hidden, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)  # not a link: it is emptied
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Before the lock was taken, another process may have renamed the directory to its final name.
        if not hidden.exists() or not os.path.samestat(os.fstat(fd), hidden.stat()):
            raise BlockingIOError
        for entry in hidden.iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    except BlockingIOError:
        os.close(fd)
        raise UserError(f"{out}: another process is writing it; wait for it, or choose another OUT") from None
    except BaseException:
        os.close(fd)
        raise
    return fd
