"""Detecting and removing hidden files that killed processes left incomplete."""

import os
import shutil
import socket
import time
from pathlib import Path

_TRIES = 100  # then another process that deletes it concurrently finishes alone
_REST_SECONDS = 3600  # a live writer modifies its directory more often


def mark() -> str:
    """Return `<pid>-<host>`, the suffix of a hidden name by which `is_abandoned` identifies its owner."""
    return f"{os.getpid()}-{socket.gethostname()}"


def delete(path: Path) -> None:
    """Remove a file or a directory tree. Links are removed, not followed. Concurrent deletion is not an error."""
    for _ in range(_TRIES):
        try:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
            return
        except FileNotFoundError:  # another process has deleted an entry
            continue


def is_abandoned(path: Path, pid: int, host: str) -> bool:
    """Whether process `pid` of `host`, which created `path`, has ended and left it behind."""
    if host == socket.gethostname():
        if pid == os.getpid():  # containers reuse small pids: an earlier process with our pid made it
            return True
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass
    # Made on another host (a restarted container has a new name), or the pid is in use again.
    try:
        entries = (path, *path.iterdir()) if path.is_dir() else (path,)
        return time.time() - max(entry.lstat().st_mtime for entry in entries) > _REST_SECONDS
    except FileNotFoundError:  # its live writer has just renamed or removed it
        return False
