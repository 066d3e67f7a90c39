"""Reading bytes and text: regular files only, with a size limit, and UTF-8 errors that name their position."""

import hashlib
import os
import select
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path

from qarl.errors import UserError
from qarl.inputs.paths import reason_of

TEXT_BYTES = 64 * 2**20  # limit for a configuration, an index or a manifest, far above any real one
LINE_BYTES = 64 * 2**20  # limit per line of a line-based file

_CHUNK = 2**20
_KINDS = [
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
]


class Unreadable(UserError):
    """A file that cannot be read or has invalid content. reason: the message without the path."""

    def __init__(self, place: str, reason: str) -> None:
        super().__init__(f"{place}: {reason}")
        self.reason = reason


class NoSuchFile(Unreadable):
    """The file does not exist."""


def read_bytes(path: Path, limit: int = TEXT_BYTES, stream: bool = False) -> bytes:
    """Read all bytes of a file.

    Args:
        path: The file.
        limit: Maximum size in bytes; a larger file is rejected after reading that much.
        stream: Allow pipes and devices, for paths from the command line (`/dev/stdin`, `<(command)`). A
            pipe without a writer reads as empty.

    Raises:
        NoSuchFile: There is no such file.
        Unreadable: It cannot be read, is too large, or is of another kind.
    """
    with os.fdopen(_open(path, stream), "rb", buffering=0) as file, _reading(path):
        data = b"".join(_chunks(file.fileno(), limit + 1))
    if len(data) > limit:
        raise Unreadable(str(path), f"holds more than {limit:,} bytes, the limit for such a file")
    return data


def read_prefix(path: Path, count: int) -> tuple[bytes, int]:
    """Return up to `count` bytes from the start of a file of any size, and its size. Raises NoSuchFile, Unreadable."""
    with open_regular(path) as file, _reading(path):
        return file.read(count), os.fstat(file.fileno()).st_size


def read_text(path: Path, limit: int = TEXT_BYTES, stream: bool = False) -> str:
    """Read a UTF-8 file, without a byte order mark; otherwise like `read_bytes`."""
    return decode(read_bytes(path, limit, stream), str(path))


def read_lines(path: Path, limit: int = LINE_BYTES) -> Iterator[tuple[int, bytes]]:
    """Yield (line number from 1, line with its line end) of a file of any size.

    limit: Maximum bytes per line. Raises NoSuchFile, Unreadable.
    """
    with open_regular(path) as file, _reading(path):
        number = 0
        while line := file.readline(limit + 1):
            number += 1
            if len(line) > limit:
                raise Unreadable(f"{path} line {number}", f"has more than {limit:,} bytes")
            yield number, line


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file for reading, without blocking. Raises NoSuchFile, Unreadable."""
    return os.fdopen(_open(path, stream=False), "rb")


def file_sha256(path: Path) -> tuple[int, str]:
    """Return size in bytes and SHA-256 of a regular file of any size. Raises NoSuchFile, Unreadable."""
    with open_regular(path) as file, _reading(path):
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return file.tell(), digest


_digests: dict[tuple[int, ...], str] = {}  # file identity, see `sha256_once` -> digest


def sha256_once(path: Path) -> str:
    """Return the SHA-256 of a regular file. Hashes it again only if its inode, size or times have changed.

    Raises NoSuchFile, Unreadable.
    """
    with open_regular(path) as file:
        found = os.fstat(file.fileno())
    # Replacing or writing a file changes this.
    identity = found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
    if identity not in _digests:
        _digests[identity] = file_sha256(path)[1]
    return _digests[identity]


def decode(data: bytes, place: str) -> str:
    """Decode UTF-8 without a byte order mark. Raises Unreadable, which names line and byte."""
    try:
        return data.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        reason = f"not UTF-8 text (line {line}, byte 0x{data[error.start]:02x} at {error.start:,}); save it as UTF-8"
        raise Unreadable(place, reason) from None


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn an OSError into an Unreadable file."""
    try:
        yield
    except OSError as error:
        raise Unreadable(str(path), f"cannot be read: {reason_of(error)}") from error


def _open(path: Path, stream: bool) -> int:
    """Return a descriptor for reading, without waiting for the other end of a pipe."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except (FileNotFoundError, NotADirectoryError):
        kind = "is a link to a missing file" if os.path.islink(path) else "no such file"
        raise NoSuchFile(str(path), kind) from None
    except OSError as error:
        raise Unreadable(str(path), f"cannot be read: {reason_of(error)}") from error
    except ValueError as error:
        raise Unreadable(str(path), f"is not a valid path: {error}") from None
    mode = os.fstat(fd).st_mode
    if stat.S_ISREG(mode) or (stream and (stat.S_ISFIFO(mode) or stat.S_ISCHR(mode))):
        return fd
    os.close(fd)
    kind = next((name for is_kind, name in _KINDS if is_kind(mode)), "a special file")
    raise Unreadable(str(path), f"is {kind}, not a file")


def _chunks(fd: int, most: int) -> Iterator[bytes]:
    """Yield data of a descriptor, up to `most` bytes; waits for a pipe that has a writer."""
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
