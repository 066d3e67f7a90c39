"""Isolates vLLM's process: no listening sockets, no compiled code from directories that others can write to.

vLLM sets up torch's process groups as if there were other processes: they meet in a TCP store on all interfaces (vLLM
0.24) or in a file in the temporary directory (0.32), and gloo opens a listening socket per group. A group of one
process needs none of this.
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
from unittest.mock import patch

import torch.distributed as dist

INDUCTOR = "TORCHINDUCTOR_CACHE_DIR"


@contextmanager
def without_listening_sockets(backend: str) -> Iterator[None]:
    """While entered, keep the store of torch's process groups in memory and close their listening sockets.

    For the start of vLLM. backend: Of the default group, as vLLM would choose it.
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
    try:
        with patch.object(dist, "new_group", new_group_without_a_socket):
            yield
    finally:
        close_sockets(before)


def listening_sockets() -> Iterator[tuple[int, int]]:
    """Yield (descriptor, inode) of each listening internet socket of this process."""
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
    """Close all listening sockets but these, and put an idle event descriptor in the place of each.

    The library that opened a socket still polls its descriptor and closes it later.
    """
    for fd, inode in list(listening_sockets()):
        if (fd, inode) not in but:
            quiet = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            os.dup2(quiet, fd, inheritable=False)
            os.close(quiet)


def keep_compiled_code_private() -> None:
    """Let torch's compiler cache its code in the user's cache instead of its default, `/tmp/torchinductor_NAME`.

    The compiler runs the code that it finds there, and any user can create that directory first. A directory that the
    user chose is kept.
    """
    chosen = os.environ.get(INDUCTOR)  # torch writes its default there when it is first asked
    if chosen is None or chosen.startswith(str(Path(tempfile.gettempdir(), "torchinductor_"))):
        os.environ[INDUCTOR] = str(_private_cache())


def _private_cache() -> Path:
    """Return a directory that only this user can write to: in the cache, or a new temporary one."""
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
