"""One response being generated, and the random numbers that decide its tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from qarl_kernels.attention import PAGE

from qarl.types import FinishReason, Prompt


@dataclass(eq=False)
class Sequence:
    """A prompt and the response so far.

    A preempted response keeps its tokens and log-probs and loses its pages. Forwards are bit-reproducible, so computing
    its keys and values again with the same weights changes nothing.
    """

    prompt: Prompt
    sample: int
    points: np.ndarray  # random numbers that decide its tokens
    response: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)  # policy version that sampled each token
    pending: int = 0  # tokens after `response` that are sampled but still on the device
    pages: list[int] = field(default_factory=list)
    computed: int = 0  # tokens whose keys and values are in `pages`
    finish_reason: FinishReason | None = None
    text: str = ""

    @property
    def sampled(self) -> int:
        """Tokens of the response so far."""
        return len(self.response) + self.pending

    @property
    def length(self) -> int:
        return len(self.prompt.token_ids) + self.sampled

    def tokens(self, start: int, stop: int) -> list[int]:
        assert stop <= self.length - self.pending, "the host has not read this token"
        split = len(self.prompt.token_ids)
        if start >= split:
            return self.response[start - split : stop - split]
        return (self.prompt.token_ids + self.response)[start:stop]

    def pages_missing(self, upto: int) -> int:
        """Return how many pages tokens before position `upto` need in addition."""
        return max(0, -(-upto // PAGE) - len(self.pages))


def uniforms(seed: int, prompt_id: int, sample: int, count: int) -> np.ndarray:
    """Return the random numbers in [0, 1) of response `sample` to prompt `prompt_id`: float64 (count,).

    Number p decides token p, whatever `count` is. The Philox 4x64 stream is keyed by the seed and counted by the rest.
    It has no state, so a token does not depend on what else is sampled, or on an interruption.
    """
    stream = np.random.Philox(
        key=np.array([seed, 0], dtype=np.uint64), counter=np.array([0, 0, sample, prompt_id], dtype=np.uint64)
    )
    return np.random.Generator(stream).random(count)
