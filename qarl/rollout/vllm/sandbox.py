"""What keeps the process of a vLLM to itself: no socket that listens, no compiled code from where others can write.

vLLM sets up torch's process groups as if there were other processes: their meeting point is a TCP store on all
interfaces (vLLM 0.24) or a file in the temporary directory (0.32), and gloo opens a listening socket for every group.
A group of one meets nobody.
"""

from __future__ import annotations

import os
import socket
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

INDUCTOR = "TORCHINDUCTOR_CACHE_DIR"


@contextmanager
def no_way_in(backend: str) -> Iterator[None]:
    """While vLLM starts, torch's groups meet in this process's memory, and each one's listening socket is closed.

    backend: of the default group, as vLLM would choose it.
    """
    before = set(listening_sockets())
    if not dist.is_initialized():
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    new_group = dist.new_group

    def new_group_without_a_socket(*args: Any, **keywords: Any) -> Any:
        try:
            return new_group(*args, **keywords)
        finally:
            close_sockets(before)

    close_sockets(before)
    dist.new_group = new_group_without_a_socket
    try:
        yield
    finally:
        dist.new_group = new_group
        close_sockets(before)


def listening_sockets() -> Iterator[tuple[int, int]]:
    """(descriptor, inode) of each internet socket of this process that listens."""
    for name in os.listdir("/proc/self/fd"):
        try:
            fd = os.dup(int(name))
        except OSError:  # the listing's own
            continue
        if not stat.S_ISSOCK(os.fstat(fd).st_mode):
            os.close(fd)
            continue
        with socket.socket(fileno=fd) as probe:
            internet = probe.family in (socket.AF_INET, socket.AF_INET6)
            if internet and probe.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                yield int(name), os.fstat(fd).st_ino


def close_sockets(but: set[tuple[int, int]]) -> None:
    """Close the listening sockets other than these, and leave under their numbers something that nothing happens to.

    Who opened one closes that number in its own time, and until then waits for events of it, which never come.
    """
    for fd, inode in list(listening_sockets()):
        if (fd, inode) not in but:
            quiet = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            os.dup2(quiet, fd, inheritable=False)
            os.close(quiet)


def keep_compiled_code_private() -> None:
    """Have torch's compiler keep its code in the user's cache instead of `/tmp/torchinductor_NAME`, as is its default.

    It runs what it finds there, and whoever comes first can make a directory of that name. A directory that the user
    chose stays.
    """
    chosen = os.environ.get(INDUCTOR)  # torch writes its default there when it is first asked
    if chosen is None or chosen.startswith(str(Path(tempfile.gettempdir(), "torchinductor_"))):
        os.environ[INDUCTOR] = str(_private_cache())


def _private_cache() -> Path:
    """A directory of this user's that no other can write in: in the cache, or a new temporary one."""
    path = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "qarl", "inductor")
    try:
        path.mkdir(parents=True, exist_ok=True)
        for folder in (path.parent, path):
            found = folder.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
                raise PermissionError
            folder.chmod(0o700)
    except (OSError, RuntimeError):  # RuntimeError: there is no home
        return Path(tempfile.mkdtemp(prefix="qarl-inductor-"))
    return path
