"""The ranks of a run and their control messages; for model tensors see `qarl.distributed.exchange`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from qarl.distributed.fault import Fault, OtherRankFailed, fault_behind

__all__ = ["OtherRankFailed", "Ranks", "SingleProcess", "total"]


class Ranks(ABC):
    """The processes of one run.

    Every method except `broadcast_error`, `poll` and `log_in` is a collective: all ranks call it, in the same order and
    from one thread at a time.

    As a context manager it leaves the group at the end. If an exception leaves the block, the other ranks are notified,
    and an exception that was caused by another rank's end becomes `OtherRankFailed`.

    Attributes:
        rank: Rank of this process, from 0.
        count: Number of ranks.
        agreed: The last exception that `all_agree` raised on this rank. If it is being handled, all ranks raised at the
            same point, and further collectives are safe.
    """

    rank: int
    count: int
    agreed: BaseException | None = None

    @property
    def first(self) -> bool:
        """Whether this is the rank that writes logs, records and the console."""
        return self.rank == 0

    @abstractmethod
    def gather(self, value: Any) -> list[Any]:
        """All-gather a JSON value, in rank order. Floats keep all bits."""

    @abstractmethod
    def gather_tensors(self, tensor: Tensor) -> list[Tensor]:
        """All-gather a CPU tensor, in rank order. Shapes may differ between ranks; dtypes may not."""

    def all_agree(self, fault: BaseException | None = None) -> None:
        """Return if no rank has a fault; otherwise raise on all ranks.

        A rank with a fault raises its own. The others raise `OtherRankFailed` with the fault of the lowest such rank.
        """
        own = None if fault is None else fault_behind(self.rank, fault).text()
        try:
            texts = self.gather(own)
        except OtherRankFailed:
            if fault is not None:
                raise fault from None
            raise
        if fault is not None:
            self.agreed = fault
            raise fault
        for text in texts:
            if text is not None:
                self.agreed = OtherRankFailed(Fault.of(text))
                raise self.agreed

    def broadcast_error(self, fault: BaseException) -> None:
        """Broadcast a fault to ranks that call `poll`, before `all_agree` raises it everywhere. Not a collective."""
        return

    def poll(self) -> None:
        """Raise `OtherRankFailed` if another rank has called `broadcast_error` since the last collective, or is gone.

        Call it often during long work that ends with `all_agree`: it looks at most once per second. Not a collective.
        """
        return

    def signal(self, signum: int | None) -> int | None:
        """Return the signal that a rank has received, the lowest rank's if several have; None if none has."""
        return next((other for other in self.gather(signum) if other is not None), None)

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.gather(None)

    def wait_for_all(self, longer_s: float) -> None:
        """Wait for all ranks, with `longer_s` seconds added to the timeout of collectives."""
        self.barrier()

    @abstractmethod
    def log_in(self, directory: Path) -> None:
        """Redirect this process's output to a file in `directory`, unless it is the first rank.

        Only under `qarl train --nproc`, because other launchers handle output themselves. Not a collective.
        """

    @abstractmethod
    def close(self) -> None:
        """Wait for all ranks and leave the group. May be called twice."""

    def fail(self, error: BaseException) -> BaseException:
        """Leave the group because of `error` and notify the other ranks. Returns the exception to end with."""
        return error

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        elif (last := self.fail(error)) is not error:
            raise last from error

    def share(self, count: int, among: range | None = None) -> range:
        """Return this rank's contiguous share of `count` items. The first ranks get one more if it does not divide.

        among: only these ranks get items; None: all.
        """
        among = range(self.count) if among is None else among
        if self.rank not in among:
            return range(count, count)
        return share_of(among.index(self.rank), count, len(among))


class SingleProcess(Ranks):
    """A run of a single process: collectives return immediately."""

    rank, count = 0, 1

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def gather_tensors(self, tensor: Tensor) -> list[Tensor]:
        return [tensor]

    def all_agree(self, fault: BaseException | None = None) -> None:
        if fault is not None:
            raise fault

    def log_in(self, directory: Path) -> None:
        return

    def close(self) -> None:
        return


def share_of(place: int, count: int, shares: int) -> range:
    """Cut `count` items into `shares` contiguous ranges, and return range number `place`; see `Ranks.share`."""
    each, more = divmod(count, shares)
    start = place * each + min(place, more)
    return range(start, start + each + (place < more))


def total(ranks: Ranks, values: Sequence[float]) -> list[float]:
    """Sum `values` over all ranks in float64, in rank order, so every rank gets the same bits."""
    columns = ranks.gather([float(value) for value in values])
    return torch.tensor(columns, dtype=torch.float64).cumsum(0)[-1].tolist() if columns[0] else []
