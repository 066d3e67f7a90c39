"""One rank of tools/bench_ranks.py: its group, its model and its tokens."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
import torch.distributed as dist
from harness import Record, timed
from model_sizes import Shape

from qarl.distributed.exchange import GroupExchange

WARMUP = 2  # calls before those that are timed
LENGTH = 1024  # of a sequence


class Bench:
    """One rank, and the options of the command line."""

    def __init__(
        self, exchange: GroupExchange, group: dist.ProcessGroup, shape: Shape, options: argparse.Namespace
    ) -> None:
        self.exchange, self.group, self.shape, self.options = exchange, group, shape, options
        self.device = exchange.device

    def timed(self, call: Callable[[], object], prepare: Callable[[], object] = lambda: None) -> Record:
        """See `harness.timed`. Ranks begin each call together."""

        def together() -> None:
            prepare()
            dist.barrier(self.group)

        return timed(call, self.device, WARMUP, self.options.iterations, prepare=together)


def random_tokens(shape: Shape, tokens: int, rank: int) -> torch.Tensor:
    """Token ids (sequences, length + 1), int64: `length` of each are run, and `length` predicted. Each rank's own."""
    length = min(LENGTH, tokens)
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(3, shape.vocabulary, (tokens // length, length + 1), generator=generator)
