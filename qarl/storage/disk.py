"""Crash-safe writes: a full disk or a crash never leaves a partial file."""

import errno
import json
import os
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from qarl.errors import MACHINE_FIXES, UserError


def free_bytes(path: Path) -> int:
    """Bytes an unprivileged process can still write on the file system of `path` (or of its nearest parent)."""
    while not os.path.exists(path) and path != path.parent:
        path = path.parent
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize


def require_free(path: Path, needed: int, what: str, fix: str) -> None:
    """Raise UserError if the file system of `path` has less than `needed` bytes free for `what`."""
    free = free_bytes(path)
    if free < needed:
        raise UserError(f"{path}: no space for {what} ({needed:,} bytes needed, {free:,} free); {fix}")


@contextmanager
def disk_errors(path: Path, needed: int | None = None, place: str = "train.run_dir") -> Iterator[None]:
    """Turn an OSError of the body into a one-line UserError with path, reason, bytes needed and free, and fix.

    Args:
        path: The file or directory that is written.
        needed: Bytes that will be written, if known.
        place: The option or key with which the user chose the path.
    """
    try:
        yield
    except OSError as error:
        raise _refusal(path, needed, place, error) from error


def _refusal(path: Path, needed: int | None, place: str, error: OSError) -> UserError:
    """Build the UserError of `disk_errors`."""
    reason = error.strerror or str(error)
    need = "" if needed is None else f"{needed:,} bytes needed, "
    if error.errno == errno.ENOSPC:
        reason += f" ({need}{free_bytes(path):,} free)"
        fix = f"free some space, or choose another {place}, on another disk"
    elif error.errno == errno.EDQUOT:  # free_bytes() does not know the quota
        reason += f" ({need}the disk itself has {free_bytes(path):,} free)"
        fix = f"remove files that count against your quota, or choose another {place}, on another disk"
    elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        fix = f"make it writable, or choose another {place}"
    else:
        fix = MACHINE_FIXES.get(error.errno or 0, f"check the path and the disk, or choose another {place}")
    return UserError(f"{path}: cannot be written: {reason}; {fix}")


def require_output(path: Path, place: str, folder: bool = False) -> None:
    """Check that an output can be written, before computing it. Creates nothing.

    Args:
        path: A file or directory, which may exist and is then replaced or filled.
        place: The option or key with which the user chose the path, for the message.
        folder: Whether a directory is written.

    Raises:
        UserError: The path is of another kind, or its parent directories cannot be created or written to.
    """
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        if path.is_symlink():
            raise UserError(f"{place}: {path}: is a broken link; remove it, or choose another") from None
    except OSError as error:
        raise UserError(f"{place}: {path}: cannot be used: {error.strerror}; choose another") from None
    else:
        if folder and not stat.S_ISDIR(mode):
            raise UserError(f"{place}: {path}: not a directory; choose another")
        if not folder and stat.S_ISDIR(mode):
            raise UserError(f"{place}: {path}: is a directory; give a file name such as {path / 'result.json'}")
        if not folder and not stat.S_ISREG(mode):
            raise UserError(f"{place}: {path}: not a regular file; choose another")
    above = path if folder else path.parent
    while not os.path.lexists(above) and above != above.parent:
        above = above.parent
    if not above.is_dir():
        raise UserError(f"{place}: {path}: cannot be written: {above} is not a directory; choose another")
    if not os.access(above, os.W_OK | os.X_OK):
        raise UserError(f"{place}: {path}: cannot be written: permission denied in {above}; choose another")


def require_kinds(folder: Path, files: Collection[str], folders: Collection[str], place: str) -> None:
    """Check the entries of an output directory that will be replaced or filled.

    Args:
        folder: The directory; it may be missing.
        files, folders: Names in it that are files and directories.
        place: The option or key with which the user can choose another directory.

    Raises:
        UserError: A directory is in the place of a file or the other way round, or a link leads nowhere.
    """
    for names, is_kind, what in ((files, stat.S_ISREG, "file"), (folders, stat.S_ISDIR, "directory")):
        for name in names:
            entry = folder / name
            try:
                mode = entry.stat().st_mode
            except FileNotFoundError:
                if entry.is_symlink():
                    raise UserError(
                        f"{entry}: is a broken link to a {what}; remove it, or choose another {place}"
                    ) from None
                continue
            except OSError as error:
                raise UserError(
                    f"{entry}: cannot be read: {error.strerror}; remove it, or choose another {place}"
                ) from None
            if not is_kind(mode):
                raise UserError(f"{entry}: not a {what}; remove it, or choose another {place}")


