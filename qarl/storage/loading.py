"""Reading checkpoints. The number of ranks that wrote one may differ from the number that reads it.

Tensors are read lazily: views of memory-mapped files, or pieces that are concatenated on access.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from qarl.distributed.ranks import Ranks, SingleProcess
from qarl.distributed.together import require_same, same_files, together
from qarl.errors import UserError
from qarl.inputs.files import NoSuchFile, Unreadable
from qarl.inputs.json import read_json_object
from qarl.inputs.paths import path_errors
from qarl.storage.manifest import MANIFEST, Manifest, PiecesManifest, read_manifest, verify_files
from qarl.storage.tensorfile import read_tensors

T = TypeVar("T")


class CheckpointDamaged(UserError):
    """A checkpoint differs from what was saved. The message names the file and the reason."""


class StoredTensors(Mapping[str, Tensor]):
    """Tensors by name.

    `tensors[name]` is a CPU view of the mapped file. A tensor in several pieces is concatenated into a new tensor that
    is not cached, so take one at a time and copy it.

    Args:
        shapes: Shapes of the tensors, in their order.
        pieces: Name to (start, values) of each piece, ascending. The values are (n,), of one dtype, and cover the
            flattened tensor.
    """

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], pieces: Mapping[str, Sequence[tuple[int, Tensor]]]
    ) -> None:
        self._shapes, self._pieces = dict(shapes), pieces

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> StoredTensors:
        """Build from whole, contiguous tensors."""
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        return cls(shapes, {name: [(0, tensor.view(-1))] for name, tensor in tensors.items()})

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype; float32 for an empty tensor, which is in no file."""
        pieces = self._pieces.get(name)
        return pieces[0][1].dtype if pieces else torch.float32

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Return elements [start, stop) of the flattened tensor: (stop - start,)."""
        assert 0 <= start <= stop <= prod(self._shapes[name]), f"{name}: [{start}, {stop}) of {self._shapes[name]}"
        parts = [
            values[max(0, start - first) : stop - first]
            for first, values in self._pieces.get(name, ())
            if first < stop and start < first + len(values)
        ]
        if len(parts) == 1:
            return parts[0]
        return torch.cat(parts) if parts else torch.empty(0, dtype=self.dtype(name))

    def __getitem__(self, name: str) -> Tensor:
        shape = self._shapes[name]
        return self.read(name, 0, prod(shape)).view(shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint.

    Tensors are CPU views of the memory-mapped files, or concatenations of pieces; see `StoredTensors`. ranks: number
    of ranks that wrote it.
    """

    step: int
    tensors: dict[str, StoredTensors]
    state: dict[str, Any]
    path: Path
    ranks: int = 1

    def read(self, group: str, name: str, start: int, stop: int) -> Tensor:
        """Return elements [start, stop) of a flattened tensor: (stop - start,)."""
        return self.tensors[group].read(name, start, stop)


def load_checkpoint(path: Path, groups: Collection[str] | None = None, ranks: Ranks | None = None) -> Checkpoint:
    """Read and verify one checkpoint directory (or a link to one, such as `checkpoints/latest`).

    Args:
        path: The checkpoint; any number of ranks may have written it.
        groups: Tensor groups to read and verify; None for all.
        ranks: All ranks that read it; each verifies a share of the files. None for a single process.

    Raises:
        UserError: There is no such checkpoint.
        CheckpointDamaged: A file is missing, truncated or changed.
    """
    ranks = ranks or SingleProcess()
    found = together(ranks, lambda: _found(path))
    leaders = same_files(ranks, lambda: [file for file in found.iterdir() if file.is_file()])
    team = [rank for rank, leader in enumerate(leaders) if leader == leaders[ranks.rank]]
    manifest = _undamaged(ranks, lambda: _verified(found, groups, team.index(ranks.rank), len(team)))
    if len(set(leaders)) > 1:
        digest = together(ranks, lambda: hashlib.sha256((found / MANIFEST).read_bytes()).hexdigest())
        require_same(ranks, {f"checkpoint {found.name}": digest}, "give every rank the same checkpoint")
    return _undamaged(ranks, lambda: _opened(found, manifest, groups))


def _found(path: Path) -> Path:
    """Return the directory of a checkpoint. Raises UserError if there is none."""
    with path_errors(str(path), "give a checkpoint that can be read"):
        if not path.is_dir():
            raise UserError(f"{path}: no such checkpoint; give a directory such as runs/NAME/checkpoints/000010")
        return path.resolve()


def _undamaged(ranks: Ranks, work: Callable[[], T]) -> T:
    """Like `together`, but damage found by any rank is raised on all ranks in one line."""
    damage: str | None = None

    def guarded() -> T | None:
        nonlocal damage
        try:
            return work()
        except NoSuchFile as error:
            damage = f"{str(error).removesuffix('no such file')}missing"
        except Unreadable as error:
            damage = str(error)
        return None

    result = together(ranks, guarded)
    lines = [line for line in ranks.gather(damage) if line is not None]
    if lines:
        raise CheckpointDamaged(lines[0])
    return cast(T, result)


def _verified(path: Path, groups: Collection[str] | None, index: int, count: int) -> Manifest:
    """Return the manifest after verifying this rank's share of the files. All `count` ranks see the same files.

    Raises NoSuchFile, Unreadable.
    """
    manifest = read_manifest(path / MANIFEST)
    if groups is not None and (absent := set(groups) - manifest.groups.keys()):
        raise Unreadable(str(path), f"holds no {min(absent)}")
    names = ["state.json", *(name for group in _wanted(manifest, groups) for name in manifest.groups[group])]
    verify_files(path, manifest, names[index::count])
    return manifest


def _opened(path: Path, manifest: Manifest, groups: Collection[str] | None) -> Checkpoint:
    """Open a checkpoint whose files are verified. Raises NoSuchFile, Unreadable."""
    tensors = {group: _open_group(path, manifest, group) for group in _wanted(manifest, groups)}
    state = read_json_object(path / "state.json", big_integers=True, nonfinite=True, surrogates=True)
    return Checkpoint(manifest.step, tensors, state, path, manifest.ranks)


def _wanted(manifest: Manifest, groups: Collection[str] | None) -> list[str]:
    return [group for group in manifest.groups if groups is None or group in groups]


def _open_group(directory: Path, manifest: Manifest, group: str) -> StoredTensors:
    """Open the tensors of a checkpoint's group. Raises NoSuchFile, Unreadable."""
    if not isinstance(manifest, PiecesManifest):
        tensors: dict[str, Tensor] = {}
        for file in manifest.groups[group]:
            tensors |= read_tensors(directory / file)
        return StoredTensors.of(tensors)
    pieces: dict[str, list[tuple[int, Tensor]]] = {}
    for file in manifest.groups[group]:
        there = read_tensors(directory / file)
        for name, (start, _) in manifest.pieces[file].items():
            pieces.setdefault(name, []).append((start, there[name]))
    for stretches in pieces.values():
        stretches.sort(key=lambda stretch: stretch[0])
    return StoredTensors({name: tuple(shape) for name, shape in manifest.shapes[group].items()}, pieces)
