"""Work that counts only where it succeeds on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

from qarl.distributed.ranks import Ranks

T = TypeVar("T")


def together(ranks: Ranks, work: Callable[[], T], longer_s: float = 0) -> T:
    """What `work` gives; a collective. Where it raises on any rank, every rank raises as `Ranks.agree` says.

    Work that takes long may `Ranks.look`, and ends then as soon as it failed on another rank.

    longer_s: how much more than `distributed.timeout_s` one rank may need for it than another.
    """
    fault: Exception | None = None
    result: T | None = None
    try:
        result = work()
    except Exception as error:
        fault = error
        ranks.tell(fault)
    if longer_s:
        ranks.meet(longer_s)
    ranks.agree(fault)
    return cast(T, result)


def on_first(ranks: Ranks, work: Callable[[], T]) -> T | None:
    """`together`, of work that the first rank alone does; None on the others."""
    return together(ranks, lambda: work() if ranks.first else None)
