"""The lock file `.lock` of a directory, opened by the process that writes there and by readers that query its state.

Anyone who can write to the directory could put something else under that name. So it is opened without following
links and without blocking on a FIFO, and it is written only if its content has the format of this module.
"""

from __future__ import annotations

import errno
import os
import re
import socket
import stat
from contextlib import suppress
from pathlib import Path

from qarl.errors import UserError

_LONGEST = 512  # bytes of a holder record: a host name has at most 255
_HOLDER = re.compile(rb"process \d{1,20} on [^\n\0]*\n")
_ANYHOW = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY


def open_lock(path: Path) -> int:
    """Return a descriptor of the lock file `path`, created if missing; only its owner can open it.

    Raises:
        UserError: The path is not a lock of this user: a link, a directory, a FIFO or another user's file. It is left
            unchanged.
        OSError: The directory is not writable.
    """
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


def open_lock_to_ask(path: Path) -> int | None:
    """Return a descriptor of an existing, readable lock file of any owner; None if there is none."""
    try:
        fd = os.open(path, os.O_RDONLY | _ANYHOW)
    except OSError:
        return None
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    return None


def holder(fd: int) -> str:
    """Return the last recorded holder of the lock."""
    held = os.pread(fd, _LONGEST, 0)
    return held.decode(errors="replace").strip() if _HOLDER.fullmatch(held) else "another process"


def write_holder(fd: int) -> None:
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
