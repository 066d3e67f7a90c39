"""The experts that the tokens of a generation went through, put together from the steps that ran them.

A prompt's tokens are run by one of its samples, and the others take its keys and values: its experts are all theirs.
What runs a second time, after a preemption, chooses as it did before.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from qarl.policy.routes import NO_ROUTES, Routes, recording, stored
from qarl.rollout.native.scheduler import Chunk
from qarl.rollout.native.sequence import Sequence


@dataclass(frozen=True)
class Ran:
    """Rows of one forward. spans: the tokens [start, stop) of sequences, one after the other. experts: of the rows,
    and perhaps of more behind them, (T, L, k), as `Rollout.routing` has them; on the host once the step is read."""

    spans: list[tuple[Sequence, int, int]]
    experts: Tensor


def routes_of(record: bool) -> Routes:
    """For a forward, which takes note of its choices if `record`."""
    return recording() if record else NO_ROUTES


def ran(chunks: Iterable[Chunk], routes: Routes, experts: int) -> Ran:
    """What a forward over chunks chose, brought to the host. experts: of a layer."""
    return Ran(spans_of(chunks), stored(routes.recorded(), experts).cpu())


def spans_of(chunks: Iterable[Chunk]) -> list[tuple[Sequence, int, int]]:
    return [(chunk.sequence, chunk.start, chunk.stop) for chunk in chunks]


class RoutingRecord:
    """Of the sequences of one `generate`."""

    def __init__(self) -> None:
        self._prompts: dict[int, np.ndarray] = {}  # by the identity of the prompt, which its samples share
        self._responses: dict[Sequence, list[np.ndarray]] = {}  # of each token, (L, k)

    def take(self, found: Ran) -> None:
        """Keep what a step chose. The tokens of a response before those of a span have been taken."""
        experts = found.experts.numpy().copy()  # it may lie in pinned memory, which is to be used again
        row = 0
        for sequence, start, stop in found.spans:
            prompt = sequence.prompt.token_ids
            own = row + max(0, min(stop, len(prompt)) - start)  # the first row that is no prompt's
            if own > row:
                shape = len(prompt), *experts.shape[1:]
                held = self._prompts.setdefault(id(sequence.prompt), np.zeros(shape, experts.dtype))
                held[start : start + own - row] = experts[row:own]
            end = row + stop - start
            if end > own:
                first = start + own - row - len(prompt)
                self._responses.setdefault(sequence, [])[first : first + end - own] = experts[own:end]
            row = end

    def of(self, sequence: Sequence) -> Tensor:
        """Of all tokens of the prompt and the response but the last, which predicts nothing: (T, L, k)."""
        own = self._responses.get(sequence, [])[: len(sequence.response) - 1]
        return torch.from_numpy(np.concatenate([self._prompts[id(sequence.prompt)], *(row[None] for row in own)]))
