"""Which experts the tokens of a call went through: read after each of vLLM's forwards, put together by request.

vLLM's own record depends on its version and its model runner. Here a forward leaves the experts of its rows in one
buffer, whose address CUDA graphs know, and the runner's batch says whose rows they are. What a call finds in the prefix
cache another request of that call computed: the cache is emptied before, and tokens with the same prefix went through
the same experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any, Protocol

import torch
from torch import Tensor

from qarl.policy.routes import stored, unknown

PENDING = 32 << 20  # bytes that wait on the device


class Experts(Protocol):
    """Where the experts of the forward that ran last are."""

    def rows(self, count: int) -> Tensor:
        """Of its first rows: (count, L, k) integers, ascending, on the device."""


class Buffer:
    """What the policy's forward leaves, (rows, L, k) int16, where numerics are exact."""

    def __init__(self, rows: int, layers: int, per_token: int, device: torch.device) -> None:
        self.taken = torch.zeros(rows, layers, per_token, dtype=torch.int16, device=device)

    def leave(self, experts: Tensor) -> None:
        self.taken[: len(experts)].copy_(experts)

    def rows(self, count: int) -> Tensor:
        return self.taken[:count]


@dataclass(frozen=True)
class _Part:
    """Rows of one request's tokens, from `position` on."""

    request: int
    position: int
    rows: Tensor


class Recording:
    """What the forwards of one call went through, by the requests' numbers. count: experts of a layer."""

    def __init__(self, experts: Experts, count: int) -> None:
        self._experts, self._count = experts, count
        self._pending: list[tuple[list[tuple[int, int, int]], Tensor]] = []
        self._bytes = 0
        self._parts: list[_Part] = []

    def note(self, batch: Any, scheduled: dict[str, int]) -> None:
        """Of a forward that has been started: the runner's batch, and how many tokens each request has in it."""
        spans = []
        for index, name in enumerate(batch.req_ids[: batch.num_reqs]):
            spans.append((int(name.split("-")[0]), int(batch.num_computed_tokens_cpu[index]), scheduled.get(name, 0)))
        rows = stored(self._experts.rows(sum(span[2] for span in spans)), self._count).clone()
        self._pending.append((spans, rows))
        self._bytes += rows.nbytes
        if self._bytes > PENDING:
            self._collect()

    def _collect(self) -> None:
        for spans, rows in self._pending:
            parts = rows.cpu().split([length for _, _, length in spans])
            self._parts += [_Part(request, at, part) for (request, at, _), part in zip(spans, parts, strict=True)]
        self._pending, self._bytes = [], 0

    def of(self, sequences: Sequence[list[int]]) -> list[Tensor]:
        """`Rollout.routing` of each request, by its number. sequences: all tokens of each, prompt and response."""
        self._collect()
        like = self._parts[0].rows
        found = [unknown(len(tokens) - 1, like) for tokens in sequences]
        known = [torch.zeros(len(tokens) - 1, dtype=torch.bool) for tokens in sequences]
        for part in self._parts:
            end = min(part.position + len(part.rows), len(known[part.request]))
            if part.position < end:
                found[part.request][part.position : end] = part.rows[: end - part.position]
                known[part.request][part.position : end] = True
        _share(sequences, found, known)
        return found


def _share(sequences: Sequence[list[int]], found: list[Tensor], known: list[Tensor]) -> None:
    """Fill rows that are unknown from requests that have the same tokens up to there."""
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
    """A hash of all tokens up to each."""
    prefix = 0
    for token in tokens:
        prefix = hash((prefix, token))
        yield prefix


@contextmanager
def recorded(model_runner: Any, recording: Recording) -> Iterator[None]:
    """Inside, forwards of the model runner's requests are told to the recording."""
    run = model_runner.execute_model

    @wraps(run)
    def running(scheduler_output: Any, *rest: Any, **options: Any) -> Any:
        result = run(scheduler_output, *rest, **options)
        if scheduler_output.total_num_scheduled_tokens:
            recording.note(model_runner.input_batch, scheduler_output.num_scheduled_tokens)
        return result

    model_runner.execute_model = running
    try:
        yield
    finally:
        del model_runner.execute_model
