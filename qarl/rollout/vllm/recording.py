"""Records the experts that the tokens of a call are routed to, for router replay.

vLLM's own recording depends on its version and model runner. Here each forward writes the experts of its rows to a
buffer at a fixed address, as CUDA graphs require. After the forward they are copied, with the request and position of
each row from the model runner's batch. The prefix cache is cleared before a call, so a cached prefix was computed by
another request of the same call, with the same experts.
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

PENDING = 32 << 20  # bytes of recorded rows on the device above which they are copied to the host

Experts = Callable[[int], Tensor]
"""Returns the experts of the last forward's first `rows` rows: (rows, L, k) integers, ascending, on the device."""


class RoutingBuffer:
    """Buffer for the experts of the last forward's rows, one row each. Calling it writes the first rows.

    shape: (R, k) for one layer, or (R, L, k). The dtype is int16.
    """

    def __init__(self, *shape: int, device: torch.device | None = None) -> None:
        self._experts = torch.zeros(shape, dtype=torch.int16, device=device)

    def __call__(self, experts: Tensor) -> None:
        self._experts[: len(experts)].copy_(experts)

    def rows(self, count: int) -> Tensor:
        """Return the first `count` rows, as a view."""
        return self._experts[:count]


class RoutingRecorder:
    """Collects the experts of one call's tokens.

    Args:
        experts: Reads the experts of the last forward.
        count: Number of experts per layer.
    """

    def __init__(self, experts: Experts, count: int) -> None:
        self._experts, self._count = experts, count
        self._parts: list[tuple[list[tuple[int, int, int]], Tensor]] = []  # (spans, rows) of each forward
        self._bytes = 0  # of recorded rows on the device

    def record(self, batch: Any, scheduled: dict[str, int]) -> None:
        """Record a forward after its launch. batch: The model runner's. scheduled: Tokens by request."""
        spans = []  # (request, position of its first row, number of rows); vLLM appends "-SUFFIX" to request names
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
        """Return `Rollout.routing` of each request. sequences: token ids of prompt and response per request."""
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
    """Fill rows of cached prefixes with the rows of requests that have the same tokens up to there."""
    missing = [0 if bool(mask.all()) else int((~mask).nonzero().max()) + 1 for mask in known]
    longest = max(missing)
    places: dict[int, tuple[int, int]] = {}
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
    """Yield a hash of the tokens up to and including each position."""
    prefix = 0
    for token in tokens:
        prefix = hash((prefix, token))
        yield prefix


@contextmanager
def record_forwards(model_runner: Any, recording: RoutingRecorder) -> Iterator[None]:
    """Context manager: record every forward of vLLM's model runner."""
    run = model_runner.execute_model

    @wraps(run)
    def running(scheduler_output: Any, *rest: Any, **options: Any) -> Any:
        result = run(scheduler_output, *rest, **options)
        if scheduler_output.total_num_scheduled_tokens:
            recording.record(model_runner.input_batch, scheduler_output.num_scheduled_tokens)
        return result

    with patch.object(model_runner, "execute_model", running):
        yield
