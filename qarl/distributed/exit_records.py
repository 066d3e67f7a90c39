"""Exit records that the ranks of `qarl train --nproc` write for their launcher. Imports no torch."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from qarl.distributed.fault import Fault, host
from qarl.distributed.key_value_store import DirectoryStore
from qarl.distributed.rank_info import rank_info
from qarl.errors import UserError


def write_exit_record(text: str, code: int) -> bool:
    """Write this rank's exit record for the launcher.

    Args:
        text: The error, or "" if there is none.
        code: The exit code of this process.

    Returns:
        Whether the launcher prints `text`. If not, this process prints it: there is no launcher, or this rank has a
        log file of its own.
    """
    own = _launched_rank()
    if own is None:
        return False
    rank, directory = own
    with suppress(OSError):
        DirectoryStore(directory).post(f"end-{rank}", Fault(rank, host(), code, text).text())
        return rank == 0
    return False


def mark_done() -> None:
    """Mark that this rank completed its command.

    The launcher treats exit code 0 without this mark as a failure, such as `os._exit(0)` in an objective. The mark is
    an empty file, which can be created even on a full disk.
    """
    if (own := _launched_rank()) is not None:
        rank, directory = own
        with suppress(OSError):
            (directory / f"done-{rank}").touch()


def _launched_rank() -> tuple[int, Path] | None:
    """Return this rank and its launcher's directory; None unless `qarl train --nproc` started this process."""
    try:
        own = rank_info()
    except UserError:
        return None
    return None if own is None or own.directory is None else (own.rank, own.directory)


def is_done(directory: Path, rank: int) -> bool:
    """Whether a rank has called `mark_done`."""
    return (directory / f"done-{rank}").exists()


def read_exit_record(directory: Path, rank: int) -> Fault | None:
    """Return a rank's exit record."""
    text = DirectoryStore(directory).read(f"end-{rank}")
    return None if text is None else Fault.of(text)
