"""Cache of converted models: files derived from a model file, keyed by the digest of their source.

    $QARL_CACHE, or $XDG_CACHE_HOME/qarl, or ~/.cache/qarl
        models/<sha256 of the source, the part and the converter's versions>/    the converted files
                                                    manifest.json                     bytes and SHA-256 of each

An entry is used only if its files are those of its manifest, with the same digests. Anything else under its name is
replaced. An entry is published by one rename, so two processes may create the same one.
"""

import hashlib
import json
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from qarl.errors import UserError
from qarl.inputs.files import Unreadable, sha256_once
from qarl.inputs.json import read_json_object
from qarl.inputs.paths import path_fault, reason_of
from qarl.inputs.schema import FileDigest, FileName, Record, checked
from qarl.storage.disk import fsync_directory, require_free
from qarl.storage.leftovers import delete, hidden, remove_abandoned

FORMAT_VERSION = 1
SPARE_BYTES = 256 * 2**20  # free disk space to leave after a conversion

_MANIFEST = "manifest.json"
_logger = logging.getLogger("qarl.conversions")
_logged: set[str] = set()  # reasons that were logged; each is logged once per process

T = TypeVar("T")


class _Manifest(Record):
    format_version: int
    files: dict[FileName, FileDigest]


def conversions_directory() -> Path:
    """Return the directory of converted models, which may not exist."""
    base = os.environ.get("QARL_CACHE") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "qarl")
    if fault := path_fault(base):
        raise UserError(f"QARL_CACHE: {base[:80]!r}: {fault}")
    return Path(base).expanduser() / "models"


def converted(
    source: Path,
    part: str,
    versions: dict[str, str],
    read: Callable[[], T],
    write: Callable[[T, Path], None],
    size: int,
) -> Path | None:
    """Return the directory of a converted model, converting it unless an intact copy is cached.

    Args:
        source: The file to convert.
        part: Which part of the conversion.
        versions: Versions of everything that influences the result.
        read: Converts in memory. Its exceptions are passed to the caller.
        write: `write(value, directory)` writes plain files into the directory.
        size: Approximate size of these files, in bytes.

    Returns:
        None if the result cannot be stored (an unwritable or full disk, or another user's directory). This is logged
        once; the caller then converts in memory.
    """
    try:
        root = _root()
        key = _key(source, part, versions)
        if _intact(root / key):
            return root / key
        require_free(root, size + SPARE_BYTES, "a converted model", "free some space")
        remove_abandoned(root)
        temporary = hidden(root, key)
        temporary.mkdir(mode=0o700)
    except (OSError, UserError) as error:
        _report(error)
        return None
    try:
        value = read()
        try:
            write(value, temporary)
            _seal(temporary)
            _publish(temporary, root / key)
        except Exception as error:  # libraries report a full disk in different ways
            _report(error)
            return None
        return root / key
    finally:
        with suppress(OSError):
            delete(temporary)


def _report(error: Exception) -> None:
    """Log once why converted models cannot be kept."""
    reason = " ".join(str(error).split())[:200]
    if isinstance(error, OSError) and error.filename:
        reason = f"{error.filename}: {reason_of(error)}"
    if reason not in _logged:
        _logged.add(reason)
        fix = "set QARL_CACHE to a directory that you own, on a disk with enough free space"
        _logger.warning("warning: converted models cannot be kept (%s), so each start converts again; %s", reason, fix)


def _key(source: Path, part: str, versions: dict[str, str]) -> str:
    made_from = {"format": FORMAT_VERSION, "source": sha256_once(source), "part": part, "versions": versions}
    return hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()


def _root() -> Path:
    """Return the directory of the entries, created for this user alone if missing. Raises OSError, UserError."""
    root = conversions_directory()
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = root.stat()
    if found.st_uid not in (os.geteuid(), 0) or found.st_mode & 0o022:
        raise UserError(f"{root}: belongs to user {found.st_uid}, or other users may write it")
    return root


def _intact(entry: Path) -> bool:
    """Return whether the entry matches its manifest exactly."""
    try:
        manifest = checked(_Manifest, read_json_object(entry / _MANIFEST), str(entry))
        names = {*manifest.files, _MANIFEST}
        digests = {name: digest.sha256 for name, digest in manifest.files.items()}
        return set(os.listdir(entry)) == names and all(sha256_once(entry / name) == digests[name] for name in digests)
    except (OSError, Unreadable):
        return False


def _seal(directory: Path) -> None:
    """Make the files durable and write their manifest. Raises OSError."""
    files = {path.name: FileDigest.of(path).model_dump() for path in sorted(directory.iterdir())}
    (directory / _MANIFEST).write_text(json.dumps({"format_version": FORMAT_VERSION, "files": files}, indent=1))
    for path in directory.iterdir():
        with open(path) as file:
            os.fsync(file.fileno())
    fsync_directory(directory)


def _publish(temporary: Path, entry: Path) -> None:
    """Rename a sealed directory to its final name. Keeps an intact entry of another process. Raises OSError."""
    try:
        os.rename(temporary, entry)
    except OSError:
        if _intact(entry):
            return
        delete(entry)
        os.rename(temporary, entry)
    fsync_directory(entry.parent)
