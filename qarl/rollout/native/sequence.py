"""One response being generated."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from qarl_kernels.attention import PAGE

from qarl.types import FinishReason, Prompt


@dataclass(eq=False)
class Sequence:
    """A prompt and the response so far.

    points: the random numbers that decide its tokens. pending: tokens drawn on the device that the host has not read
    yet, after those of `response`. computed: tokens whose keys and values are in `pages`. When a response is preempted
    it keeps its tokens and log-probs and loses its pages; the forward is bit-reproducible, so computing them again
    changes nothing.
    """

    prompt: Prompt
    sample: int
    points: np.ndarray
    response: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    pending: int = 0
    pages: list[int] = field(default_factory=list)
    computed: int = 0
    finish_reason: FinishReason | None = None
    text: str = ""

    @property
    def drawn(self) -> int:
        """Tokens of the response so far."""
        return len(self.response) + self.pending

    @property
    def length(self) -> int:
        return len(self.prompt.token_ids) + len(self.response) + self.pending

    def tokens(self, start: int, stop: int) -> list[int]:
        assert stop <= self.length - self.pending, "a token that the host has not read"
        split = len(self.prompt.token_ids)
        if start >= split:
            return self.response[start - split : stop - split]
        return (self.prompt.token_ids + self.response)[start:stop]

    def pages_missing(self, upto: int) -> int:
        """Pages to add before tokens up to (excluding) position `upto` have room."""
        return max(0, -(-upto // PAGE) - len(self.pages))
