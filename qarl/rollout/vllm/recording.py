"""Records the experts that tokens of a call were routed to: reads them after each forward of vLLM, sorts by request.

vLLM's own record depends on its version and model runner. Here a forward leaves the experts of its rows in one buffer
with a fixed address, which CUDA graphs need, and the runner's batch gives the request of each row. The prefix cache is
emptied before a call, so a cached prefix was computed by another request of the same call, with the same experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from qarl.policy.routes import stored, unknown

PENDING = 32 << 20  # bytes kept on the device before they are copied to the host

Experts = Callable[[int], Tensor]
"""Returns the experts of the last forward's first `rows` rows: (rows, L, k) integers, ascending, on the device."""


class RoutingBuffer:
    """The experts of the last forward's rows, as int16 (R, ...). Calling it writes them."""

    def __init__(self, *shape: int, device: torch.device | None = None) -> None:
        self._experts = torch.zeros(shape, dtype=torch.int16, device=device)

    def __call__(self, experts: Tensor) -> None:
        self._experts[: len(experts)].copy_(experts)

    def rows(self, count: int) -> Tensor:
        return self._experts[:count]


class RoutingRecorder:
    """The experts of one call's tokens by request number. count: Experts per layer."""

    def __init__(self, experts: Experts, count: int) -> None:
        self._experts, self._count = experts, count
        self._parts: list[tuple[list[tuple[int, int, int]], Tensor]] = []  # spans of a forward, and its rows
        self._bytes = 0  # of rows on the device

    def record(self, batch: Any, scheduled: dict[str, int]) -> None:
        """Record a launched forward. batch: The runner's. scheduled: Number of tokens per request."""
        spans = []  # (request, position of its first row, number of rows)
        for index, name in enumerate(batch.req_ids[: batch.num_reqs]):
            spans.append((int(name.split("-")[0]), int(batch.num_computed_tokens_cpu[index]), scheduled.get(name, 0)))
        rows = stored(self._experts(sum(span[2] for span in spans)), self._count).clone()
        self._parts.append((spans, rows))
        self._bytes += rows.nbytes
        if self._bytes > PENDING:
            self._to_host()

    def _to_host(self) -> None:
        self._parts = [(spans, rows.cpu()) for spans, rows in self._parts]
        self._bytes = 0

    def routing(self, sequences: Sequence[list[int]]) -> list[Tensor]:
        """Return `Rollout.routing` of each request. sequences: Prompt and response tokens per request."""
        self._to_host()
        found = [unknown(len(tokens) - 1, self._parts[0][1]) for tokens in sequences]
        known = [torch.zeros(len(tokens) - 1, dtype=torch.bool) for tokens in sequences]
        for spans, rows in self._parts:
            for (request, start, count), part in zip(spans, rows.split([span[2] for span in spans]), strict=True):
                end = min(start + count, len(known[request]))
                if start < end:
                    found[request][start:end] = part[: end - start]
                    known[request][start:end] = True
        _share(sequences, found, known)
        return found


def _share(sequences: Sequence[list[int]], found: list[Tensor], known: list[Tensor]) -> None:
    """Fill unknown rows from requests with the same tokens up to that row."""
    missing = [0 if bool(mask.all()) else int((~mask).nonzero().max()) + 1 for mask in known]
    longest, places = max(missing), {}
    if not longest:
        return
    for index, tokens in enumerate(sequences):
        for position, prefix in enumerate(_prefixes(tokens[: min(longest, len(known[index]))])):
            if known[index][position]:
                places.setdefault(prefix, (index, position))
    for index, end in enumerate(missing):
        for position, prefix in enumerate(_prefixes(sequences[index][:end])):
            if not known[index][position] and (place := places.get(prefix)) is not None:
                found[index][position] = found[place[0]][place[1]]


def _prefixes(tokens: list[int]) -> Iterator[int]:
    """Hash of the tokens up to each position."""
    prefix = 0
    for token in tokens:
        prefix = hash((prefix, token))
        yield prefix


@contextmanager
def record_forwards(model_runner: Any, recording: RoutingRecorder) -> Iterator[None]:
    """While entered, record the forwards of the model runner."""
    run = model_runner.execute_model

    @wraps(run)
    def running(scheduler_output: Any, *rest: Any, **options: Any) -> Any:
        result = run(scheduler_output, *rest, **options)
        if scheduler_output.total_num_scheduled_tokens:
            recording.record(model_runner.input_batch, scheduler_output.num_scheduled_tokens)
        return result

    with patch.object(model_runner, "execute_model", running):
        yield
