"""Rendezvous: how the ranks of a run find each other, and the key-value stores that they share."""

from __future__ import annotations

import itertools
import os
import select
import socket
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from qarl.distributed.key_value_store import DirectoryStore, KeyValueStore, TorchStore
from qarl.distributed.rank_info import RankInfo, log_name
from qarl.errors import UserError

START_S = 120.0  # minimum time for the ranks of `--nproc` to start, because they share the cores of one machine
RETRY_S = 0.1
QUIET_S = 0.1  # time in which a listener that is not a store closes a new connection or sends something

_runs = itertools.count()  # a process may train several runs, and their keys in the launcher's store must differ


class Rendezvous:
    """The rendezvous of a run: a directory of one machine, or torch's store at MASTER_ADDR:MASTER_PORT.

    With a directory, all sockets listen on the loopback interface. torch's store listens at the launcher's address.
    """

    def __init__(self, info: RankInfo) -> None:
        self.rank, self.count, self._info = info.rank, info.count, info
        self._run = f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}-{next(_runs)}"
        if info.directory is not None:
            for library in ("GLOO", "NCCL"):
                os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")

    def start_s(self, timeout_s: float) -> float:
        """Return how long a ready rank waits for the others to start, in seconds.

        This is `distributed.timeout_s`, but at least START_S under `--nproc`. There the launcher notices at once if a
        rank ends, so a short timeout would only punish slow imports.
        """
        return timeout_s if self._info.directory is None else max(timeout_s, START_S)

    def store(self, timeout_s: float) -> Any:
        """Return a torch store for process groups. Raises UserError if it is out of reach for `timeout_s` seconds."""
        if self._info.directory is None:
            return dist.PrefixStore(f"groups-{self._run}", self._connected(timeout_s))
        return dist.FileStore(str(self._info.directory / "store"), self.count)

    def key_value_store(self, timeout_s: float) -> KeyValueStore:
        """A key-value store with its own connection, so that a wait on `store` never blocks it."""
        if self._info.directory is None:
            return TorchStore(dist.PrefixStore(f"board-{self._run}", self._connected(timeout_s)))
        return DirectoryStore(self._info.directory)

    def log_in(self, directory: Path) -> None:
        """Redirect this process's output to a file in `directory`. The first rank keeps the terminal."""
        if self._info.directory is None or self.rank == 0:
            return
        with suppress(OSError):  # then keep the log that the launcher opened
            log = os.open(
                directory / log_name(self.rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o644
            )
            sys.stdout.flush()
            sys.stderr.flush()
            for fd in (1, 2):
                os.dup2(log, fd)
            os.close(log)

    def _connected(self, timeout_s: float) -> Any:
        """Return a connection to torch's store at MASTER_ADDR:MASTER_PORT; on rank 0, also start that store.

        Raises UserError after `timeout_s` seconds, or at once if this rank cannot listen on the port.
        """
        assert self._info.address is not None
        connecting = _Connecting(self.rank, self.count, self._info.address, timeout_s)
        connecting.start()
        connecting.join(timeout_s)
        if connecting.store is not None:
            connecting.store.set_timeout(timedelta(seconds=timeout_s))
            return connecting.store
        host, port = self._info.address
        raise UserError(f"MASTER_ADDR, MASTER_PORT: rank {self.rank} of {self.count}: {host}:{port} {connecting.fault}")


class _Connecting(threading.Thread):
    """Connects to torch's store in a thread, because torch waits forever for a listener that accepts and stays silent.

    Attributes:
        store: The store, once it is connected.
        fault: The error until it is connected: the end of a sentence that begins with the address.
    """

    def __init__(self, rank: int, count: int, address: tuple[str, int], timeout_s: float) -> None:
        super().__init__(name="rendezvous", daemon=True)
        self._count, self._address, self._timeout_s = count, address, timeout_s
        self._end = time.monotonic() + timeout_s
        self._listens = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        self._within = f"within {timeout_s:g} s (distributed.timeout_s)"
        self.store: Any = None
        self.fault = f"did not answer {self._within}"

    def run(self) -> None:
        if not self._listens and not self._await_listener():
            return
        self.fault = self._foreign()
        try:
            self.store = self._listening() if self._listens else self._client()
        except RuntimeError as error:  # torch.distributed raises nothing else
            reason = " ".join(str(error).split())
            taken = "EADDRINUSE" in reason
            self.fault = (
                "is in use: another program, or another process with RANK=0, listens there; choose a free MASTER_PORT"
                if taken
                else f"cannot be used: {reason[:300]}"
            )

    def _foreign(self) -> str:
        return (
            f"accepts connections, but did not answer as torch's store {self._within}: another program listens there; "
            "choose a free MASTER_PORT"
        )

    def _await_listener(self) -> bool:
        """Wait for a listener that may be a store: one that neither closes a connection nor sends data first.

        Polls in Python, because torch prints a stack trace to stderr per failed attempt.
        """
        while (left := self._end - time.monotonic()) > 0:
            try:
                with socket.create_connection(self._address, timeout=left) as connection:
                    if not select.select([connection], [], [], QUIET_S)[0]:
                        return True
                    self.fault = self._foreign()
            except OSError as error:
                reason = (error.strerror or str(error)).lower()
                self.fault = (
                    f"cannot be reached {self._within}: {reason}; rank 0 must listen there: check that it was "
                    "started and that both variables are the same for all ranks"
                )
            time.sleep(RETRY_S)
        return False

    def _listening(self) -> Any:
        """Start the store's server and return a client. `Group` waits for the other ranks, to name missing ones."""
        host, port = self._address
        timeout = timedelta(seconds=self._timeout_s)
        return dist.TCPStore(
            host, port, self._count, is_master=True, timeout=timeout, wait_for_workers=False, multi_tenant=True
        )

    def _client(self) -> Any:
        host, port = self._address
        left = timedelta(seconds=max(1.0, self._end - time.monotonic()))
        return dist.TCPStore(host, port, self._count, is_master=False, timeout=left)
