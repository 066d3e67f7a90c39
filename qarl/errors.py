"""`UserError`, and one-line messages for other exceptions: faults of the machine, and internal errors."""

from __future__ import annotations

import errno
import os
import re
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from qarl.utils.text import visible

UNEXPECTED = 70  # exit code of an internal error (EX_SOFTWARE of sysexits.h)

# Fix per errno that always means a fault of the machine, whatever the failed call was.
MACHINE_FIXES = {
    errno.ENOSPC: "free some space there, or choose another directory (TMPDIR for temporary files)",
    errno.EDQUOT: "remove files to get below your quota, or choose another directory (TMPDIR for temporary files)",
    errno.EMFILE: "raise the limit on open files with ulimit -n",
    errno.ENFILE: "close files of other processes, or raise the system's limit on open files with sysctl fs.file-max",
    errno.EFBIG: "raise the limit on the size of files with ulimit -f",
    errno.EROFS: "make it writable, or choose another directory (TMPDIR for temporary files)",
    errno.EIO: "check the path and the disk",
    errno.ESTALE: "check the network file system",
}
# Used only if the error names a path. Without one, these may come from a bug, such as a signal to a wrong process id.
_PATH_FIXES = {errno.EACCES: "give yourself permission, or choose another path", errno.EPERM: "choose another path"}
# Parts of out-of-memory messages of torch (GPU and CPU) and of drivers, which raise different RuntimeErrors.
_OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "cannot allocate memory", "out of memory")
_LIBRARY_ERRNO = re.compile(r"\(os error (\d{1,3})\)")  # format of Rust libraries: safetensors, tokenizers
_NO_SPACE = 64 * 2**10  # bytes; a file system with less free space counts as full


class UserError(Exception):
    """An error that the user can fix. The message is one line: the place, the offending value, the fix.

    `qarl` prints it without a traceback and exits with code 2.
    """


def machine_fault(error: BaseException) -> str | None:
    """Explain an exception that comes from the state of the machine: a full disk, a limit, a missing directory.

    Args:
        error: The exception. Its causes are examined too, because libraries wrap OSErrors.

    Returns:
        One line with the path, the reason and a fix. None for any other exception: a missing file that qarl itself
        should have checked is an internal error.
    """
    return next((line for cause in _causes(error) if (line := _explained(cause)) is not None), None)


def with_traceback(line: str, error: BaseException) -> str:
    """Save the traceback of `error` to a file, and append its path to `line` if that succeeded.

    A machine fault may be due to a leak in qarl, such as too many open files. The traceback helps to find it.
    """
    saved = _saved_traceback(error)
    return line if saved is None else f"{line} (traceback: {saved})"


def _explained(error: BaseException) -> str | None:
    """Explain a single exception by the state of the machine, with a fix; None if it has another cause."""
    if isinstance(error, FileNotFoundError):
        if _working_directory_is_gone():
            return "the working directory has been removed; change to one that exists, and run the same command again"
        if "No usable temporary directory" in str(error):
            said = " ".join((error.strerror or str(error)).split())
            return f"{said}; set TMPDIR to a writable directory with free space (and see ulimit -f)"
        return None
    if isinstance(error, RuntimeError) and "can't start new thread" in str(error):
        return "cannot start another thread; raise the limit on processes with ulimit -u"
    code = error.errno if isinstance(error, OSError) else _errno_in(str(error))
    if code is None:
        return None
    path = getattr(error, "filename", None)
    fix = MACHINE_FIXES.get(code) or (_PATH_FIXES.get(code) if path is not None else None)
    if fix is None:
        return None
    shown = os.fsdecode(path) if isinstance(path, (str, bytes, os.PathLike)) else None
    if shown is None and code == errno.ENOSPC:  # a write does not say where
        shown = ", ".join(map(str, _full_places())) or None
    place = "" if shown is None else f"{visible(shown)}: "
    return f"{place}{os.strerror(code).lower()}; {fix}"


def _errno_in(text: str) -> int | None:
    """Return the errno that a library wrote into its message; None if there is none."""
    if found := _LIBRARY_ERRNO.search(text):
        return int(found[1])
    codes = [code for code in MACHINE_FIXES if os.strerror(code) in text]
    return max(codes, key=lambda code: len(os.strerror(code)), default=None)  # one text may be a prefix of another


def _causes(error: BaseException) -> Iterator[BaseException]:
    """`error` and its chain of causes."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__


def _working_directory_is_gone() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False


def _full_places() -> list[Path]:
    """Return the default directories of qarl and its libraries whose file system is full."""
    places = [os.environ.get("TMPDIR") or "/tmp", ".", os.environ.get("QARL_CACHE"), os.environ.get("HOME")]
    full = []
    for place in filter(None, places):
        with suppress(OSError):
            status = os.statvfs(place)
            if status.f_bavail * status.f_frsize < _NO_SPACE:
                full.append(Path(place).absolute())
    return full


def unexpected(error: BaseException) -> str:
    """Save the traceback of an internal error to a file, and return a one-line message that names the file."""
    what = " ".join(f"{type(error).__name__}: {error}".split())[:200].rstrip(": ")
    saved = _saved_traceback(error)
    if saved is None:
        return f"internal error: {what}; please report it (the traceback could not be saved)"
    return f"internal error: {what}; please report it with the traceback in {saved}"


def _saved_traceback(error: BaseException) -> str | None:
    """Write the traceback of `error` to a new file and return its path; None if it cannot be written.

    The file is readable by its owner only, because it may contain values of the run.
    """
    text = f"{' '.join(sys.argv)!r}\nPython {sys.version}\n\n{''.join(traceback.format_exception(error))}"
    name = None
    try:
        fd, name = tempfile.mkstemp(prefix="qarl-fault-", suffix=".txt")
        with os.fdopen(fd, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
    except OSError:
        if name is not None:
            with suppress(OSError):
                os.unlink(name)
        return None
    return name


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error reports that the host or a GPU ran out of memory."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":  # torch's, for a GPU
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(text in str(error).lower() for text in _OUT_OF_MEMORY)


@contextmanager
def memory_errors(fix: str) -> Iterator[None]:
    """Convert out-of-memory errors to a one-line UserError.

    Args:
        fix: Advice at the end of the message: the setting to lower.

    Raises:
        UserError: The body ran out of memory.
    """
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        said = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        raise UserError(f"out of memory ({said}); {fix}") from error
