"""Isolates vLLM's process: no listening sockets, and no compiled code from directories that other users can write to.

vLLM initializes torch's process groups even for a single process. Their rendezvous is a TCP store on all interfaces
(vLLM 0.24) or a file in the temporary directory (0.32), and gloo opens a listening socket per group. A group of one
process needs neither.
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
    """Context manager: torch's process groups use an in-memory store, and their listening sockets are closed.

    vLLM must be started inside. backend: Backend of the default group, the same as vLLM would choose.
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
        except OSError:  # the descriptor of the directory listing itself
            continue
        if not stat.S_ISSOCK(os.fstat(fd).st_mode):
            os.close(fd)
            continue
        with socket.socket(fileno=fd) as probe:
            internet = probe.family in (socket.AF_INET, socket.AF_INET6)
            if internet and probe.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                yield int(name), os.fstat(fd).st_ino


def close_sockets(but: set[tuple[int, int]]) -> None:
    """Close all listening sockets except `but`, and replace each by an idle eventfd with the same descriptor.

    The library that opened a socket keeps polling its descriptor and closes it later.
    """
    for fd, inode in list(listening_sockets()):
        if (fd, inode) not in but:
            quiet = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            os.dup2(quiet, fd, inheritable=False)
            os.close(quiet)


def keep_compiled_code_private() -> None:
    """Move torch's compiler cache from its default, `/tmp/torchinductor_NAME`, to the user's cache directory.

    The compiler runs code that it finds in its cache, and any user could create the default directory first. A
    directory that the user has configured is kept.
    """
    chosen = os.environ.get(INDUCTOR)  # torch sets the variable to its default on first use
    if chosen is None or chosen.startswith(str(Path(tempfile.gettempdir(), "torchinductor_"))):
        os.environ[INDUCTOR] = str(_private_cache())


def _private_cache() -> Path:
    """Return a directory that only this user can write to: in the user's cache, or else a new temporary directory."""
    path = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "qarl", "inductor")
    try:
        path.mkdir(parents=True, exist_ok=True)
        for folder in (path.parent, path):
            found = folder.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
                raise PermissionError
            folder.chmod(0o700)
    except (OSError, RuntimeError):  # RuntimeError: the user has no home directory
        return Path(tempfile.mkdtemp(prefix="qarl-inductor-"))
    return path
