"""Checkpoints that survive `kill -9`, a full disk and a flipped bit. safetensors and JSON, no pickle.

    checkpoints/000010/masters.safetensors      one file a group; masters-00001.safetensors, ... above 4 GiB
                       state.json               everything that is not a tensor
                       manifest.json            bytes and SHA-256 of every file above, written last
    checkpoints/latest -> 000010

A save goes into `.tmp-000010-<pid>-<host>`, every file and then the directory is fsynced, and one rename makes it
visible. So a directory named by digits is complete, and the digests tell whether it still is.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import StringConstraints
from torch import Tensor

from qarl.errors import UserError
from qarl.inputs.files import NoSuchFile, Unreadable, open_regular
from qarl.inputs.json import read_json_object
from qarl.inputs.paths import path_errors, reason_of
from qarl.inputs.schema import Bytes, FileName, Record, Sha256, Step, checked
from qarl.storage.disk import disk_errors, free_bytes, fsync_directory
from qarl.storage.leftovers import delete, is_abandoned, mark
from qarl.storage.names import checkpoint_steps, step_name, step_of
from qarl.storage.tensorfile import read_tensors, safetensors_chunks, write_file

FORMAT_VERSION = 1
SHARD_BYTES = 4 * 2**30

_GROUP_NAME = r"[a-z][a-z0-9_]*"
_LEFTOVER_NAME = re.compile(r"\.(tmp|old)-([0-9]{6,10})-([0-9]{1,9})-(.+)")


class CheckpointDamaged(UserError):
    """A checkpoint that is not what was saved. The message names the file and why."""


class _File(Record):
    bytes: Bytes
    sha256: Sha256


class _Manifest(Record):
    step: Step
    groups: dict[Annotated[str, StringConstraints(pattern=f"^{_GROUP_NAME}$")], list[FileName]]
    files: dict[FileName, _File]


@dataclass(frozen=True)
class Checkpoint:
    """What `CheckpointStore.save` was given. Tensors are CPU views of the mapped files: copy them into your own."""

    step: int
    tensors: dict[str, dict[str, Tensor]]
    state: dict[str, Any]
    path: Path


class CheckpointStore:
    """The `checkpoints/` directory of one run, written by one process (`RunDirectory` holds the lock).

    keep_last: how many of the newest checkpoints to keep, 0 for all. Opening a store removes what killed saves of
    this host left behind. Raises UserError if the directory cannot be created.
    """

    def __init__(self, directory: Path, keep_last: int) -> None:
        assert keep_last >= 0, keep_last
        self.directory = Path(directory)
        self.keep_last = keep_last
        with disk_errors(self.directory):
            self.directory.mkdir(parents=True, exist_ok=True)
            self._remove_leftovers()

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, damaged ones included, ascending."""
        return checkpoint_steps(self.directory)

    def path(self, step: int) -> Path:
        return self.directory / step_name(step)

    def save(self, step: int, tensors: dict[str, dict[str, Tensor]], state: dict[str, Any]) -> Path:
        """Write one checkpoint durably, point `latest` at it, then prune. An existing one of this step is replaced.

        tensors: group name -> tensor name -> tensor of any shape, layout, device and dtype in `DTYPE_NAMES`.
        state: JSON values (keys are strings, tuples come back as lists; NaN and infinities survive).
        Raises UserError if the disk refuses: nothing of this checkpoint stays, earlier ones are untouched.
        """
        state_json = json.dumps(state, indent=1).encode()
        flat = [tensor for group in tensors.values() for tensor in group.values()]
        needed = sum(t.nbytes for t in flat) + 256 * len(flat) + len(state_json) + 16384  # headers, manifest, blocks
        final = self.path(step)
        free = free_bytes(self.directory)
        if free < needed:
            raise UserError(
                f"{final}: no space for a checkpoint ({needed:,} bytes needed, {free:,} free); free some space, set "
                "train.run_dir to another disk, or lower checkpoint.keep_last"
            )
        temporary = self._hidden("tmp", step)
        with disk_errors(final, needed):
            try:
                self.directory.mkdir(exist_ok=True)  # somebody may have removed it while the run went on
                temporary.mkdir()
                _write_checkpoint(temporary, step, tensors, state_json)
                self._publish(temporary, step)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)  # gone already unless something above failed
            self._prune(step)
        return final

    @staticmethod
    def load(path: Path, groups: Collection[str] | None = None) -> Checkpoint:
        """Read and verify one checkpoint directory (or a link to one, such as `checkpoints/latest`).

        groups: the tensor groups to read and verify; None for all.
        Raises UserError if there is none, CheckpointDamaged if a file is missing, cut short or changed.
        """
        path = Path(path)
        with path_errors(str(path), "give a checkpoint that can be read"):
            if not path.is_dir():
                raise UserError(f"{path}: no such checkpoint; give a directory such as runs/NAME/checkpoints/000010")
            path = path.resolve()
        try:
            return _read_checkpoint(path, groups)
        except NoSuchFile as error:
            raise CheckpointDamaged(f"{str(error).removesuffix('no such file')}missing") from None
        except Unreadable as error:
            raise CheckpointDamaged(str(error)) from None

    def latest_valid(self, on_skip: Callable[[str], None]) -> Checkpoint | None:
        """The newest checkpoint that verifies; None if there are none at all.

        on_skip: called with one line for each damaged checkpoint passed over. Raises UserError if all are damaged.
        """
        steps = self.steps()
        for step in reversed(steps):
            try:
                return self.load(self.path(step))
            except CheckpointDamaged as error:
                on_skip(f"skipping checkpoint {step}: {error}")
        if steps:
            raise UserError(
                f"{self.directory}: all {len(steps)} checkpoints are damaged; restore one from a copy, or choose "
                "another train.run_dir to start again"
            )
        return None

    def discard_after(self, step: int) -> list[int]:
        """Remove checkpoints newer than `step`, from which the run goes on; returns their steps.

        Damaged ones that were skipped, or those of a future the user went back from: left in place, a later
        `latest_valid` would join one history's weights to another's metrics. Raises UserError if the disk refuses.
        """
        newer = [other for other in self.steps() if other > step]
        with disk_errors(self.directory):
            if self.path(step).exists():
                self._link_latest(step)
            for other in newer:
                self._remove(other)
        return newer

    def _publish(self, temporary: Path, step: int) -> None:
        final = self.path(step)
        if final.exists():
            # A directory cannot be renamed over another. A kill between the two renames leaves `.old-...`,
            # which `_remove_leftovers` puts back.
            replaced = self._hidden("old", step)
            os.rename(final, replaced)
            try:
                os.rename(temporary, final)
            except OSError:
                os.rename(replaced, final)
                raise
            fsync_directory(self.directory)
            delete(replaced)
        else:
            os.rename(temporary, final)
            fsync_directory(self.directory)
        self._link_latest(step)

    def _link_latest(self, step: int) -> None:
        link = self.directory / ".latest"
        link.unlink(missing_ok=True)
        link.symlink_to(self.path(step).name)
        os.replace(link, self.directory / "latest")
        fsync_directory(self.directory)

    def _prune(self, just_written: int) -> None:
        if self.keep_last:
            for step in self.steps()[: -self.keep_last]:
                if step != just_written:
                    self._remove(step)

    def _remove(self, step: int) -> None:
        """Renamed first, so that a kill half-way through does not leave half a checkpoint under a good name."""
        hidden = self._hidden("tmp", step)
        delete(hidden)
        os.rename(self.path(step), hidden)
        delete(hidden)

    def _hidden(self, kind: str, step: int) -> Path:
        return self.directory / f".{kind}-{step_name(step)}-{mark()}"

    def _remove_leftovers(self) -> None:
        for path in self.directory.iterdir():
            match = _LEFTOVER_NAME.fullmatch(path.name)
            if match is None or not is_abandoned(path, int(match[3]), match[4]):
                continue
            if match[1] == "old" and not (self.directory / match[2]).exists():
                os.rename(path, self.directory / match[2])
            else:
                delete(path)


