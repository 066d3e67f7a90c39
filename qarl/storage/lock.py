"""The lock of a directory, `.lock`: how it is opened, by the process that writes there and by those who only ask.

Whoever may write in the directory decides what lies there under that name. It is opened without following a link,
without waiting for the other end of a FIFO, and is written to only where it holds what this module writes.
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

_LONGEST = 512  # bytes of a holder: a host's name has 255 at most
_HOLDER = re.compile(rb"process \d{1,20} on [^\n\0]*\n")
_ANYHOW = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY


def open_lock(path: Path) -> int:
    """A descriptor of the lock file `path`, which is made if it is not there; only its owner can open it.

    Raises UserError for what is no lock of this user's: a link, a directory, a FIFO, a file of another user, none of
    which is changed; OSError where the directory cannot be written.
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
    """A descriptor of an existing, readable lock file, whoever owns it; None if there is none."""
    try:
        fd = os.open(path, os.O_RDONLY | _ANYHOW)
    except OSError:
        return None
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    return None


def holder(fd: int) -> str:
    """Who wrote itself into the lock last."""
    held = os.pread(fd, _LONGEST, 0)
    return held.decode(errors="replace").strip() if _HOLDER.fullmatch(held) else "another process"


def write_holder(fd: int) -> None:
    """Name this process in the lock it holds: a courtesy to whoever is refused, which a full disk may deny.

    Other contents than such a name stay: the file may be known under a second one, as a hard link is.
    """
    with suppress(OSError):
        held = os.pread(fd, _LONGEST, 0)
        if held and not _HOLDER.fullmatch(held):
            return
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)


def _no_lock(path: Path, kind: str) -> UserError:
    return UserError(f"{path}: is {kind}, no lock of yours; remove it, or choose another directory")
