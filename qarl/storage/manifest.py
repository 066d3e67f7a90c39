"""manifest.json of a checkpoint: which files there are, what is in them, and their digests. Imports no torch.

Format 1, of one process: a file holds whole tensors, and its header says which.

    {"format_version": 1, "step": 10, "groups": {"masters": ["masters.safetensors"], ...},
     "files": {"masters.safetensors": {"bytes": ..., "sha256": ...}, ..., "state.json": ...},
     "sha256": of all this}

Format 2, of several: a file holds stretches of flattened tensors, of one rank. They cover each tensor once, whatever
the number of ranks was and however it was cut.

    {"format_version": 2, "ranks": 4, "groups": {"masters": ["masters-r0001-of-0004.safetensors", ...], ...},
     "shapes": {"masters": {NAME: [4096, 1024]}, ...},
     "pieces": {"masters-r0001-of-0004.safetensors": {NAME: [0, 1048576]}, ...},
     "step", "files" and "sha256" as above}
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, StringConstraints

from qarl.errors import UserError
from qarl.inputs.files import Unreadable, open_regular
from qarl.inputs.json import read_json_object
from qarl.inputs.paths import reason_of
from qarl.inputs.schema import Bytes, FileName, Record, Sha256, Step, checked
from qarl.storage.names import step_of

MANIFEST = "manifest.json"
MANIFEST_BYTES = 2**30  # hundreds of ranks with thousands of tensors take a tenth of it
WHOLE, PIECES = 1, 2  # format versions
GROUP_NAME = r"[a-z][a-z0-9_]*"

_Group = Annotated[str, StringConstraints(pattern=f"^{GROUP_NAME}$")]
_Span = Annotated[list[Bytes], Field(min_length=2, max_length=2)]


class File(Record):
    bytes: Bytes
    sha256: Sha256


class Manifest(Record):
    """ranks: that wrote it."""

    step: Step
    groups: dict[_Group, list[FileName]]
    files: dict[FileName, File]

    @property
    def ranks(self) -> int:
        return 1


class PiecesManifest(Manifest):
    """shapes: of the whole tensors of each group. pieces: [start, stop) of the tensors of each file."""

    written_by: Annotated[int, Field(ge=1, lt=2**31, alias="ranks")]
    shapes: dict[_Group, dict[str, Annotated[list[Bytes], Field(max_length=64)]]]
    pieces: dict[FileName, dict[str, _Span]]

    @property
    def ranks(self) -> int:
        return self.written_by


def coverage_fault(shapes: Mapping[str, list[int]], spans: Mapping[str, list[tuple[int, int]]]) -> str | None:
    """What is wrong with [start, stop) of the pieces of tensors, by name: a gap, an overlap, an end outside; or None.

    shapes: of the whole tensors. One line, of the first tensor that is at fault.
    """
    if odd := sorted(spans.keys() - shapes.keys()):
        return f"'{odd[0]}' has pieces and no shape"
    for name, shape in shapes.items():
        reached, size = 0, prod(shape)
        if prod(max(length, 1) for length in shape) >= 2**63:
            return f"'{name}' has a shape that no tensor can have"
        for start, stop in sorted(spans.get(name, ())):
            if not start < stop <= size:
                return f"'{name}' has a piece [{start}, {stop}), and {size} elements"
            if start != reached:
                what = "in no file" if start > reached else "in two files"
                return f"'{name}': elements [{min(start, reached)}, {max(start, reached)}) are {what}"
            reached = stop
        if reached != size:
            return f"'{name}': elements [{reached}, {size}) are in no file"
    return None


def encode(body: Mapping[str, Any]) -> bytes:
    """The file of a manifest with these keys, its own digest added; of many ranks' pieces on one line."""
    indent = 1 if body["format_version"] == WHOLE else None
    return json.dumps({**body, "sha256": _digest(body)}, indent=indent).encode()


def read_manifest(path: Path) -> Manifest:
    """The manifest at `path`; of format 2 its pieces cover every tensor once.

    Raises NoSuchFile, Unreadable for one that is damaged, UserError for one of another qarl.
    """
    found = read_json_object(path, limit=MANIFEST_BYTES)
    if found.get("sha256") != _digest(found):
        raise Unreadable(str(path), "its own digest does not match, it was changed after it was written")
    version = found.get("format_version")
    if version not in (WHOLE, PIECES):
        raise UserError(
            f"{path}: checkpoint format {version}, this qarl reads {WHOLE} and {PIECES}; use the qarl version that "
            "wrote it (environment.json)"
        )
    manifest = checked(PiecesManifest if version == PIECES else Manifest, found, str(path))
    if step_of(path.parent.name) not in (None, manifest.step):
        raise Unreadable(str(path), f"is of step {manifest.step}, not of the one that its directory is named by")
    if isinstance(manifest, PiecesManifest) and (
        fault := pieces_fault(manifest.groups, manifest.shapes, manifest.pieces)
    ):
        raise Unreadable(str(path), fault)
    return manifest


def pieces_fault(
    groups: Mapping[str, list[str]],
    shapes: Mapping[str, Mapping[str, list[int]]],
    pieces: Mapping[str, Mapping[str, list[int]]],
) -> str | None:
    """What is wrong with these entries of a manifest of format 2, in one line, or None."""
    listed = [file for files in groups.values() for file in files]
    if len(set(listed)) != len(listed):
        return f"lists {next(file for file in listed if listed.count(file) > 1)} twice"
    if odd := set(listed) ^ pieces.keys():
        return f"'{min(odd)}' is in one of groups and pieces only"
    if different := groups.keys() ^ shapes.keys():
        return f"'{min(different)}' is in one of groups and shapes only"
    for group, files in groups.items():
        spans: dict[str, list[tuple[int, int]]] = {}
        for file in files:
            for name, (start, stop) in pieces[file].items():
                spans.setdefault(name, []).append((start, stop))
        if fault := coverage_fault(shapes[group], spans):
            return f"{group}: {fault}"
    return None


def verify_files(directory: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Raise NoSuchFile or Unreadable unless these files of the directory have the bytes that the manifest says."""
    for name in names:
        if name not in manifest.files:
            raise Unreadable(str(directory / MANIFEST), f"does not list {name} among its files")
        _verify(directory / name, manifest.files[name])


def _verify(path: Path, expected: File) -> None:
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size != expected.bytes:
            raise Unreadable(str(path), f"{size:,} bytes, {expected.bytes:,} were written")
        try:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise Unreadable(str(path), f"cannot be read: {reason_of(error)}") from error
    if digest != expected.sha256:
        raise Unreadable(str(path), "the digest does not match, the contents changed")


def _digest(manifest: Mapping[str, Any]) -> str:
    body = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
