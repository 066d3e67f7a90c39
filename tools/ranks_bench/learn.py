"""A learner whose masters lie in rows on several ranks, on random weights and tokens."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from qarl_kernels.logprob import Truncation
from step_bench.measure import timed
from step_bench.settings import learner_sections
from torch import Tensor

from qarl.config.load import make_config
from qarl.distributed.exchange import GroupExchange, Pending
from qarl.distributed.ranks import Alone
from qarl.distributed.rows import RowPlan
from qarl.policy.skeleton import skeleton
from qarl.training.row_setup import from_rows
from ranks_bench.micro_batch import random_tokens
from ranks_bench.parts import WARMUP, Bench, Record


class Bare(Alone):
    """Ranks that tell each other numbers alone, over the tensors' own process group."""

    def __init__(self, exchange: GroupExchange) -> None:
        self.rank, self.count, self.exchange = exchange.rank, exchange.count, exchange

    def gather(self, value: Any) -> list[Any]:
        own = torch.tensor(value, dtype=torch.float64, device=self.exchange.device)
        ones = [range(rank, rank + 1) for rank in range(self.count)]
        lengths = self.exchange.gather_rows(torch.tensor([len(own)], device=own.device), ones).tolist()
        ends = [sum(lengths[: rank + 1]) for rank in range(self.count)]
        cut = [range(end - length, end) for end, length in zip(ends, lengths, strict=True)]
        return [part.tolist() for part in self.exchange.gather_rows(own, cut).split(lengths)]


class Silent(GroupExchange):
    """Sends nothing of gradients: the rows of a sum are this rank's own, n times."""

    def begin_sums(
        self, tensors: Sequence[Tensor], cuts: Sequence[Sequence[range]], kind: str = "gradients"
    ) -> list[Pending]:
        return [
            _Own(tensor[cut[self.rank].start : cut[self.rank].stop]) for tensor, cut in zip(tensors, cuts, strict=True)
        ]


class _Own(Pending):
    def __init__(self, rows: Tensor) -> None:
        self._rows = rows

    def rows(self) -> Tensor:
        return self._rows.clone()


def learn_records(
    bench: Bench, schemes: Sequence[str], tokens: int, offload: str | bool, without: bool = True
) -> Iterator[Record]:
    """Micro-batches of `tokens` with messages and, if asked for, `without`, rounds of a rank that has no part, and
    whole updates.

    Times of an update are those of norm, clip, optimizer, quantization and the gather of all codes. Bytes are those
    that one call received.
    """
    exchange = bench.exchange
    silent = Silent(bench.group, exchange.rank, exchange.count, exchange.device)
    ways = [("with messages", exchange), *([("without messages", silent)] if without else [])]
    for scheme in schemes:
        for what, used in ways:
            yield from _records(bench, scheme, tokens, offload, what, used)
            gc.collect()  # parameters and those who wait for their gradients know each other
            if bench.device.type == "cuda":
                torch.cuda.empty_cache()


def _records(
    bench: Bench, scheme: str, tokens: int, offload: str | bool, what: str, exchange: GroupExchange
) -> Iterator[Record]:
    shape, device = bench.shape, bench.device
    model = skeleton(shape.config())

    def random_rows(plan: RowPlan) -> dict[str, Tensor]:
        rank = exchange.rank
        return bench.random({k: (len(plan.cut(k)[rank]), *size[1:]) for k, size in plan.shapes.items()}, rank)

    sections = learner_sections(scheme, shape, device.type, tokens, "layer") | {"optim": {"offload": offload}}
    config = make_config(sections, "bench_ranks", [])
    policy, updates = from_rows(config, model, random_rows, device, None, exchange, Bare(exchange))
    policy.set_recompute("layer")
    ids = random_tokens(shape, tokens, exchange.rank).tolist()
    prompts, responses = [row[:1] for row in ids], [row[1:] for row in ids]

    def backward() -> None:
        logp, _ = policy.logprobs(prompts, responses, Truncation(), 4096)
        updates.backward(logp.mean())

    def update() -> None:
        updates.step(updates.norm())

    def prepare() -> None:
        backward()
        dist.barrier(bench.group)

    def moved(call: Callable[[], object]) -> tuple[Record, Counter[str]]:
        """Bytes that come to this rank in a call, and pieces of memory that leave it, by kind."""
        received, parts = exchange.received.copy(), exchange.parts.copy()
        call()
        return {"received_bytes_by_kind": dict(exchange.received - received)}, exchange.parts - parts

    labels = {"part": "learn", "scheme": scheme, "offload": offload, "exchange": what}
    found = bench.timed(backward)
    rate = {"tokens": tokens, "tokens_per_s": tokens / found["seconds"]}
    received, _ = moved(backward)
    yield labels | {"what": "micro-batch"} | rate | found | received
    if what == "with messages":
        found = bench.timed(lambda: updates.backward(None))
        received, parts = moved(lambda: updates.backward(None))
        yield labels | {"what": "idle round", "parts": parts["gradients"]} | found | received
        found = timed(update, device, WARMUP, bench.iterations, prepare=prepare)
        prepare()
        received, parts = moved(update)
        yield labels | {"what": "update", "parts": parts["codes"]} | found | received
    updates.clear()
    dist.barrier(bench.group)
