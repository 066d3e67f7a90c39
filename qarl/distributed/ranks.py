"""The ranks of a run, and what they tell one another beside tensors of the model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from qarl.distributed.fault import Fault, OtherRankFailed, fault_behind

__all__ = ["Alone", "OtherRankFailed", "Ranks", "total"]


class Ranks(ABC):
    """The processes of one run. Every method but `tell`, `look` and `log_in` is a collective: all ranks call it, in the
    same order, from one thread at a time.

    As a context manager it leaves the group at the end. If an exception leaves the block, the other ranks are notified,
    and an exception that was caused by another rank's end becomes `OtherRankFailed`.

    Attributes:
        rank: Of this process, from 0.
        count: Number of ranks.
        agreed: The last exception that `agree` raised on this rank. If it is being handled, all ranks raised at the
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
        """Each rank's `value`, in the order of ranks, on every rank. value: what JSON can say, floats with all bits."""

    @abstractmethod
    def gather_tensors(self, tensor: Tensor) -> list[Tensor]:
        """Each rank's tensor, in the order of ranks, on every rank.

        tensor: on the CPU, of any shape, which may differ between ranks, and of one dtype on all of them.
        """

    def agree(self, fault: BaseException | None = None) -> None:
        """Go on together or not at all: returns where no rank has a fault.

        The rank with a fault raises its own. The others raise `OtherRankFailed`, which names the first rank that has
        one and its line.
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

    def tell(self, fault: BaseException) -> None:
        """Let those that `look` know of a fault, before `agree` raises it everywhere. No collective."""
        return

    def look(self) -> None:
        """Raise `OtherRankFailed` where another rank has told of a fault since the last collective, or is gone.

        For work that takes long, after which all ranks agree. It costs nothing. No collective.
        """
        return

    def signal(self, signum: int | None) -> int | None:
        """The signal that any rank has received, the lowest rank's where there are several; None where none has."""
        return next((other for other in self.gather(signum) if other is not None), None)

    def barrier(self) -> None:
        """Returns once all ranks are here."""
        self.gather(None)

    def meet(self, longer_s: float) -> None:
        """Returns once all ranks are here, which may take `longer_s` more than collectives are given."""
        self.barrier()

    @abstractmethod
    def log_in(self, directory: Path) -> None:
        """From now on, write this process's output to a file there, unless it is the first rank.

        Only under `qarl train --nproc`; other launchers see to it themselves. No collective.
        """

    @abstractmethod
    def close(self) -> None:
        """Leave the group, once all ranks are here. May be called twice."""

    def fail(self, error: BaseException) -> BaseException:
        """Leave the group for `error`, and let the other ranks know. Returns the exception to end with."""
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
        """This rank's of `count` things in a row, the first ranks having one more where they do not divide.

        among: only these ranks get any; None: all.
        """
        among = range(self.count) if among is None else among
        if self.rank not in among:
            return range(count, count)
        (each, more), place = divmod(count, len(among)), among.index(self.rank)
        start = place * each + min(place, more)
        return range(start, start + each + (place < more))


class Alone(Ranks):
    """A run of one process: every collective is over before it begins."""

    rank, count = 0, 1

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def gather_tensors(self, tensor: Tensor) -> list[Tensor]:
        return [tensor]

    def agree(self, fault: BaseException | None = None) -> None:
        if fault is not None:
            raise fault

    def log_in(self, directory: Path) -> None:
        return

    def close(self) -> None:
        return


def total(ranks: Ranks, values: Sequence[float]) -> list[float]:
    """The sums of `values` over all ranks, added in the order of ranks in float64: the same bits on every rank."""
    columns = ranks.gather([float(value) for value in values])
    return torch.tensor(columns, dtype=torch.float64).cumsum(0)[-1].tolist() if columns[0] else []
