"""Ranks that are threads of this process, for tests that need many small groups but no processes."""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qarl.distributed.ranks import Ranks, SingleProcess


class _Table:
    def __init__(self, count: int) -> None:
        self.barrier, self.values = threading.Barrier(count, timeout=120), [None] * count


class ThreadRanks(Ranks):
    def __init__(self, rank: int, count: int, table: _Table) -> None:
        self.rank, self.count, self._table = rank, count, table

    def _all(self, value: Any) -> list[Any]:
        self._table.values[self.rank] = value
        self._table.barrier.wait()
        found = list(self._table.values)
        self._table.barrier.wait()
        return found

    def gather(self, value: Any) -> list[Any]:
        return [json.loads(text) for text in self._all(json.dumps(value))]

    def gather_tensors(self, tensor: Tensor) -> list[Tensor]:
        return [other.clone() for other in self._all(tensor.detach().cpu())]

    def log_in(self, directory: Path) -> None:
        return

    def close(self) -> None:
        return


def as_threads(count: int, work: Callable[[Ranks], Any]) -> list[Any]:
    """Run `work(ranks)` on `count` ranks; return per rank its result, or the exception that it raised."""
    table, results = _Table(count), [None] * count

    def run(rank: int) -> None:
        try:
            with torch.no_grad():
                results[rank] = work(ThreadRanks(rank, count, table) if count > 1 else SingleProcess())
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    return results