def names_in_out(out: Path, files: Collection[str], folders: Collection[str], what: str) -> set[str]:
    """Return the names in the `--out` directory without hidden files; empty if it does not exist yet.

    Args:
        out: The directory.
        files, folders: Names that `what` writes there.
        what: Command that writes there, for the message.

    Raises:
        UserError: It is not a directory, contains foreign files, or an entry is of the wrong kind.
    """
    require_output(out, "--out", folder=True)
    if not out.exists():
        return set()
    names = {entry.name for entry in out.iterdir() if not entry.name.startswith(".")}
    if foreign := names.difference(files, folders):
        raise UserError(f"--out: {out}: holds {min(foreign)!r}, which is not part of {what}; choose another directory")
    require_kinds(out, files, folders, "--out")
    return names


def fsync_directory(path: Path) -> None:
    """Make renames and new entries in `path` durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def atomic_write_text(path: Path, text: str) -> None:
    """Replace `path` by `text` (UTF-8) durably and atomically: readers see the old file or the new one, never a part.

    Supports one writer at a time, which the run lock guarantees. On OSError the old file is untouched.
    """
    with ExitStack() as undo:
        os.replace(_written(path, text.encode(), undo), path)
        undo.pop_all()
    fsync_directory(path.parent)


def write_in_run(path: Path, text: str, place: str = "train.run_dir") -> None:
    """Call `atomic_write_text` in a subdirectory of a run directory, which is created if needed.

    The run directory itself is not created: a run whose directory was deleted must stop. Raises UserError.
    """
    with disk_errors(path, len(text), place):
        path.parent.mkdir(exist_ok=True)
        atomic_write_text(path, text)


def write_json(path: Path, value: Any, place: str, indent: int = 1) -> None:
    """Replace `path` by strict JSON, as `atomic_write_text` does. Raises UserError; for `place` see `disk_errors`."""
    text = json.dumps(value, indent=indent, allow_nan=False) + "\n"
    with disk_errors(path, len(text), place):
        atomic_write_text(path, text)


def write_together(files: Mapping[Path, bytes], place: str) -> None:
    """Replace several files durably. No file is replaced before all new contents are on disk.

    Creates missing directories, and removes them again if the disk refuses. Supports one writer at a time.

    Args:
        files: Path to new contents.
        place: The option or key with which the user chose where to write.

    Raises:
        UserError: A file was refused. The message names it and the total number of bytes.
    """
    path = Path()
    try:
        with ExitStack() as undo:
            temporaries = {}  # path -> complete new file
            for path, data in files.items():
                for directory in reversed([d for d in (path.parent, *path.parent.parents) if not d.exists()]):
                    directory.mkdir(exist_ok=True)
                    undo.callback(remove_empty, [directory])
                temporaries[path] = _written(path, data, undo)
            for path, temporary in temporaries.items():
                os.replace(temporary, path)
            undo.pop_all()
        for directory in {path.parent for path in files}:
            fsync_directory(directory)
    except OSError as error:
        raise _refusal(path, sum(map(len, files.values())), place, error) from error


def remove_empty(directories: Iterable[Path]) -> None:
    """Remove directories, innermost first, up to the first that is not empty or missing."""
    with suppress(OSError):
        for directory in directories:
            directory.rmdir()


def _written(path: Path, data: bytes, undo: ExitStack) -> Path:
    """Write `data` durably to a temporary file next to `path`; `undo` removes it."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.unlink(missing_ok=True)  # left by an interrupted write; also avoids writing through a link or into a pipe
    with open(temporary, "xb") as file:
        undo.callback(temporary.unlink, missing_ok=True)
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return temporary
