"""The lock file `.lock` of a directory, opened by the process that writes there and by readers that query its state.

Anyone who can write to the directory could put something else under that name. So it is opened without following
links and without blocking on a FIFO, and it is written only if its content has the format of this module.
"""

import errno
import fcntl
import os
import re
import socket
import stat
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
        UserError: Another process holds the lock, or something else lies in its place: a link, a directory, a FIFO or
            another user's file. It is left unchanged.
        OSError: The directory is not writable.
    """
    fd = _open(folder / _NAME)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        by = _holder(fd)
        os.close(fd)
        raise UserError(f"{folder}: {busy.format(holder=by)}") from None
    except BaseException:
        os.close(fd)
        raise
    _held.add(fd)
    _write_holder(fd)
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
        if stat.S_ISREG(os.fstat(fd).st_mode):
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _open(path: Path) -> int:
    """Open the lock file, creating it if missing; only its owner can open it. For errors see `take_lock`."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | _ANYHOW, 0o600)
    except OSError as error:
        kind = {errno.ELOOP: "a symbolic link", errno.EISDIR: "a directory", errno.ENXIO: "a socket"}.get(
            error.errno or 0
        )
        if kind is None:
            raise
        raise _no_lock(path, kind) from None
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise _no_lock(path, "a FIFO" if stat.S_ISFIFO(found.st_mode) else "a device")
        if found.st_uid != os.geteuid():
            raise _no_lock(path, f"a file of user {found.st_uid}")
    except BaseException:
        os.close(fd)
        raise
    return fd


def _holder(fd: int) -> str:
    """Return the last recorded holder of the lock."""
    held = os.pread(fd, _LONGEST, 0)
    return held.decode(errors="replace").strip() if _HOLDER.fullmatch(held) else "another process"


def _write_holder(fd: int) -> None:
    """Record this process in the lock that it holds, for the error message of others. Best effort on a full disk.

    Content of another format is kept, because the file may be a hard link to something else.
    """
    with suppress(OSError):
        held = os.pread(fd, _LONGEST, 0)
        if held and not _HOLDER.fullmatch(held):
            return
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)


def _no_lock(path: Path, kind: str) -> UserError:
    return UserError(f"{path}: is {kind}, not a lock file of yours; remove it, or choose another directory")
