"""Which experts the tokens of a generation went through, gathered from its steps."""

from __future__ import annotations

import torch
from torch import Tensor

from qarl.policy.routing import stored
from qarl.rollout.native.sequence import Sequence


class Log:
    """Rows of positions from 0 on, which may come again: a forward gives a token the same ones whenever it runs."""

    def __init__(self) -> None:
        self._rows: Tensor | None = None
        self._known = 0

    def write(self, start: int, rows: Tensor) -> None:
        """rows: (n, L, k), of the positions from `start` on."""
        stop = start + len(rows)
        assert start <= self._known, "a position was left out"
        if self._rows is None or stop > len(self._rows):
            wider = rows.new_empty(max(64, 2 * stop), *rows.shape[1:])
            if self._rows is not None:
                wider[: self._known] = self._rows[: self._known]
            self._rows = wider
        self._rows[start:stop] = rows
        self._known = max(self._known, stop)

    def read(self, count: int) -> Tensor:
        """The first `count` rows."""
        assert self._rows is not None and count <= self._known, f"{self._known} of {count} positions were told"
        return self._rows[:count]


class Routings:
    """Of all sequences of a `generate`. experts: of a layer.

    A token's experts depend on the tokens up to it alone. So the samples of a prompt share those of its tokens,
    whichever of them computes a part of it, and whatever is computed again after a preemption is the same.
    """

    def __init__(self, experts: int) -> None:
        self.experts = experts
        self._prompts: dict[int, Log] = {}  # by identity, which sequences keep alive
        self._responses: dict[Sequence, Log] = {}

    def take(self, sequence: Sequence, start: int, rows: Tensor) -> None:
        """A sequence's tokens from position `start` on went through these experts: (n, L, k) integers, ascending, on
        the CPU."""
        rows, length = stored(rows, self.experts), len(sequence.prompt.token_ids)
        of_prompt = max(0, length - start)
        if of_prompt:
            self._prompts.setdefault(id(sequence.prompt), Log()).write(start, rows[:of_prompt])
        if len(rows) > of_prompt:
            self._responses.setdefault(sequence, Log()).write(max(0, start - length), rows[of_prompt:])

    def of(self, sequence: Sequence) -> Tensor:
        """`Rollout.routing` of a sequence that has ended: (prompt + response - 1, L, k)."""
        found = self._prompts[id(sequence.prompt)].read(len(sequence.prompt.token_ids))
        if (more := len(sequence.response) - 1) == 0:
            return found.clone()
        return torch.cat((found, self._responses[sequence].read(more)))
