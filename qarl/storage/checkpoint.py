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
import socket
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from qarl.errors import UserError
from qarl.storage.disk import disk_errors, free_bytes, fsync_directory
from qarl.storage.tensorfile import safetensors_chunks, write_file

FORMAT_VERSION = 1
SHARD_BYTES = 4 * 2**30

_CHECKPOINT_NAME = re.compile(r"\d{6,}")
_LEFTOVER_NAME = re.compile(r"\.(tmp|old)-(\d+)-(\d+)-(.+)")


class CheckpointDamaged(UserError):
    """A checkpoint that is not what was saved. The message names the file and why."""


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
        return sorted(int(path.name) for path in self.directory.iterdir() if _CHECKPOINT_NAME.fullmatch(path.name))

    def path(self, step: int) -> Path:
        return self.directory / f"{step:06d}"

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
        if not path.is_dir():
            raise UserError(f"{path}: no such checkpoint; give a directory such as runs/NAME/checkpoints/000010")
        path = path.resolve()
        manifest = _read_manifest(path / "manifest.json")
        wanted = {group: files for group, files in manifest["groups"].items() if groups is None or group in groups}
        for name in ["state.json", *(name for files in wanted.values() for name in files)]:
            entry = manifest["files"][name]
            _verify(path / name, entry["bytes"], entry["sha256"])
        tensors: dict[str, dict[str, Tensor]] = {}
        for group, files in wanted.items():
            tensors[group] = {}
            for name in files:
                try:
                    tensors[group] |= load_file(path / name)
                except SafetensorError as error:
                    raise CheckpointDamaged(f"{path / name}: not a readable safetensors file ({error})") from error
        state = json.loads((path / "state.json").read_text(encoding="utf-8"))
        return Checkpoint(manifest["step"], tensors, state, path)

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
            shutil.rmtree(replaced)
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
        shutil.rmtree(hidden, ignore_errors=True)
        os.rename(self.path(step), hidden)
        shutil.rmtree(hidden)

    def _hidden(self, kind: str, step: int) -> Path:
        return self.directory / f".{kind}-{step:06d}-{os.getpid()}-{socket.gethostname()}"

    def _remove_leftovers(self) -> None:
        for path in self.directory.iterdir():
            match = _LEFTOVER_NAME.fullmatch(path.name)
            if match is None or not _is_abandoned(path, int(match[3]), match[4]):
                continue
            if match[1] == "old" and not (self.directory / match[2]).exists():
                os.rename(path, self.directory / match[2])
            else:
                shutil.rmtree(path)


def _is_abandoned(path: Path, pid: int, host: str) -> bool:
    if host == socket.gethostname():
        if pid == os.getpid():  # containers hand out the same small pids: this is an earlier namesake's
            return True
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass
    # Another host's (a restarted container has a new name), or a pid in use again: no live save rests for an hour.
    return time.time() - max(entry.stat().st_mtime for entry in (path, *path.iterdir())) > 3600


def _write_checkpoint(directory: Path, step: int, tensors: dict[str, dict[str, Tensor]], state_json: bytes) -> None:
    files: dict[str, dict[str, Any]] = {}
    groups: dict[str, list[str]] = {}
    for group, members in tensors.items():
        assert re.fullmatch(r"[a-z][a-z0-9_]*", group), f"group name {group!r} must do as a file name"
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


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointDamaged(f"{path}: missing") from None
    except OSError as error:
        raise CheckpointDamaged(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError:
        raise CheckpointDamaged(f"{path}: not valid JSON") from None
    if not isinstance(manifest, dict) or manifest.get("sha256") != _manifest_digest(manifest):
        raise CheckpointDamaged(f"{path}: its own digest does not match, it was changed after it was written")
    if manifest["format_version"] != FORMAT_VERSION:
        raise UserError(
            f"{path}: checkpoint format {manifest['format_version']}, this qarl reads {FORMAT_VERSION}; use the qarl "
            "version that wrote it (environment.json)"
        )
    return manifest


def _verify(path: Path, size: int, sha256: str) -> None:
    try:
        with open(path, "rb") as file:
            found = os.fstat(file.fileno()).st_size
            if found != size:
                raise CheckpointDamaged(f"{path}: {found:,} bytes, {size:,} were written")
            if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
                raise CheckpointDamaged(f"{path}: the digest does not match, the contents changed")
    except FileNotFoundError:
        raise CheckpointDamaged(f"{path}: missing") from None
    except OSError as error:
        raise CheckpointDamaged(f"{path}: cannot be read ({error.strerror})") from error
