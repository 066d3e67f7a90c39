"""Paths that a user typed, and what the operating system says of them, as one line."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from qarl.errors import MACHINE_FIXES, UserError
from qarl.utils.text import visible

NAME_BYTES = 255  # of one component, on every common file system
PATH_BYTES = 4095  # Linux' PATH_MAX without the closing NUL

_SHOWN = 80  # characters of a path that a message repeats


def path_fault(text: str | os.PathLike[str], home: bool = True) -> str | None:
    """Why `text` cannot be a path on any machine, or names the home of a user that is not there; None if it can.

    home: whether to look up the user of a `~name`, which another machine may have.
    """
    name = os.fspath(text)
    if not name:
        return "is empty; give a path"
    if "\0" in name:
        return "holds a NUL character; give a path without it"
    try:
        encoded = os.fsencode(name)
    except UnicodeEncodeError:
        return "holds characters that no file name can have (lone surrogates); give another path"
    if len(encoded) > PATH_BYTES:
        return f"has {len(encoded):,} bytes; a path has at most {PATH_BYTES:,}"
    longest = max(map(len, encoded.split(b"/")))
    if longest > NAME_BYTES:
        return f"has a name of {longest:,} bytes in it; a file's name has at most {NAME_BYTES}"
    try:
        if home:
            Path(name).expanduser()
    except RuntimeError:  # `~name`
        return f"there is no user {name.split('/')[0][1:]!r}; write the directory out"
    return None


def user_path(text: str | os.PathLike[str], place: str) -> Path:
    """What a user typed as a path, `~` expanded; whether anything is there is for the caller to see.

    place: the option or key, for the message. Raises UserError for a text that can be no path.
    """
    if fault := path_fault(text):
        raise UserError(f"{place}: '{shown_path(text)}': {fault}")
    return Path(text).expanduser()


def shown_path(path: str | os.PathLike[str]) -> str:
    """A path for a message, on one line: the start and the end of a long one."""
    text = visible(os.fspath(path))
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN // 2]}...{text[-_SHOWN // 2 :]}"


def reason_of(error: OSError) -> str:
    """What the operating system said, without the path."""
    return (error.strerror or str(error) or type(error).__name__).lower()


@contextmanager
def path_errors(place: str, fix: str = "check the path") -> Iterator[None]:
    """Turn what looking at or opening a path raises into a one-line UserError.

    That is OSError (a missing or unreadable file, a loop of links, a directory that disappeared), ValueError (NUL,
    characters that no name can have) and RuntimeError (the home of an unknown user). place: what the line starts with.
    """
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):  # writing is `qarl.storage.disk`'s to explain
            raise
        if error.errno in (errno.EMFILE, errno.ENFILE):
            fix = MACHINE_FIXES[error.errno]
        raise UserError(f"{place}: {reason_of(error)}; {fix}") from error
    except (ValueError, RuntimeError) as error:
        raise UserError(f"{place}: {' '.join(str(error).split())}; {fix}") from error