def _write_checkpoint(directory: Path, step: int, tensors: dict[str, dict[str, Tensor]], state_json: bytes) -> None:
    files: dict[str, dict[str, Any]] = {}
    groups: dict[str, list[str]] = {}
    for group, members in tensors.items():
        assert re.fullmatch(_GROUP_NAME, group), f"group name {group!r} must do as a file name"
        shards = _shards(members)
        names = [f"{group}-{i:05d}.safetensors" for i in range(1, len(shards) + 1)]
        groups[group] = names if len(shards) > 1 else [f"{group}.safetensors"]
        for name, shard in zip(groups[group], shards, strict=True):
            files[name] = write_file(directory / name, safetensors_chunks(shard))
    files["state.json"] = write_file(directory / "state.json", [state_json])
    manifest = {"format_version": FORMAT_VERSION, "step": step, "groups": groups, "files": files}
    manifest["sha256"] = _manifest_digest(manifest)
    write_file(directory / "manifest.json", [json.dumps(manifest, indent=1).encode()])
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


def _manifest_digest(manifest: dict[str, Any]) -> str:
    body = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _read_checkpoint(path: Path, groups: Collection[str] | None) -> Checkpoint:
    """As `CheckpointStore.load`, of a directory that is there. Raises NoSuchFile, Unreadable, CheckpointDamaged."""
    manifest = _read_manifest(path / "manifest.json")
    if groups is not None and (absent := set(groups) - manifest.groups.keys()):
        raise CheckpointDamaged(f"{path}: holds no {min(absent)}")
    wanted = {group: files for group, files in manifest.groups.items() if groups is None or group in groups}
    for name in ["state.json", *(name for files in wanted.values() for name in files)]:
        if name not in manifest.files:
            raise CheckpointDamaged(f"{path / 'manifest.json'}: does not list {name} among its files")
        _verify(path / name, manifest.files[name])
    tensors: dict[str, dict[str, Tensor]] = {}
    for group, files in wanted.items():
        tensors[group] = {}
        for name in files:
            tensors[group] |= read_tensors(path / name)
    state = read_json_object(path / "state.json", big_integers=True, nonfinite=True, surrogates=True)
    return Checkpoint(manifest.step, tensors, state, path)


def _read_manifest(path: Path) -> _Manifest:
    manifest = read_json_object(path)
    if manifest.get("sha256") != _manifest_digest(manifest):
        raise CheckpointDamaged(f"{path}: its own digest does not match, it was changed after it was written")
    if manifest.get("format_version") != FORMAT_VERSION:
        raise UserError(
            f"{path}: checkpoint format {manifest.get('format_version')}, this qarl reads {FORMAT_VERSION}; use the "
            "qarl version that wrote it (environment.json)"
        )
    found = checked(_Manifest, manifest, str(path))
    if step_of(path.parent.name) not in (None, found.step):
        raise CheckpointDamaged(f"{path}: is of step {found.step}, not of the one that its directory is named by")
    return found


def _verify(path: Path, expected: _File) -> None:
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size != expected.bytes:
            raise CheckpointDamaged(f"{path}: {size:,} bytes, {expected.bytes:,} were written")
        try:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise Unreadable(str(path), f"cannot be read: {reason_of(error)}") from error
    if digest != expected.sha256:
        raise CheckpointDamaged(f"{path}: the digest does not match, the contents changed")
