"""The run directory of several ranks. The first rank holds the lock and writes; all ranks must see the directory."""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qarl.config import Config
from qarl.distributed.ranks import Ranks
from qarl.distributed.together import on_first, together
from qarl.errors import UserError
from qarl.storage.disk import disk_errors
from qarl.storage.history import History
from qarl.storage.rundir import RunDirectory

WAIT_SECONDS = 10.0  # for a file to become visible to other nodes on a network file system


class SharedRunDirectory(RunDirectory):
    """`RunDirectory` for several ranks. All methods except `close` are collectives. own: None on all but the first
    rank.
    """

    def __init__(self, config: Config, ranks: Ranks, own: RunDirectory | None) -> None:
        super().__init__(Path(config.run_dir), config, None, [], ranks.count)
        self._group, self._own = ranks, own

    def history_at(self, start: int, own: bool) -> History:
        found = on_first(self._group, lambda: _of(self._own).history_at(start, own).model_dump())
        return History.model_validate(self._group.gather(found)[0])

    def begin(self, inputs: Mapping[str, Any] | None = None, history: History | None = None) -> list[str]:
        return on_first(self._group, lambda: _of(self._own).begin(inputs, history)) or []

    def close(self) -> None:
        if self._own is not None:
            self._own.close()


def open_run_directory(config: Config, resume: str, ranks: Ranks) -> RunDirectory:
    """`RunDirectory.open` for all ranks of a run; a collective.

    Also raises UserError on a rank that does not see the directory that the first rank writes to.
    """
    if ranks.count == 1:
        return RunDirectory.open(config, resume)
    own = on_first(ranks, lambda: RunDirectory.open(config, resume, ranks.count))
    try:
        _require_shared(Path(config.run_dir), ranks)
    except BaseException:
        if own is not None:
            own.close()
        raise
    return SharedRunDirectory(config, ranks, own)


def _of(own: RunDirectory | None) -> RunDirectory:
    assert own is not None, "the first rank has the directory"
    return own


def _require_shared(path: Path, ranks: Ranks) -> None:
    """Raise UserError on a rank that does not see the first rank's files."""
    token = path / ranks.gather(f".seen-{secrets.token_hex(8)}")[0]
    here, first = socket.gethostname(), ranks.gather(socket.gethostname())[0]

    def write() -> None:
        with disk_errors(path):
            token.touch()

    def look() -> None:
        deadline = time.monotonic() + WAIT_SECONDS
        while not os.path.exists(token):
            if time.monotonic() > deadline:
                raise UserError(
                    f"{path}: is on {here} not the directory that rank 0 writes to on {first}; set train.run_dir to "
                    "one on a disk that all nodes share"
                )
            time.sleep(0.05)

    try:
        on_first(ranks, write)
        together(ranks, look)
    finally:
        if ranks.first:
            token.unlink(missing_ok=True)
