"""Cache of converted models: files derived from a model file, keyed by the digest of their source.

    $QARL_CACHE, or $XDG_CACHE_HOME/qarl, or ~/.cache/qarl
        models/<sha256 of the source, the part and the converter's versions>/    the converted files
                                                    manifest.json                     bytes and SHA-256 of each

An entry is used only if its directory and files belong to this user (or root), nobody else can write them, and their
digests match the manifest exactly. Anything else under its name is replaced. An entry is published by one rename, so
two processes may create the same one.
"""

import hashlib
import json
import logging
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from qarl.errors import UserError
from qarl.inputs.files import Unreadable, file_identity, sha256_once
from qarl.inputs.json import read_json_object
from qarl.inputs.paths import path_fault, reason_of
from qarl.inputs.schema import FileDigest, FileName, Record, checked
from qarl.storage.disk import free_bytes, fsync_directory
from qarl.storage.leftovers import delete, is_abandoned, mark

FORMAT_VERSION = 1
SPARE_BYTES = 256 * 2**20  # free disk space to leave after a conversion

_MANIFEST = "manifest.json"
_LEFTOVER = re.compile(r"\.tmp-[0-9a-f]{64}-([0-9]{1,9})-(.+)")
_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH
_logger = logging.getLogger("qarl.conversions")
_told: set[str] = set()  # reasons already logged: each is logged once per process
_verified: dict[Path, list[tuple[int, ...]]] = {}  # entries that this process verified -> identities of their files

T = TypeVar("T")


class _Manifest(Record):
    format_version: int
    files: dict[FileName, FileDigest]


class _Unusable(Exception):
    """Why an entry, or the place for entries, cannot be used."""


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
    with _logged_once():
        with _reasons(source):
            root = _root()
            key = _key(source, part, versions)
        entry = root / key
        with suppress(_Unusable):
            _verify(entry)
            return entry
        with _reasons(root):
            _require_space(root, size)
            _remove_leftovers(root)
            temporary = root / f".tmp-{key}-{mark()}"
            temporary.mkdir(mode=0o700)
        try:
            value = read()
            with _reasons(root):
                if _key(source, part, versions) != key:
                    raise _Unusable(f"{source}: changed while it was converted")
                write(value, temporary)
                _seal(temporary)
                _publish(temporary, entry)
                _verify(entry)
            return entry
        finally:
            with suppress(OSError):
                delete(temporary)
    return None


@contextmanager
def _logged_once() -> Iterator[None]:
    """Log each reason of _Unusable once, and continue after the block."""
    try:
        yield
    except _Unusable as error:
        reason = str(error)
        if reason not in _told:
            _told.add(reason)
            fix = "set QARL_CACHE to a directory that you own, on a disk with enough free space"
            _logger.warning(
                "warning: converted models cannot be kept (%s), so each start converts again; %s", reason, fix
            )


@contextmanager
def _reasons(place: Path) -> Iterator[None]:
    """Turn any exception into _Unusable, because libraries report a full disk in different ways."""
    try:
        yield
    except _Unusable:
        raise
    except OSError as error:
        raise _Unusable(f"{error.filename or place}: {reason_of(error)}") from error
    except UserError as error:
        raise _Unusable(str(error)) from error
    except Exception as error:
        raise _Unusable(f"{place}: {' '.join(str(error).split())[:200]}") from error


def _key(source: Path, part: str, versions: dict[str, str]) -> str:
    made_from = {"format": FORMAT_VERSION, "source": sha256_once(source), "part": part, "versions": versions}
    return hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()


def _require_space(root: Path, size: int) -> None:
    free = free_bytes(root)
    if free < size + SPARE_BYTES:
        raise _Unusable(f"{root}: {size:,} bytes needed and {SPARE_BYTES:,} to spare, {free:,} free")


def _root() -> Path:
    """Return the directory of the entries, created if missing. Raises OSError, _Unusable."""
    named = conversions_directory()
    named.parent.mkdir(parents=True, exist_ok=True)
    parent = named.parent.resolve()
    for directory in (parent, *parent.parents):
        mode = directory.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise _Unusable(f"{directory}: any user can replace what is in it")
    root = parent / named.name
    with suppress(FileExistsError):
        root.mkdir(mode=0o700)
    _require_private(root, os.lstat(root), stat.S_ISDIR)
    return root


def _require_private(path: Path, found: os.stat_result, is_kind: Callable[[int], bool]) -> None:
    """Raise _Unusable for a path that another user may have created or can change."""
    if not is_kind(found.st_mode):
        raise _Unusable(f"{path}: is no {'directory' if is_kind is stat.S_ISDIR else 'file'}")
    if found.st_uid not in (os.geteuid(), 0):
        raise _Unusable(f"{path}: belongs to user {found.st_uid}")
    if found.st_mode & _OTHERS_MAY_WRITE:
        raise _Unusable(f"{path}: other users may write it")


def _verify(entry: Path) -> None:
    """Raise _Unusable unless the entry matches its manifest exactly. Reads the files once per process."""
    try:
        _require_private(entry, os.lstat(entry), stat.S_ISDIR)
        names = sorted(os.listdir(entry))
        found = [os.lstat(entry / name) for name in names]
        identities = [file_identity(one) for one in found]
        if _verified.get(entry) == identities:
            return
        for name, one in zip(names, found, strict=True):
            _require_private(entry / name, one, stat.S_ISREG)
        manifest = checked(_Manifest, read_json_object(entry / _MANIFEST), str(entry / _MANIFEST))
        if names != sorted([*manifest.files, _MANIFEST]):
            raise _Unusable(f"{entry}: holds other files than its manifest says")
        for name, expected in manifest.files.items():
            if FileDigest.of(entry / name) != expected:
                raise _Unusable(f"{entry / name}: its contents changed")
    except OSError as error:
        raise _Unusable(f"{entry}: {reason_of(error)}") from None
    except Unreadable as error:
        raise _Unusable(str(error)) from None
    _verified[entry] = identities


def _seal(directory: Path) -> None:
    """Make the files durable and private, and write their manifest. Raises OSError."""
    files = {}
    for path in sorted(directory.iterdir()):
        path.chmod(0o600)
        files[path.name] = FileDigest.of(path).model_dump()
        _sync(path)
    manifest = directory / _MANIFEST
    manifest.write_text(json.dumps({"format_version": FORMAT_VERSION, "files": files}, indent=1))
    manifest.chmod(0o600)
    _sync(manifest)
    fsync_directory(directory)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _publish(temporary: Path, entry: Path) -> None:
    """Rename a sealed directory to its final name. Keeps an intact entry of another process. Raises OSError."""
    _verified.pop(entry, None)
    for _ in range(2):
        try:
            os.rename(temporary, entry)
            break
        except OSError:
            if not os.path.lexists(entry):
                raise
        try:
            _verify(entry)
            return
        except _Unusable:
            old = entry.with_name(f".tmp-{'0' * 64}-{mark()}")
            delete(old)
            os.rename(entry, old)
            delete(old)
    fsync_directory(entry.parent)


def _remove_leftovers(root: Path) -> None:
    """Remove what killed conversions of this host left behind. Raises OSError."""
    for path in root.iterdir():
        match = _LEFTOVER.fullmatch(path.name)
        if match is not None and is_abandoned(path, int(match[1]), match[2]):
            delete(path)
