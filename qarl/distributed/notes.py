"""Exit records that the ranks of `qarl train --nproc` write for their launcher. Imports no torch."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from qarl.distributed.board import Folder
from qarl.distributed.fault import Fault, host
from qarl.distributed.place import place
from qarl.errors import UserError


def leave_note(text: str, code: int) -> bool:
    """Write this rank's exit record for the launcher.

    Args:
        text: The error, or "" if there is none.
        code: The exit code of this process.

    Returns:
        Whether the launcher prints `text`. If not, this process prints it: there is no launcher, or this rank has a
        log file of its own.
    """
    try:
        own = place()
    except UserError:
        return False
    if own is None or own.meeting is None:
        return False
    with suppress(OSError):
        Folder(own.meeting).post(f"end-{own.rank}", Fault(own.rank, host(), code, text).text())
        return own.rank == 0
    return False


def mark_done() -> None:
    """Mark that this rank completed its command.

    The launcher takes exit code 0 without this mark for an early end, such as `os._exit(0)` in an objective. The mark
    is an empty file because a full disk still takes one.
    """
    try:
        own = place()
    except UserError:
        return
    if own is not None and own.meeting is not None:
        with suppress(OSError):
            (own.meeting / f"done-{own.rank}").touch()


def is_done(meeting: Path, rank: int) -> bool:
    """Whether a rank has called `mark_done`."""
    return (meeting / f"done-{rank}").exists()


def read_note(meeting: Path, rank: int) -> Fault | None:
    """Return a rank's exit record."""
    text = Folder(meeting).read(f"end-{rank}")
    return None if text is None else Fault.of(text)
