"""The one exception for faults a user can cause and can fix, and the one line for those of qarl itself."""

from __future__ import annotations

import os
import sys
import tempfile
import traceback

UNEXPECTED = 70  # the exit code for a fault of the program's own (EX_SOFTWARE of sysexits.h)


class UserError(Exception):
    """A fault in what the user gave. The message is one line: the place, the offending value, the fix.

    `qarl` prints it without a traceback and exits with code 2.
    """


def unexpected(error: BaseException) -> str:
    """One line about a fault that nobody foresaw; the traceback goes into a file that the line names.

    The file is readable by its owner alone, since values of the run may stand in it.
    """
    what = " ".join(f"{type(error).__name__}: {error}".split())[:200].rstrip(": ")
    text = f"{' '.join(sys.argv)!r}\nPython {sys.version}\n\n{''.join(traceback.format_exception(error))}"
    try:
        fd, name = tempfile.mkstemp(prefix="qarl-fault-", suffix=".txt")
        with os.fdopen(fd, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
    except OSError as failure:
        reason = failure.strerror or str(failure)
        return f"a fault of qarl's own: {what}; please report it (the traceback could not be saved: {reason})"
    return f"a fault of qarl's own: {what}; please report it with the traceback in {name}"
