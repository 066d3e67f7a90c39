"""Collectives that propagate errors: work succeeds on all ranks or fails on all."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from qarl.distributed.ranks import Ranks
from qarl.errors import UserError
from qarl.utils.signals import is_stop

T = TypeVar("T")


def together(ranks: Ranks, work: Callable[[], T], longer_s: float = 0) -> T:
    """Run `work` on every rank; if it raises on any rank, every rank raises. A collective.

    Long work may call `Ranks.poll`, which ends it as soon as it has failed on another rank.

    Args:
        ranks: The ranks of the run.
        work: What to run. Signals end it at once and without the other ranks; see `qarl.utils.signals.is_stop`.
        longer_s: Seconds, beyond `distributed.timeout_s`, that one rank may need more than another.

    Returns:
        The result of `work`.

    Raises:
        BaseException: The exception of `work` on the rank where it failed, otherwise `OtherRankFailed`.
    """
    fault: BaseException | None = None
    result: T | None = None
    try:
        result = work()
    except BaseException as error:
        if is_stop(error):
            raise
        fault = error
        ranks.broadcast_error(fault)
    if longer_s:
        ranks.wait_for_all(longer_s)
    ranks.all_agree(fault)
    return cast(T, result)


def on_first(ranks: Ranks, work: Callable[[], T]) -> T | None:
    """Run `work` on the first rank only, with the error handling of `together`. Returns None on the others."""
    return together(ranks, lambda: work() if ranks.first else None)


def require_same(ranks: Ranks, values: Mapping[str, Any], fix: str) -> None:
    """Raise UserError on all ranks unless `values` are the same on every rank. A collective.

    Args:
        ranks: All ranks of the run.
        values: This rank's JSON values by display name, most likely causes first.
        fix: What the user should do about a difference.
    """
    fault = rank_difference(ranks.gather(dict(values)), fix)
    ranks.all_agree(None if fault is None else UserError(fault))


def same_files(ranks: Ranks, paths: Callable[[], Iterable[Path]]) -> list[int]:
    """Find the ranks that see the same files, so that they can share the work of reading them. A collective.

    Files are the same if host, boot id, device, inode, size and time match. A bind mount of another file at the same
    path has another inode. A network disk has another device number on every machine, so each machine reads its own
    view.

    Args:
        ranks: All ranks of the run.
        paths: Returns this rank's files. Errors that it raises are raised on all ranks.

    Returns:
        For each rank the lowest rank that sees the same files.
    """
    places = ranks.gather(together(ranks, lambda: _place(paths())))
    return [places.index(place) for place in places]


def _place(paths: Iterable[Path]) -> list[Any]:
    boot = Path("/proc/sys/kernel/random/boot_id")
    stats = [path.stat() for path in sorted(paths)]
    files = [[stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns] for stat in stats]
    return [socket.gethostname(), boot.read_text() if boot.exists() else "", files]


def rank_difference(values: Sequence[Mapping[str, Any]], fix: str) -> str | None:
    """Return one line that names the first differing value and its ranks; None if all values are equal.

    values: one mapping per rank, in rank order. A missing name counts as null.
    """
    names = dict.fromkeys(name for own in values for name in own)
    different = [name for name in names if any(own.get(name) != values[0].get(name) for own in values)]
    if not different:
        return None
    ranks_of: dict[str, list[int]] = {}
    for rank, own in enumerate(values):
        ranks_of.setdefault(json.dumps(own.get(different[0])), []).append(rank)
    groups = ", ".join(f"{_listed(group)} {_shown(json.loads(value))}" for value, group in ranks_of.items())
    others = ", ".join(different[1:4]) + (f" and {len(different) - 4} more" if len(different) > 4 else "")
    also = f" (and also: {others})" if others else ""
    return f"distributed: different between ranks: {different[0]}: {groups}{also}; {fix}"


def _shown(value: Any) -> str:
    """Format a value for a message: the first 12 digits of a digest, both ends of a long value."""
    if value is None:
        return "none"
    text = value if isinstance(value, str) else json.dumps(value)
    if len(text) == 64:
        return text[:12]
    return text if len(text) <= 60 else f"{text[:28]}...{text[-28:]}"


def _listed(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} has"
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"ranks {', '.join(map(str, ranks[:8]))}{more} have"
