"""Bytes and text of a file: regular files only, no more than a limit, UTF-8 with the place of the fault."""

from __future__ import annotations

import hashlib
import os
import select
import stat
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path

from qarl.errors import UserError
from qarl.inputs.paths import reason_of

TEXT_BYTES = 64 * 2**20  # of a configuration, an index, a manifest: far above any real one
LINE_BYTES = 64 * 2**20  # of one line of a file of lines

_CHUNK = 2**20
_KINDS = [
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
]


class Unreadable(UserError):
    """A file that cannot be read or is not what it should be. reason: the line without the place."""

    def __init__(self, place: str, reason: str) -> None:
        super().__init__(f"{place}: {reason}")
        self.reason = reason


class NoSuchFile(Unreadable):
    """There is nothing at the path."""


def read_bytes(path: Path, limit: int = TEXT_BYTES, stream: bool = False) -> bytes:
    """All bytes of a file.

    limit: in bytes; a larger file is refused after reading that much. stream: whether a pipe or device will do too, for
    what a user names on the command line (`/dev/stdin`, `<(command)`); a pipe that nobody writes to is empty.
    Raises NoSuchFile, Unreadable.
    """
    fd = _open(path, stream)
    try:
        data = b"".join(_chunks(fd, limit + 1))
    except OSError as error:
        raise Unreadable(str(path), f"cannot be read: {reason_of(error)}") from error
    finally:
        os.close(fd)
    if len(data) > limit:
        raise Unreadable(str(path), f"holds more than {limit:,} bytes, the most that is read of such a file")
    return data


def read_prefix(path: Path, count: int) -> tuple[bytes, int]:
    """The first `count` bytes of a file of any size, or all there are, and the file's size. Raises NoSuchFile,
    Unreadable."""
    fd = _open(path, stream=False)
    try:
        return b"".join(_chunks(fd, count)), os.fstat(fd).st_size
    except OSError as error:
        raise Unreadable(str(path), f"cannot be read: {reason_of(error)}") from error
    finally:
        os.close(fd)


def read_text(path: Path, limit: int = TEXT_BYTES, stream: bool = False) -> str:
    """All of a UTF-8 file, without a byte order mark; otherwise as `read_bytes`."""
    return decode(read_bytes(path, limit, stream), str(path))


def read_lines(path: Path, limit: int = LINE_BYTES) -> Iterator[tuple[int, bytes]]:
    """The lines of a file of any size with their numbers, from 1, line ends kept.

    limit: bytes of one line. Raises NoSuchFile, Unreadable.
    """
    with open_regular(path) as file:
        number = 0
        while True:
            try:
                line = file.readline(limit + 1)
            except OSError as error:
                raise Unreadable(str(path), f"cannot be read: {reason_of(error)}") from error
            if not line:
                return
            number += 1
            if len(line) > limit:
                raise Unreadable(f"{path} line {number}", f"has more than {limit:,} bytes")
            yield number, line


def open_regular(path: Path) -> BufferedReader:
    """A regular file, opened for reading; never waits. Raises NoSuchFile, Unreadable."""
    return os.fdopen(_open(path, stream=False), "rb")


def file_sha256(path: Path) -> tuple[int, str]:
    """Size in bytes and SHA-256 of a regular file of any size. Raises NoSuchFile, Unreadable."""
    with open_regular(path) as file:
        try:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise Unreadable(str(path), f"cannot be read: {reason_of(error)}") from error
        return file.tell(), digest


def decode(data: bytes, place: str) -> str:
    """UTF-8 bytes as text, without a byte order mark. Raises Unreadable that names line and byte."""
    try:
        return data.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        reason = f"not UTF-8 text (line {line}, byte 0x{data[error.start]:02x} at {error.start:,}); save it as UTF-8"
        raise Unreadable(place, reason) from None


def _open(path: Path, stream: bool) -> int:
    """A descriptor for reading, which never waits for the other end of a pipe."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except (FileNotFoundError, NotADirectoryError):
        kind = "is a link to a file that is not there" if os.path.islink(path) else "no such file"
        raise NoSuchFile(str(path), kind) from None
    except OSError as error:
        raise Unreadable(str(path), f"cannot be read: {reason_of(error)}") from error
    except ValueError as error:
        raise Unreadable(str(path), f"can be no path: {error}") from None
    mode = os.fstat(fd).st_mode
    if stat.S_ISREG(mode) or (stream and (stat.S_ISFIFO(mode) or stat.S_ISCHR(mode))):
        return fd
    os.close(fd)
    kind = next((name for is_kind, name in _KINDS if is_kind(mode)), "no regular file")
    raise Unreadable(str(path), f"is {kind}, not a file")


def _chunks(fd: int, most: int) -> Iterator[bytes]:
    """What a descriptor gives, up to `most` bytes; waits for a pipe that has a writer."""
    while most > 0:
        try:
            chunk = os.read(fd, min(_CHUNK, most))
        except BlockingIOError:
            select.select([fd], [], [])
            continue
        if not chunk:
            return
        most -= len(chunk)
        yield chunk
