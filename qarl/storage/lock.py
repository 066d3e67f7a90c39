"""The lock file `.lock` of a directory, opened by the process that writes there and by readers that query its state.

It is opened without following links and without blocking on a FIFO, because others may be able to write there.
"""

import fcntl
import os
import re
import socket
from contextlib import suppress
from pathlib import Path

from qarl.errors import UserError

_NAME = ".lock"
_LONGEST = 512  # bytes of a holder record: a host name has at most 255
_HOLDER = re.compile(rb"process \d{1,20} on [^\n\0]*\n")
_ANYHOW = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY

# A forked child inherits the lock, and may outlive a killed run. So children close it at once.
_held: set[int] = set()


def _drop_in_child() -> None:
    for fd in _held:
        os.close(fd)
    _held.clear()


os.register_at_fork(after_in_child=_drop_in_child)


def take_lock(folder: Path, busy: str) -> int:
    """Lock a directory for this process. The lock ends with `release_lock`, or with the process.

    Args:
        folder: The directory.
        busy: Message for a directory that is locked already; `{holder}` stands for the process that holds it.

    Returns:
        The descriptor of the lock.

    Raises:
        UserError: Another process holds the lock.
        OSError: The directory is not writable, or a link, a directory or another user's file has the lock's name.
    """
    fd = os.open(folder / _NAME, os.O_RDWR | os.O_CREAT | _ANYHOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        held = os.pread(fd, _LONGEST, 0)
        by = held.decode(errors="replace").strip() if _HOLDER.fullmatch(held) else "another process"
        os.close(fd)
        raise UserError(f"{folder}: {busy.format(holder=by)}") from None
    except BaseException:
        os.close(fd)
        raise
    _held.add(fd)
    with suppress(OSError):  # a full disk
        held = os.pread(fd, _LONGEST, 0)
        if held and not _HOLDER.fullmatch(held):  # a file of another program keeps its contents
            return fd
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    return fd


def release_lock(fd: int) -> None:
    """End a lock of `take_lock`."""
    _held.discard(fd)
    os.close(fd)


def is_locked(folder: Path) -> bool:
    """Return whether a process holds the lock of a directory. Briefly takes it in shared mode, without waiting."""
    try:
        fd = os.open(folder / _NAME, os.O_RDONLY | _ANYHOW)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False
