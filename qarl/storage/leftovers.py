"""Hidden files and directories in progress, and removing those that killed processes left incomplete."""

import os
import re
import shutil
import socket
import time
from pathlib import Path

_TRIES = 100  # then another process that deletes it concurrently finishes alone
_REST_SECONDS = 3600  # a live writer modifies its directory more often


_OWNER = re.compile(r"\.tmp-[0-9a-f]+-([0-9]{1,9})-(.+)")


def hidden(directory: Path, name: str) -> Path:
    """Return the path of `name` (hexadecimal digits) in progress, `.tmp-NAME-PID-HOST`, owned by this process."""
    return directory / f".tmp-{name}-{os.getpid()}-{socket.gethostname()}"


def remove_abandoned(directory: Path) -> None:
    """Remove entries made by `hidden` whose process has ended. Raises OSError."""
    for path in directory.iterdir():
        match = _OWNER.fullmatch(path.name)
        if match is not None and is_abandoned(path, int(match[1]), match[2]):
            delete(path)


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
