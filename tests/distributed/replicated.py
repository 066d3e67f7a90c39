"""Optimizer steps on ranks that are threads, each with all master weights."""

from collections.abc import Callable
from typing import Any

import torch
from thread_ranks import as_threads
from torch import Tensor

from qarl.distributed.ranks import Ranks
from qarl.training.updates import LocalUpdates


class ReplicatedUpdates(LocalUpdates):
    """Sums the gradients of all ranks in rank order.

    parts: Losses of this rank. rounds: Rounds in which any rank had a loss.
    """

    def __init__(self, policy: Any, config: Any, ranks: Ranks) -> None:
        super().__init__(policy, config)
        self.ranks, self.parts, self.rounds = ranks, 0, 0

    def backward(self, loss: Tensor | None) -> None:
        self.rounds += 1
        if loss is not None:
            self.parts += 1
            super().backward(loss)

    def norm(self) -> float:
        sums = self.gradients.take()
        for master, own in zip(self._masters, sums, strict=True):
            every = self.ranks.gather_tensors(torch.zeros_like(master) if own is None else own)
            self.gradients._sums[master] = torch.stack(every).sum(0)
        return super().norm()


def run_threads(count: int, work: Callable[[Ranks], Any], faults: bool = False) -> list[Any]:
    """Return the results of `work(ranks)` per rank. faults: Return errors instead of raising them."""

    def learning(ranks: Ranks) -> Any:
        torch.set_num_threads(1)  # said for each thread
        with torch.enable_grad():
            return work(ranks)

    results = as_threads(count, learning)
    for result in results:
        if isinstance(result, Exception) and not faults:
            raise result
    return results
