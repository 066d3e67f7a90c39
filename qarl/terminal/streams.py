"""Standard output and error while the command line runs: whatever is written comes out inert, and writing never fails.

Names, paths, completions and messages of libraries all end here, whoever prints them, and by whatever function.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

from qarl.utils.text import visible


class Outlet(io.TextIOBase):
    """`stream` without its exceptions: what its encoding lacks becomes an escape, and after a failure it is silent.

    stream: None where the process was started without it. failure: of the first write that failed for another reason
    than that nobody reads any more.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self.failure: OSError | None = None

    @property
    def encoding(self) -> str:  # type: ignore[override]  # io's own text streams have it read-only too
        return getattr(self._stream, "encoding", None) or "utf-8"

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return self._stream is not None and self._stream.isatty()

    def fileno(self) -> int:
        if self._stream is None:
            raise io.UnsupportedOperation("fileno")
        return self._stream.fileno()

    def write(self, text: str) -> int:
        if self._stream is not None and text:
            try:
                self._stream.write(text.encode(self.encoding, "backslashreplace").decode(self.encoding))
            except (OSError, ValueError) as error:  # ValueError: it was closed
                self._lose(error)
        return len(text)

    def flush(self) -> None:
        if self._stream is not None:
            try:
                self._stream.flush()
            except (OSError, ValueError) as error:
                self._lose(error)

    def _lose(self, error: OSError | ValueError) -> None:
        stream, self._stream = self._stream, None
        if isinstance(error, OSError) and error.errno not in (errno.EPIPE, errno.EIO):  # EIO: the terminal is gone
            self.failure = error
        # What it still holds would fail once more when the interpreter ends, with a line about that.
        assert stream is not None
        with suppress(OSError, ValueError, AttributeError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)


class InertStream(io.TextIOBase):
    """A text stream on which every control character but the newline comes out as an escape. outlet: what is below."""

    def __init__(self, outlet: Outlet) -> None:
        self.outlet = outlet

    @property
    def encoding(self) -> str:  # type: ignore[override]  # io's own text streams have it read-only too
        return self.outlet.encoding

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return self.outlet.isatty()

    def fileno(self) -> int:
        return self.outlet.fileno()

    def write(self, text: str) -> int:
        self.outlet.write(visible(text, keep_newlines=True))
        return len(text)

    def flush(self) -> None:
        self.outlet.flush()


@contextmanager
def inert_output() -> Iterator[None]:
    """While entered, `sys.stdout` and `sys.stderr` are inert streams.

    A reader that goes away (`| head`) ends nothing. Output that could not be written for another reason, such as a full
    disk, is one line at the end, and exit code 2 where the body would have exited with 0.
    """
    _open_what_is_closed()
    before = sys.stdout, sys.stderr
    out, err = (InertStream(Outlet(stream)) for stream in before)
    sys.stdout, sys.stderr = out, err
    try:
        yield
    except SystemExit as end:
        out.flush()
        if out.outlet.failure is not None and not end.code:
            raise SystemExit(2) from None
        raise
    finally:
        out.flush()
        if out.outlet.failure is not None:
            reason = out.outlet.failure.strerror
            err.write(f"error: standard output: cannot be written: {reason}; what was printed is cut short\n")
        err.flush()
        sys.stdout, sys.stderr = before


def _open_what_is_closed() -> None:
    """Standard descriptors that the process was started without lead nowhere, instead of to the next file it opens."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
