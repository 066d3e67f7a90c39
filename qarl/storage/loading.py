"""Reading checkpoints. The number of ranks that wrote one may differ from the number that reads it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from torch import Tensor

from qarl.distributed.ranks import Ranks
from qarl.distributed.together import require_same, same_files, together
from qarl.errors import UserError
from qarl.inputs.files import NoSuchFile, Unreadable
from qarl.inputs.json import read_json_object
from qarl.inputs.paths import path_errors
from qarl.storage.manifest import MANIFEST, Manifest, read_manifest, verify_files
from qarl.storage.stored import StoredTensors, open_group

T = TypeVar("T")


class CheckpointDamaged(UserError):
    """A checkpoint differs from what was saved. The message names the file and the reason."""


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


def load_checkpoint(path: Path, groups: Collection[str] | None, ranks: Ranks) -> Checkpoint:
    """See `CheckpointStore.load`."""
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
    tensors = {group: open_group(path, manifest, group) for group in _wanted(manifest, groups)}
    state = read_json_object(path / "state.json", big_integers=True, nonfinite=True, surrogates=True)
    return Checkpoint(manifest.step, tensors, state, path, manifest.ranks)


def _wanted(manifest: Manifest, groups: Collection[str] | None) -> list[str]:
    return [group for group in manifest.groups if groups is None or group in groups]
