"""Plan and write the files of a checkpoint. Each file holds slices of tensors."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from torch import Tensor

from qarl.errors import UserError
from qarl.storage.disk import fsync_directory
from qarl.storage.manifest import MANIFEST, PIECES, WHOLE, encode
from qarl.storage.tensorfile import safetensors_chunks, write_file

GROUPS = ("masters", "optimizer")
ROLLOUTS = "rollouts"  # unused responses of asynchronous rollouts, and the earlier versions that they or a replay need
SHARD_BYTES = 4 * 2**30  # of tensors per file


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


Files = Mapping[str, Mapping[str, Mapping[str, Piece]]]
"""Group to file name to tensor name to piece."""


def plan_files(pieces: Sequence[Piece], rank: int, count: int) -> Files:
    """Assign one rank's pieces to files of at most SHARD_BYTES, or of a single piece.

    A single process writes `masters.safetensors`, which exists even if it is empty, or `masters-00001.safetensors`,
    `masters-00002.safetensors` and so on. The first of four ranks writes `masters-r0001-of-0004.safetensors`,
    `masters-r0001-of-0004-00002.safetensors` and so on; its empty pieces are left out.
    """
    files: dict[str, dict[str, dict[str, Piece]]] = {}
    for group in dict.fromkeys([*GROUPS, *(piece.group for piece in pieces)]):
        shards = _shards([piece for piece in pieces if piece.group == group and (count == 1 or piece.values.numel())])
        if count == 1:
            shards = shards or [{}]
            names = [f"{group}-{number:05d}" for number in range(1, len(shards) + 1)] if len(shards) > 1 else [group]
        else:
            first = f"{group}-r{rank + 1:04d}-of-{count:04d}"
            names = [first, *(f"{first}-{number:05d}" for number in range(2, len(shards) + 1))][: len(shards)]
        files[group] = {f"{name}.safetensors": shard for name, shard in zip(names, shards, strict=True)}
    return files


def _shards(pieces: Sequence[Piece]) -> list[dict[str, Piece]]:
    """Split pieces of one group into files: tensor name to piece. A file holds one piece per tensor."""
    shards: list[dict[str, Piece]] = []
    filled = 0
    for piece in pieces:
        if not shards or piece.name in shards[-1] or filled + piece.values.nbytes > SHARD_BYTES:
            shards.append({})
            filled = 0
        shards[-1][piece.name] = piece
        filled += piece.values.nbytes
    return shards


def needed_bytes(pieces: Sequence[Piece]) -> int:
    """Return the bytes of a checkpoint of these pieces without state.json, including headers, manifest and block
    padding.
    """
    return sum(piece.values.nbytes for piece in pieces) + 256 * len(pieces) + 16384


def write_files(directory: Path, pieces: Sequence[Piece], files: Files, whole: bool) -> dict[str, Any]:
    """Write one rank's files durably.

    Args:
        directory: An existing directory.
        pieces: All pieces of this rank.
        files: Result of `plan_files`.
        whole: The pieces are whole tensors, and are written in their shape.

    Returns:
        The rank's entries of the manifest: groups, shapes, pieces and files.

    Raises:
        OSError: The disk refuses.
    """
    shapes: dict[str, dict[str, list[int]]] = {group: {} for group in files}
    for piece in pieces:
        shapes[piece.group][piece.name] = list(piece.shape)
    spans: dict[str, dict[str, list[int]]] = {}
    written: dict[str, dict[str, Any]] = {}
    for members in files.values():
        for file, held in members.items():
            tensors = {name: piece.values.view(piece.shape) if whole else piece.values for name, piece in held.items()}
            written[file] = write_file(directory / file, safetensors_chunks(tensors))
            spans[file] = {
                name: [piece.start, piece.start + piece.values.numel()]
                for name, piece in held.items()
                if piece.values.numel()
            }
    fsync_directory(directory)
    groups = {group: list(members) for group, members in files.items()}
    return {"groups": groups, "shapes": shapes, "pieces": spans, "files": written}


def write_manifest(directory: Path, step: int, state_json: bytes, shares: Sequence[Mapping[str, Any]]) -> None:
    """Write state.json and the manifest of the files that all ranks have written.

    Args:
        directory: Holds the files.
        step: Training step.
        state_json: Content of state.json.
        shares: Results of `write_files`, per rank.

    Raises:
        UserError: This process does not see the files of a rank.
        OSError: The disk refuses.
    """
    groups: dict[str, list[str]] = {}
    shapes: dict[str, dict[str, list[int]]] = {}
    pieces: dict[str, dict[str, list[int]]] = {}
    files: dict[str, dict[str, Any]] = {}
    for share in shares:
        for group, names in share["groups"].items():
            groups.setdefault(group, []).extend(names)
            shapes.setdefault(group, {}).update(share["shapes"][group])
        pieces |= share["pieces"]
        files |= share["files"]
    for file, entry in files.items():
        if not (directory / file).exists() or (directory / file).stat().st_size != entry["bytes"]:
            raise UserError(
                f"{directory / file}: is not what another rank wrote under that name; set train.run_dir to a directory "
                "on a disk that all nodes share"
            )
    assert (fault := _coverage_fault(groups, shapes, pieces)) is None, fault
    files["state.json"] = write_file(directory / "state.json", [state_json])
    if len(shares) == 1:
        body = {"format_version": WHOLE, "step": step, "groups": groups}
    else:
        body = {"format_version": PIECES, "step": step, "ranks": len(shares), "groups": groups}
        body |= {"shapes": shapes, "pieces": pieces}
    write_file(directory / MANIFEST, [encode({**body, "files": files})])
    fsync_directory(directory)


def _coverage_fault(
    groups: Mapping[str, list[str]],
    shapes: Mapping[str, Mapping[str, list[int]]],
    pieces: Mapping[str, Mapping[str, list[int]]],
) -> str | None:
    """Describe the first tensor whose pieces have a gap or overlap; None if they cover every tensor once."""
    for group, files in groups.items():
        for name, shape in shapes[group].items():
            reached, size = 0, prod(shape)
            spans = sorted(pieces[file][name] for file in files if name in pieces[file])
            for start, stop in [*spans, [size, size]]:
                if start != reached:
                    what = "in no file" if start > reached else "in two files"
                    return f"{group}: '{name}': elements [{min(start, reached)}, {max(start, reached)}) are {what}"
                reached = stop
    return None
