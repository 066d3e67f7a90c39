"""What a step of the engine is, however it runs: chunks in, tokens out."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Protocol

from qarl_kernels.logprob import Truncation

from qarl.policy.attention import Span
from qarl.policy.trace import Context, Tracer
from qarl.rollout.native.pages import KVCache
from qarl.rollout.native.routing import Ran
from qarl.rollout.native.scheduler import Chunk
from qarl.rollout.native.sequence import Sequence

Computed = Callable[[Chunk], list[Sequence]]  # see `Scheduler.computed`
LOGIT_ROWS = 128  # rows of logits held at once, where a graph does not hold those of all sequences


class Drawn(Protocol):
    """Tokens that a step drew, one for each of `sequences`. ran: the experts of its rows, where they are recorded; on
    the host after `read`."""

    sequences: list[Sequence]
    ran: list[Ran]

    def read(self) -> tuple[list[int], list[float]]:
        """The tokens and their log-probs; waits for the device."""
        ...


class Runner(Protocol):
    """Runs steps over one KV cache, of one version and one way to draw.

    ahead: whether the next step should be started before a step's tokens are read. max_num_seqs: sequences that it
    decodes at a time.
    """

    ahead: bool
    max_num_seqs: int

    def serves(self, cache: KVCache, truncation: Truncation, max_num_seqs: int, longest: int, record: bool) -> bool:
        """Whether it is what a new one would be. longest: tokens of a sequence. record: which experts rows choose."""
        ...

    def take_page(self, page: int) -> None:
        """Called for a page of the cache before a sequence gets it."""
        ...

    def step(self, chunks: list[Chunk], computed: Computed) -> Drawn:
        """Run chunks, tell `computed` of each, and draw for the sequences that it names."""
        ...

    def close(self) -> None:
        """Give memory back."""
        ...


def packed(chunks: list[Chunk]) -> tuple[list[Span], list[int]]:
    """Chunks one after the other: where their tokens are, and the tokens."""
    spans, ids = [], []
    for chunk in chunks:
        spans.append(Span(len(ids), chunk.stop - chunk.start, chunk.start, chunk.sequence.pages))
        ids += chunk.sequence.tokens(chunk.start, chunk.stop)
    return spans, ids


def tell(tracer: Tracer | None, chunks: list[Chunk]) -> None:
    """Say what the rows of `packed` chunks are, which run next."""
    if tracer is not None:
        starts = accumulate((chunk.stop - chunk.start for chunk in chunks), initial=0)
        tracer.expect(
            Context(row, chunk.start, chunk.sequence.tokens(0, chunk.stop))
            for row, chunk in zip(starts, chunks, strict=False)
        )


def drawing(chunks: list[Chunk], computed: Computed) -> tuple[list[Sequence], list[int]]:
    """Note that chunks ran. Returns the sequences that now draw, and the row of `packed` of each; forks share one."""
    sequences: list[Sequence] = []
    rows: list[int] = []
    row = 0
    for chunk in chunks:
        row += chunk.stop - chunk.start
        ready = computed(chunk)
        sequences += ready
        rows += [row - 1] * len(ready)
    return sequences, rows
