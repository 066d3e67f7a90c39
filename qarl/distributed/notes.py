"""What the ranks of `qarl train --nproc` leave for their launcher to print. Imports no torch."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from qarl.distributed.board import Folder
from qarl.distributed.fault import Fault, host
from qarl.distributed.place import place
from qarl.errors import UserError


def leave_note(text: str, code: int) -> bool:
    """Tell the launcher what this process ends with. Returns whether that is all that is to be said of it.

    It is not where there is no such launcher, and for a rank with a log, which has the line as well.
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


def read_note(meeting: Path, rank: int) -> Fault | None:
    """What a rank left."""
    text = Folder(meeting).read(f"end-{rank}")
    return None if text is None else Fault.of(text)
