"""Parts of tensors, as several processes hold and write them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from qarl.storage.disk import fsync_directory
from qarl.storage.tensorfile import safetensors_chunks, write_file

GROUPS = ("masters", "optimizer")


@dataclass(frozen=True)
class Piece:
    """Elements [start, start + len(values)) of a flattened tensor.

    group: `masters` or `optimizer`. name: of the whole tensor, shape its shape. values: (n,), contiguous; live memory
    of the run, not a copy.
    """

    group: str
    name: str
    shape: tuple[int, ...]
    start: int
    values: Tensor


def whole_tensors(pieces: Iterable[Piece]) -> dict[str, dict[str, Tensor]]:
    """Group -> name -> tensor, of pieces that are whole tensors."""
    tensors: dict[str, dict[str, Tensor]] = {group: {} for group in GROUPS}
    for piece in pieces:
        assert piece.start == 0 and piece.name not in tensors[piece.group], f"{piece.name}: a part of one process"
        tensors[piece.group][piece.name] = piece.values.view(piece.shape)
    return tensors


def plan_files(pieces: Sequence[Piece], rank: int, count: int, most: int) -> dict[str, dict[str, Piece]]:
    """The files of one of `count` ranks: name -> tensor name -> piece; empty pieces are in none.

    `masters-r0001-of-0004.safetensors` is the first rank's; what goes above `most` bytes, or is a second piece of a
    tensor, goes into `masters-r0001-of-0004-00002.safetensors`, and so on.
    """
    files: dict[str, dict[str, Piece]] = {}
    for group in GROUPS:
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
    """What a manifest of format 2 says of a rank's pieces, which are in `files`: its shapes, pieces and groups."""
    shapes: dict[str, dict[str, list[int]]] = {group: {} for group in GROUPS}
    for piece in pieces:
        shapes[piece.group][piece.name] = list(piece.shape)
    spans = {
        file: {name: [piece.start, piece.start + piece.values.numel()] for name, piece in members.items()}
        for file, members in files.items()
    }
    groups = {group: [file for file in files if file.startswith(f"{group}-")] for group in GROUPS}
    return {"shapes": shapes, "pieces": spans, "groups": groups}


def write_pieces(directory: Path, files: Mapping[str, Mapping[str, Piece]]) -> dict[str, dict[str, Any]]:
    """Write the files of `plan_files`, durably: {bytes, sha256} of each. Raises OSError."""
    written = {}
    for file, members in files.items():
        written[file] = write_file(
            directory / file, safetensors_chunks({name: piece.values for name, piece in members.items()})
        )
    fsync_directory(directory)
    return written
