"""Disk space that a comparison will need, checked before training. Imports no torch."""

from collections.abc import Sequence
from pathlib import Path

from qarl.comparison.members import architecture_of
from qarl.comparison.plan import Member
from qarl.config import Config
from qarl.memory.tensors import saved_bytes
from qarl.report.formatting import bytes_
from qarl.storage.disk import free_bytes


def space_warning(members: Sequence[Member], out: Path, jobs: int) -> str | None:
    """Return a warning if the checkpoints of waiting members will not fit on the disk of `out`, else None.

    Existing checkpoints of stopped members are counted again. A model of unknown shape counts as 0.

    Args:
        members: Members of the comparison.
        out: Output directory.
        jobs: Number of members trained concurrently; each needs space for one more checkpoint.
    """
    waiting = [member.config for member in members if member.state == "waiting" and member.config is not None]
    each = [(_checkpoint(config), _kept(config)) for config in waiting]
    writing = sum(sorted((size for size, _ in each), reverse=True)[:jobs])
    needed = writing + sum(size * kept for size, kept in each)
    free = free_bytes(out)
    if needed <= free:
        return None
    return (
        f"warning: {out}: {len(waiting)} members will leave checkpoints of about {bytes_(needed)}, and "
        f"{bytes_(free)} are free; free some space, choose --out on another disk, or train fewer members. A member "
        "that finds the disk full fails; rerun the same command to resume."
    )


def _checkpoint(config: Config) -> int:
    architecture = architecture_of(config)
    return 0 if architecture is None else saved_bytes(config, architecture)


def _kept(config: Config) -> int:
    """Return the number of checkpoints of a finished run."""
    keep, steps = config.checkpoint, config.train.steps
    written = steps // keep.every + (1 if keep.save_final and steps % keep.every else 0)
    return min(written, keep.keep_last) if keep.keep_last else written
