"""Checkpoints that survive `kill -9`, a full disk and a flipped bit. safetensors and JSON, no pickle.

    checkpoints/000010/masters.safetensors      one file per group; masters-00001.safetensors, ... above 4 GiB
                       state.json               everything that is not a tensor
                       manifest.json            bytes and SHA-256 of every file above, written last
    checkpoints/latest -> 000010

A run on several ranks writes one file per group and rank instead (see `qarl.storage.pieces`):

    checkpoints/000010/masters-r0001-of-0004.safetensors    slices of flattened tensors that a rank holds

A save goes into `.tmp-000010-<pid>-<host>`, every file and then the directory is fsynced, and one rename makes it
visible. So a directory with a numeric name was complete when it was written, and the digests show whether it still is.
With several ranks, the first creates the temporary directory, all write into it, and the first renames it once every
rank has reported that its files are on disk.
"""

import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from qarl.distributed.ranks import Ranks, SingleProcess
from qarl.distributed.together import on_first, together
from qarl.errors import UserError
from qarl.storage.disk import disk_errors, fsync_directory, require_free
from qarl.storage.leftovers import delete, hidden, remove_abandoned
from qarl.storage.loading import Checkpoint, CheckpointDamaged, load_checkpoint
from qarl.storage.names import checkpoint_steps, step_name
from qarl.storage.pieces import Piece, needed_bytes, plan_files, write_files, write_manifest


class CheckpointStore:
    """The `checkpoints/` directory of one run, written by its process or its ranks (`RunDirectory` holds the lock).

    Opening a store removes what killed saves of this host left behind. With several ranks, opening a store and all
    methods except `steps` and `path` are collectives, and an error on one rank is raised on all (`Ranks.all_agree`).

    Args:
        directory: The directory; created if missing.
        keep_last: Number of newest checkpoints to keep; 0 keeps all.
        ranks: Ranks of the run; None for a single process.

    Raises:
        UserError: The directory cannot be created.
    """

    def __init__(self, directory: Path, keep_last: int, ranks: Ranks | None = None) -> None:
        assert keep_last >= 0, keep_last
        self.directory = Path(directory)
        self.keep_last = keep_last
        self.ranks = ranks or SingleProcess()
        on_first(self.ranks, self._open)

    def _open(self) -> None:
        with disk_errors(self.directory):
            self.directory.mkdir(parents=True, exist_ok=True)
            remove_abandoned(self.directory)

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, damaged ones included, ascending."""
        return checkpoint_steps(self.directory)

    def path(self, step: int) -> Path:
        return self.directory / step_name(step)

    def save(self, step: int, pieces: Sequence[Piece], state: dict[str, Any]) -> Path:
        """Write one checkpoint durably, point `latest` at it, then prune. Replaces an existing checkpoint of this step.

        All ranks write in parallel.

        Args:
            step: Training step.
            pieces: Pieces held by this rank. The pieces of all ranks cover each tensor exactly once; a single process
                holds whole tensors.
            state: JSON values; the first rank's are written. Keys are strings, tuples come back as lists, NaN and
                infinities survive.

        Returns:
            The checkpoint's directory.

        Raises:
            UserError: The disk of a rank refuses. Nothing of this checkpoint stays, and earlier ones are untouched. The
                other ranks' error names that rank, its host and the path.
        """
        ranks = self.ranks
        final, state_json = self.path(step), json.dumps(state, indent=1).encode()
        needed = sum(ranks.gather(needed_bytes(pieces))) + len(state_json)
        temporary = self.directory / ranks.gather(hidden(self.directory, step_name(step)).name)[0]
        files = plan_files(pieces, ranks.rank, ranks.count)

        def begin() -> None:
            fix = "free some space, set train.run_dir to another disk, or lower checkpoint.keep_last"
            require_free(final, needed, "a checkpoint", fix)
            with disk_errors(final, needed):
                self.directory.mkdir(exist_ok=True)  # it may have been removed while the run continued
                if final.exists():  # of an earlier history of the run; `discard_after` explains why it must go
                    self._remove(step)
                temporary.mkdir()

        def write() -> dict[str, Any]:
            with disk_errors(final, needed):
                return write_files(temporary, pieces, files, whole=ranks.count == 1)

        def publish() -> None:
            with disk_errors(final, needed):
                write_manifest(temporary, step, state_json, shares)
                os.rename(temporary, final)
                fsync_directory(self.directory)
                self._link_latest(step)
                self._prune(step)

        try:
            on_first(ranks, begin)
            shares = ranks.gather(together(ranks, write))
            on_first(ranks, publish)
        finally:
            if ranks.first:
                shutil.rmtree(temporary, ignore_errors=True)  # gone already unless something above failed
        return final

    def latest_valid(self, on_skip: Callable[[str], None]) -> Checkpoint | None:
        """Return the newest checkpoint that passes verification; None if there are no checkpoints.

        on_skip: called with one line for each damaged checkpoint passed over. Raises UserError if all are damaged.
        """
        steps = self.ranks.gather(self.steps())[0]
        for step in reversed(steps):
            try:
                return load_checkpoint(self.path(step), ranks=self.ranks)
            except CheckpointDamaged as error:
                on_skip(f"skipping checkpoint {step}: {error}")
        if steps:
            raise UserError(
                f"{self.directory}: all {len(steps)} checkpoints are damaged; restore one from a copy, or choose "
                "another train.run_dir to start again"
            )
        return None

    def discard_after(self, step: int) -> list[int]:
        """Remove checkpoints newer than `step`, from which the run resumes; returns their steps.

        They are damaged and were skipped, or the user went back to an earlier step. If they stayed, a later
        `latest_valid` could combine the weights of one history with the metrics of another. Raises UserError if the
        disk refuses.
        """
        newer = [other for other in self.ranks.gather(self.steps())[0] if other > step]

        def discard() -> None:
            with disk_errors(self.directory):
                if self.path(step).exists():
                    self._link_latest(step)
                for other in newer:
                    self._remove(other)

        on_first(self.ranks, discard)
        return newer

    def _link_latest(self, step: int) -> None:
        link, latest = self.directory / ".latest", self.directory / "latest"
        link.unlink(missing_ok=True)
        link.symlink_to(self.path(step).name)
        if latest.is_dir() and not latest.is_symlink():  # a copy of the run that followed links
            delete(latest)
        os.replace(link, latest)
        fsync_directory(self.directory)

    def _prune(self, just_written: int) -> None:
        if self.keep_last:
            for step in self.steps()[: -self.keep_last]:
                if step != just_written:
                    self._remove(step)

    def _remove(self, step: int) -> None:
        """Rename, then delete, so that a kill cannot leave a partial checkpoint under a valid name."""
        aside = hidden(self.directory, step_name(step))
        delete(aside)
        os.rename(self.path(step), aside)
        delete(aside)
