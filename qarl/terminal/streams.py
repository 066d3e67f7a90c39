"""Standard output and error of the command line: control characters are escaped, and writing never fails.

All output passes through here: names, paths, completions and messages of libraries.
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
    """Wraps `stream` without exceptions: unencodable characters are escaped, and after a failure it is silent.

    Args:
        stream: None if the process was started without it.

    Attributes:
        failure: First write error other than a closed pipe or terminal.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self.failure: OSError | None = None

    @property
    def encoding(self) -> str:  # type: ignore[override]  # also read-only in io's text streams
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
            except (OSError, ValueError) as error:  # ValueError: the stream was closed
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
        # Otherwise flushing the buffer at interpreter exit would fail again and print a message.
        assert stream is not None
        with suppress(OSError, ValueError, AttributeError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)


class InertStream(io.TextIOBase):
    """Text stream that escapes every control character except newline and writes to `outlet`."""

    def __init__(self, outlet: Outlet) -> None:
        self.outlet = outlet

    @property
    def encoding(self) -> str:  # type: ignore[override]  # also read-only in io's text streams
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
    """Replace `sys.stdout` and `sys.stderr` by inert streams inside the context.

    A closed pipe (`| head`) is ignored. Any other write error, such as a full disk, is reported in one line at the end,
    and changes exit code 0 to 2.
    """
    _open_missing_descriptors()
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
            err.write(f"error: standard output: cannot be written: {reason}; the output is incomplete\n")
        err.flush()
        sys.stdout, sys.stderr = before


def _open_missing_descriptors() -> None:
    """Open missing standard descriptors on /dev/null, so that no other file gets their number."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free descriptor
