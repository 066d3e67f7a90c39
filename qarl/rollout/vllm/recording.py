"""Records which experts the tokens of a call were routed to: read after each forward of vLLM, assembled by request.

vLLM's own record depends on its version and model runner. Here a forward leaves the experts of its rows in one buffer
with a fixed address, which CUDA graphs need, and the runner's batch tells which request each row belongs to. The prefix
cache is emptied before a call, so a cached prefix was computed by another request of the same call, with the same
experts.
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

PENDING = 32 << 20  # bytes kept on the device before they are copied to the host


class Experts(Protocol):
    """The experts of the last forward."""

    def rows(self, count: int) -> Tensor:
        """Experts of its first rows: (count, L, k) integers, ascending, on the device."""


class Buffer:
    """Experts written by the policy's forward, (rows, L, k) int16."""

    def __init__(self, rows: int, layers: int, per_token: int, device: torch.device) -> None:
        self.taken = torch.zeros(rows, layers, per_token, dtype=torch.int16, device=device)

    def leave(self, experts: Tensor) -> None:
        self.taken[: len(experts)].copy_(experts)

    def rows(self, count: int) -> Tensor:
        return self.taken[:count]


@dataclass(frozen=True)
class _Part:
    """Experts of one request's tokens from `position` on."""

    request: int
    position: int
    rows: Tensor


class Recording:
    """The experts of one call's tokens by request number. count: Experts per layer."""

    def __init__(self, experts: Experts, count: int) -> None:
        self._experts, self._count = experts, count
        self._pending: list[tuple[list[tuple[int, int, int]], Tensor]] = []
        self._bytes = 0
        self._parts: list[_Part] = []

    def note(self, batch: Any, scheduled: dict[str, int]) -> None:
        """Record a forward that was launched: the runner's batch, and the tokens of each request in it."""
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
        """`Rollout.routing` of each request. sequences: Prompt and response tokens of each."""
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
def recorded(model_runner: Any, recording: Recording) -> Iterator[None]:
    """Inside, the recording gets the forwards of the model runner's requests."""
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
