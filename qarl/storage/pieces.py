"""Slices of tensors that several processes hold and write."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from qarl.storage.disk import fsync_directory
from qarl.storage.tensorfile import safetensors_chunks, write_file

GROUPS = ("masters", "optimizer")
ROLLOUTS = "rollouts"  # group of what asynchronous rollouts have sampled ahead; only their checkpoints have it


@dataclass(frozen=True)
class Piece:
    """Elements [start, start + len(values)) of a flattened tensor.

    Attributes:
        group: `masters`, `optimizer` or `rollouts`.
        name, shape: Name and shape of the whole tensor.
        values: (n,), contiguous. Live memory of the run, not a copy.
    """

    group: str
    name: str
    shape: tuple[int, ...]
    start: int
    values: Tensor


def whole_tensors(pieces: Iterable[Piece]) -> dict[str, dict[str, Tensor]]:
    """Return group to name to tensor for pieces that are whole tensors."""
    tensors: dict[str, dict[str, Tensor]] = {group: {} for group in GROUPS}
    for piece in pieces:
        own = tensors.setdefault(piece.group, {})
        assert piece.start == 0 and piece.name not in own, f"{piece.name}: a part of one process"
        own[piece.name] = piece.values.view(piece.shape)
    return tensors


def plan_files(pieces: Sequence[Piece], rank: int, count: int, most: int) -> dict[str, dict[str, Piece]]:
    """Assign one rank's pieces to files: file name to tensor name to piece. Empty pieces are left out.

    The first file of the first of four ranks is `masters-r0001-of-0004.safetensors`. Pieces beyond `most` bytes, or
    further pieces of the same tensor, go into `masters-r0001-of-0004-00002.safetensors`, and so on.
    """
    files: dict[str, dict[str, Piece]] = {}
    for group in _groups(pieces):
        shards: list[dict[str, Piece]] = []
        filled = 0
        for piece in (piece for piece in pieces if piece.group == group and piece.values.numel()):
            if not shards or piece.name in shards[-1] or filled + piece.values.nbytes > most:
                shards.append({})
                filled = 0
            shards[-1][piece.name] = piece
            filled += piece.values.nbytes
        for number, shard in enumerate(shards, start=1):
            more = "" if number == 1 else f"-{number:05d}"
            files[f"{group}-r{rank + 1:04d}-of-{count:04d}{more}.safetensors"] = shard
    return files


def described(pieces: Sequence[Piece], files: Mapping[str, Mapping[str, Piece]]) -> dict[str, Any]:
    """Return the entries of a format 2 manifest (shapes, pieces, groups) for one rank's pieces in `files`."""
    shapes: dict[str, dict[str, list[int]]] = {group: {} for group in _groups(pieces)}
    for piece in pieces:
        shapes[piece.group][piece.name] = list(piece.shape)
    spans = {
        file: {name: [piece.start, piece.start + piece.values.numel()] for name, piece in members.items()}
        for file, members in files.items()
    }
    groups = {group: [file for file in files if file.startswith(f"{group}-")] for group in shapes}
    return {"shapes": shapes, "pieces": spans, "groups": groups}


def _groups(pieces: Iterable[Piece]) -> list[str]:
    """`GROUPS`, and further groups that the pieces have."""
    return list(dict.fromkeys([*GROUPS, *(piece.group for piece in pieces)]))


def write_pieces(directory: Path, files: Mapping[str, Mapping[str, Piece]]) -> dict[str, dict[str, Any]]:
    """Write the files of `plan_files` durably. Returns {bytes, sha256} per file. Raises OSError."""
    written = {}
    for file, members in files.items():
        written[file] = write_file(
            directory / file, safetensors_chunks({name: piece.values for name, piece in members.items()})
        )
    fsync_directory(directory)
    return written
