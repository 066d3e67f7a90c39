"""Writing the files of a checkpoint: tensors, then state.json, then the manifest. All functions may raise OSError."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from qarl.errors import UserError
from qarl.storage.disk import fsync_directory
from qarl.storage.manifest import GROUP_NAME, MANIFEST, PIECES, WHOLE, encode, pieces_fault
from qarl.storage.pieces import GROUPS
from qarl.storage.tensorfile import safetensors_chunks, write_file

SHARD_BYTES = 4 * 2**30


def needed_bytes(tensors: Sequence[Tensor]) -> int:
    """Return the bytes of a checkpoint of these tensors without state.json, including headers, manifest and block
    padding.
    """
    return sum(tensor.nbytes for tensor in tensors) + 256 * len(tensors) + 16384


def write_checkpoint(directory: Path, step: int, tensors: dict[str, dict[str, Tensor]], state_json: bytes) -> None:
    files: dict[str, dict[str, Any]] = {}
    groups: dict[str, list[str]] = {}
    for group, members in tensors.items():
        assert re.fullmatch(GROUP_NAME, group), f"group name {group!r} must do as a file name"
        shards = _shards(members)
        names = [f"{group}-{i:05d}.safetensors" for i in range(1, len(shards) + 1)]
        groups[group] = names if len(shards) > 1 else [f"{group}.safetensors"]
        for name, shard in zip(groups[group], shards, strict=True):
            files[name] = write_file(directory / name, safetensors_chunks(shard))
    _write_manifest(directory, state_json, files, format_version=WHOLE, step=step, groups=groups)


def write_pieces_manifest(directory: Path, step: int, state_json: bytes, shares: list[dict[str, Any]]) -> None:
    """Write the manifest of files that several ranks have written.

    Args:
        shares: Per rank, the result of `described`, and under `files` the result of `write_pieces`.

    Raises:
        UserError: This process does not see the files of a rank.
    """
    shapes: dict[str, dict[str, list[int]]] = {group: {} for group in GROUPS}
    groups: dict[str, list[str]] = {group: [] for group in GROUPS}
    pieces: dict[str, dict[str, list[int]]] = {}
    files: dict[str, dict[str, Any]] = {}
    for share in shares:
        for group, members in share["shapes"].items():
            shapes.setdefault(group, {}).update(members)
        for group, names in share["groups"].items():
            groups.setdefault(group, []).extend(names)
        pieces |= share["pieces"]
        files |= share["files"]
    for file, entry in files.items():
        if not (directory / file).exists() or (directory / file).stat().st_size != entry["bytes"]:
            raise UserError(
                f"{directory / file}: is not what another rank wrote under that name; set train.run_dir to a directory "
                "on a disk that all nodes share"
            )
    body = {"ranks": len(shares), "groups": groups, "shapes": shapes, "pieces": pieces}
    assert (fault := pieces_fault(groups, shapes, pieces)) is None, fault
    _write_manifest(directory, state_json, files, format_version=PIECES, step=step, **body)


def _write_manifest(directory: Path, state_json: bytes, files: dict[str, dict[str, Any]], **body: Any) -> None:
    """Write state.json and the manifest. files: already written. body: other entries of the manifest."""
    files["state.json"] = write_file(directory / "state.json", [state_json])
    write_file(directory / MANIFEST, [encode({**body, "files": files})])
    fsync_directory(directory)


def _shards(tensors: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    return shards
