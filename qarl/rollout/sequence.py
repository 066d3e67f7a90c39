"""One response in progress, and the random numbers that its tokens are sampled with."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from qarl_kernels.attention import PAGE

from qarl.types import FinishReason, Prompt


@dataclass(eq=False)
class Sequence:
    """A prompt and the response so far.

    A preempted response loses its pages and keeps its tokens and log-probs. Forwards are bit-reproducible, so
    recomputing its keys and values with the same weights gives the same bits.
    """

    prompt: Prompt
    sample: int
    points: np.ndarray  # (max_response_length,) float64, see `uniforms`; number p decides response token p
    response: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)  # policy version that sampled each token
    pending: int = 0  # number of sampled tokens after `response` that the host has not read
    pages: list[int] = field(default_factory=list)
    computed: int = 0  # number of tokens whose keys and values are in `pages`
    finish_reason: FinishReason | None = None
    text: str = ""

    @property
    def sampled(self) -> int:
        """Number of response tokens so far, including pending ones."""
        return len(self.response) + self.pending

    @property
    def length(self) -> int:
        """Number of tokens of prompt and response so far, including pending ones."""
        return len(self.prompt.token_ids) + self.sampled

    def tokens(self, start: int, stop: int) -> list[int]:
        """Return the token ids at positions [start, stop), none of them pending."""
        assert stop <= self.length - self.pending, "the host has not read this token"
        split = len(self.prompt.token_ids)
        if start >= split:
            return self.response[start - split : stop - split]
        return (self.prompt.token_ids + self.response)[start:stop]

    def pages_missing(self, upto: int) -> int:
        """Return the number of pages to add so that all tokens before position `upto` fit."""
        return max(0, -(-upto // PAGE) - len(self.pages))


def uniforms(seed: int, prompt_id: int, sample: int, count: int) -> np.ndarray:
    """Return the uniform random numbers in [0, 1) of response `sample` to prompt `prompt_id`: (count,) float64.

    Number p decides response token p, whatever `count` is. The numbers come from a Philox 4x64 stream whose key is the
    seed and whose initial counter is (sample, prompt_id). A counter-based generator has no state, so a token depends
    neither on other responses nor on an interruption of the run.
    """
    stream = np.random.Philox(
        key=np.array([seed, 0], dtype=np.uint64), counter=np.array([0, 0, sample, prompt_id], dtype=np.uint64)
    )
    return np.random.Generator(stream).random(count)
