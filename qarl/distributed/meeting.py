"""Where the ranks of a run find each other, and where they leave notes."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from qarl.distributed.board import Board, Folder, StoreBoard
from qarl.distributed.place import Place, log_name


class Meeting:
    """The ranks' way to each other: a directory of one machine, or the store of torchrun's or deepspeed's environment.

    In a directory all that listens is on the loopback interface. The other store listens where the launcher says.
    """

    def __init__(self, place: Place) -> None:
        self.rank, self.count, self._place = place.rank, place.count, place
        if place.meeting is not None:
            for library in ("GLOO", "NCCL"):
                os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")

    def store(self, timeout: timedelta) -> Any:
        """A store of torch's for its process groups."""
        if self._place.meeting is None:
            return dist.PrefixStore("groups", self._store(timeout))
        return dist.FileStore(str(self._place.meeting / "store"), self.count)

    def board(self, timeout: timedelta) -> Board:
        """For notes. It holds on to no lock while `store` waits."""
        if self._place.meeting is None:
            return StoreBoard(dist.PrefixStore("board", self._store(timeout)))
        return Folder(self._place.meeting)

    def log_in(self, directory: Path) -> None:
        """Have what this process prints go to a file of `directory`; the first rank's goes on to the terminal."""
        if self._place.meeting is None or self.rank == 0:
            return
        with suppress(OSError):  # the log that the launcher opened does as well
            log = os.open(
                directory / log_name(self.rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o644
            )
            sys.stdout.flush()
            sys.stderr.flush()
            for fd in (1, 2):
                os.dup2(log, fd)
            os.close(log)

    def _store(self, timeout: timedelta) -> Any:
        store, _, _ = next(iter(rendezvous("env://", self.rank, self.count, timeout=timeout)))
        store.set_timeout(timeout)
        return store
