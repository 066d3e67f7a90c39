"""Digests of user code, to detect edits.

Imports nothing: it finds the files as an import would, and reads them as bytes.
"""

import ast
import hashlib
import importlib.machinery
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from qarl.errors import UserError
from qarl.inputs.code import is_file
from qarl.inputs.files import Unreadable, read_bytes
from qarl.inputs.paths import path_errors, user_path

_SUFFIXES = importlib.machinery.all_suffixes()  # .py first, then extension modules and bytecode


SOURCE_BYTES = 2**30  # limit per module; an extension may be large


def source_parts(reference: str, place: str) -> list[Any]:
    """Return what a digest of the module in `path/to/file.py:name` or `package.module:name` covers.

    This is the SHA-256 of its file and of files that it imports, directly or indirectly, from the same directory or the
    same top-level package. Paths and libraries do not count, so a directory may be moved. place: Prefix of messages.
    Raises UserError if a file cannot be read.
    """
    module = reference.rpartition(":")[0]
    try:
        if is_file(module):
            with path_errors(place):
                path = user_path(module, place).resolve()
            return [_sources(path, path.parent, None)]
        if (found := _find_module(module)) is not None:  # otherwise it is frozen, built-in or missing
            return [module, _sources(*found, module.partition(".")[0])]
    except Unreadable as error:
        raise UserError(f"{place}: {error}") from error
    return []


def _sources(path: Path, root: Path, package: str | None) -> dict[str, str]:
    """Return the SHA-256 of `path` and of its imports under `root`, by relative path.

    package: Top-level package to which imports are restricted; None: any.
    """
    found: dict[str, str] = {}
    waiting = [path]
    while waiting:
        path = waiting.pop()
        key = "" if not found else path.relative_to(root).as_posix()  # the file's own name may change
        if key in found:
            continue
        content = read_bytes(path, SOURCE_BYTES)
        found[key] = hashlib.sha256(content).hexdigest()
        if path.suffix == ".py":
            for name in _imports(content, path, root):
                if package in (None, name.partition(".")[0]):
                    waiting += _module_files(root, name)
    return found


def _imports(content: bytes, path: Path, root: Path) -> Iterator[str]:
    """Yield absolute names of modules that a source may import; for `from a import b` both a and a.b."""
    try:
        nodes: Iterable[ast.AST] = ast.walk(ast.parse(content))
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # reported when the module is imported
        return
    here = path.relative_to(root).parent.parts
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = here[: len(here) - node.level + 1] if node.level else ()
            base = ".".join([*start, *([node.module] if node.module else [])])
            if base:
                yield base
            yield from (f"{base}.{alias.name}".lstrip(".") for alias in node.names)


def _module_files(root: Path, name: str) -> list[Path]:
    """Return the files of module `name` under `root`, its packages' __init__ first; [] if it does not exist."""
    parts = name.split(".")
    if not all(part.isidentifier() for part in parts):  # `from a import *`
        return []
    files = []
    for end in range(1, len(parts) + 1):
        stem = root.joinpath(*parts[:end])
        found = _module_file(stem)
        if found is None and not os.path.isdir(stem):
            break
        files += [] if found is None else [found]
    return files


def _module_file(stem: Path) -> Path | None:
    """Return the file of a module at `stem`, a path without suffix: the __init__ of a package, or its own file."""
    candidates = [stem / f"__init__{suffix}" for suffix in _SUFFIXES]
    candidates += [stem.with_name(stem.name + suffix) for suffix in _SUFFIXES]
    return next((path for path in candidates if os.path.isfile(path)), None)  # Path.is_file raises for long names


def _find_module(name: str) -> tuple[Path, Path] | None:
    """Return the file of module `name` and the sys.path entry that contains it, with the search order of `code`."""
    for entry in [*sys.path, os.getcwd()]:
        root = Path(entry or os.getcwd()).resolve()
        if (path := _module_file(root.joinpath(*name.split(".")))) is not None:
            return path, root
    return None
