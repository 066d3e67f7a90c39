"""A learner whose masters lie in rows on several ranks, on random weights and tokens."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from harness import Record
from qarl_kernels.logprob import Truncation
from step_bench.settings import learner_sections
from torch import Tensor

from qarl.config.load import make_config
from qarl.distributed.exchange import GroupExchange
from qarl.distributed.ranks import SingleProcess
from qarl.distributed.rows import RowPlan
from qarl.policy.skeleton import skeleton
from qarl.training.row_setup import from_rows
from ranks_bench.rank import Bench, random_tokens


class Bare(SingleProcess):
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


def learn_records(bench: Bench) -> Iterator[Record]:
    """Micro-batches, forward and backward, and whole updates.

    Times of an update are those of norm, clip, optimizer, quantization and the gather of all codes. Bytes are those
    that one call received.
    """
    for scheme in bench.options.scheme:
        yield from _records(bench, scheme)
        gc.collect()  # parameters and those who wait for their gradients know each other
        if bench.device.type == "cuda":
            torch.cuda.empty_cache()


def _records(bench: Bench, scheme: str) -> Iterator[Record]:
    shape, device, exchange, options = bench.shape, bench.device, bench.exchange, bench.options

    def random_rows(plan: RowPlan) -> dict[str, Tensor]:
        generator = torch.Generator(device).manual_seed(exchange.rank)
        sizes = {name: (len(plan.cut(name)[exchange.rank]), *size[1:]) for name, size in plan.shapes.items()}
        return {k: torch.randn(size, device=device, generator=generator).mul_(0.02) for k, size in sizes.items()}

    sections = learner_sections(scheme, shape, device.type, options.tokens, "layer")
    sections["optim"] = {"offload": options.offload or False}
    model = skeleton(shape.config())
    config = make_config(sections, "bench_ranks", [])
    policy, updates = from_rows(config, model, random_rows, device, None, exchange, Bare(exchange))
    policy.set_recompute("layer")
    ids = random_tokens(shape, options.tokens, exchange.rank).tolist()
    prompts, responses = [row[:1] for row in ids], [row[1:] for row in ids]

    def backward() -> None:
        logp, _ = policy.logprobs(prompts, responses, Truncation(), 4096)
        updates.backward(logp.mean())

    def update() -> None:
        updates.step(updates.norm())

    def moved(call: Callable[[], object]) -> Record:
        """Bytes that come to this rank in a call, by kind."""
        before = exchange.received.copy()
        call()
        return {"received_bytes_by_kind": dict(exchange.received - before)}

    labels = {"part": "learn", "scheme": scheme, "offload": options.offload}
    found = bench.timed(backward)
    rate = {"tokens": options.tokens, "tokens_per_s": options.tokens / found["seconds"]}
    yield labels | {"what": "micro-batch"} | rate | found | moved(backward)
    found = bench.timed(update, backward)
    backward()
    dist.barrier(bench.group)
    yield labels | {"what": "update"} | found | moved(update)
    updates.clear()
    dist.barrier(bench.group)
