"""What a killed process left half-written under a hidden name, and removing it."""

from __future__ import annotations

import os
import shutil
import socket
import time
from pathlib import Path

_TRIES = 100  # after which whoever else deletes it may go on alone
_REST_SECONDS = 3600  # no live writer leaves its directory alone for so long


def mark() -> str:
    """`<pid>-<host>`: the end of a hidden name, by which `is_abandoned` knows whose it is."""
    return f"{os.getpid()}-{socket.gethostname()}"


def delete(path: Path) -> None:
    """Remove a directory and all in it, or a file; of a link the link alone, not its target. What another
    process deletes meanwhile is no fault."""
    for _ in range(_TRIES):
        try:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
            return
        except FileNotFoundError:  # of something in it, which another process has deleted
            continue


def is_abandoned(path: Path, pid: int, host: str) -> bool:
    """Whether the process `pid` of `host`, which made `path`, is gone and has left it."""
    if host == socket.gethostname():
        if pid == os.getpid():  # containers hand out the same small pids: this is an earlier namesake's
            return True
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass
    # Another host's (a restarted container has a new name), or a pid in use again.
    try:
        entries = (path, *path.iterdir()) if path.is_dir() else (path,)
        return time.time() - max(entry.lstat().st_mtime for entry in entries) > _REST_SECONDS
    except FileNotFoundError:  # its writer, which lives, has just given it its name or removed it
        return False
