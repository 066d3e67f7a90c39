"""manifest.json of a checkpoint: its files, their contents and digests. Imports no torch.

Format 1, written by a single process: a file holds whole tensors, which its header lists.

    {"format_version": 1, "step": 10, "groups": {"masters": ["masters.safetensors"], ...},
     "files": {"masters.safetensors": {"bytes": ..., "sha256": ...}, ..., "state.json": ...},
     "sha256": of all this}

Format 2, written by several ranks: a file holds one rank's slices of flattened tensors. Together the slices cover each
tensor exactly once, for any number of ranks and any split.

    {"format_version": 2, "ranks": 4, "groups": {"masters": ["masters-r0001-of-0004.safetensors", ...], ...},
     "shapes": {"masters": {NAME: [4096, 1024]}, ...},
     "pieces": {"masters-r0001-of-0004.safetensors": {NAME: [0, 1048576]}, ...},
     "step", "files" and "sha256" as above}
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, StringConstraints

from qarl.errors import UserError
from qarl.inputs.files import Unreadable
from qarl.inputs.json import body_digest, read_json_object
from qarl.inputs.schema import Bytes, FileDigest, FileName, Record, Step, checked
from qarl.storage.names import step_of

MANIFEST = "manifest.json"
MANIFEST_BYTES = 2**30  # hundreds of ranks with thousands of tensors need a tenth of this
WHOLE, PIECES = 1, 2  # format versions

_Group = Annotated[str, StringConstraints(pattern="^[a-z][a-z0-9_]*$")]
_Span = Annotated[list[Bytes], Field(min_length=2, max_length=2)]


class Manifest(Record):
    """Content of manifest.json. ranks: number of ranks that wrote the checkpoint."""

    step: Step
    ranks: Annotated[int, Field(ge=1, lt=2**31)] = 1
    groups: dict[_Group, list[FileName]]
    files: dict[FileName, FileDigest]


class PiecesManifest(Manifest):
    """Manifest of format 2.

    Attributes:
        shapes: Group to tensor name to shape of the whole tensor.
        pieces: File to tensor name to [start, stop) in the flattened tensor.
    """

    shapes: dict[_Group, dict[str, Annotated[list[Bytes], Field(max_length=64)]]]
    pieces: dict[FileName, dict[str, _Span]]


def encode(body: Mapping[str, Any]) -> bytes:
    """Serialize a manifest and add its own digest. Format 2 is written on one line because it is large."""
    indent = 1 if body["format_version"] == WHOLE else None
    return json.dumps({**body, "sha256": body_digest(body)}, indent=indent).encode()


def read_manifest(path: Path) -> Manifest:
    """Read and validate the manifest at `path`.

    Its digest shows that it is as it was written, and `write_manifest` checks that the pieces cover every tensor once.

    Raises:
        NoSuchFile: There is none.
        Unreadable: It is damaged.
        UserError: Another version of qarl wrote it.
    """
    found = read_json_object(path, limit=MANIFEST_BYTES)
    if found.get("sha256") != body_digest(found):
        raise Unreadable(str(path), "its own digest does not match, it was changed after it was written")
    version = found.get("format_version")
    if version not in (WHOLE, PIECES):
        raise UserError(
            f"{path}: checkpoint format {version}, this qarl reads {WHOLE} and {PIECES}; use the qarl version that "
            "wrote it (environment.json)"
        )
    manifest = checked(PiecesManifest if version == PIECES else Manifest, found, str(path))
    if step_of(path.parent.name) not in (None, manifest.step):
        raise Unreadable(str(path), f"is of step {manifest.step}, but its directory is named after another one")
    return manifest


def verify_files(directory: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Raise NoSuchFile or Unreadable unless these files of the directory match the manifest."""
    for name in names:
        if name not in manifest.files:
            raise Unreadable(str(directory / MANIFEST), f"does not list {name} among its files")
        found, expected = FileDigest.of(directory / name), manifest.files[name]
        if found.bytes != expected.bytes:
            raise Unreadable(str(directory / name), f"{found.bytes:,} bytes, {expected.bytes:,} were written")
        if found.sha256 != expected.sha256:
            raise Unreadable(str(directory / name), "the digest does not match, the contents changed")
