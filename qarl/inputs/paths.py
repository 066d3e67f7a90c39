"""Validation of paths that a user typed, and one-line messages for OS errors."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from qarl.errors import MACHINE_FIXES, UserError
from qarl.utils.text import visible

AnyPath = str | os.PathLike[str]
NAME_BYTES = 255  # limit per component on every common file system
PATH_BYTES = 4095  # Linux' PATH_MAX without the closing NUL

_SHOWN = 80  # characters of a path in a message


def path_fault(text: AnyPath, home: bool = True) -> str | None:
    """Return why `text` is not a valid path, or names the home of an unknown user; None if it is valid.

    home: Whether to look up the user of `~name`, which may exist only on another machine.
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
        return f"there is no user {name.split('/')[0][1:]!r}; give the full path of the directory"
    return None


def user_path(text: AnyPath, place: str) -> Path:
    """Validate a path that a user typed and expand `~`. Does not check whether it exists.

    place: The option or key, for the message. Raises UserError for an invalid path.
    """
    if fault := path_fault(text):
        raise UserError(f"{place}: '{shown_path(text)}': {fault}")
    return Path(text).expanduser()


def shown_path(path: AnyPath) -> str:
    """Format a path for a message on one line; a long one is shortened in the middle."""
    text = visible(os.fspath(path))
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN // 2]}...{text[-_SHOWN // 2 :]}"


def reason_of(error: OSError) -> str:
    """Return the operating system's message, without the path."""
    return (error.strerror or str(error) or type(error).__name__).lower()


@contextmanager
def path_errors(place: str, fix: str = "check the path") -> Iterator[None]:
    """Turn errors from accessing a path into a one-line UserError.

    Handles OSError (a missing or unreadable file, a loop of links, a directory that disappeared), ValueError (NUL,
    characters that are invalid in names) and RuntimeError (the home of an unknown user).

    Args:
        place: Prefix of the message.
        fix: End of the message: what the user can do.
    """
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):  # `qarl.storage.disk` explains write errors
            raise
        if error.errno in (errno.EMFILE, errno.ENFILE):
            fix = MACHINE_FIXES[error.errno]
        raise UserError(f"{place}: {reason_of(error)}; {fix}") from error
    except (ValueError, RuntimeError) as error:
        raise UserError(f"{place}: {' '.join(str(error).split())}; {fix}") from error
