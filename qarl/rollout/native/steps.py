"""Interface of engine steps, from chunks to sampled tokens and recorded experts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from qarl_kernels.logprob import Truncation
from torch import Tensor

from qarl.policy.attention import Span
from qarl.policy.routes import NO_ROUTES, recording, stored
from qarl.policy.sampler import Sampler
from qarl.policy.trace import Context, Tracer
from qarl.rollout.native.pages import KVCache
from qarl.rollout.native.scheduler import Chunk
from qarl.rollout.native.sequence import Sequence
from qarl.utils.transfer import upload

Computed = Callable[[Chunk], list[Sequence]]  # see `Scheduler.computed`
LOGIT_ROWS = 128  # rows of logits in memory at a time, unless a graph holds those of all sequences


@dataclass
class StepOutput:
    """Tokens sampled in a step, one per sequence; they may still be on their way to the host."""

    sequences: list[Sequence]
    rows: Iterable[int]  # of each sequence's token in `tokens` and `logprobs`
    tokens: Tensor
    logprobs: Tensor
    routing: list[tuple[list[Chunk], Tensor]]  # `RoutingRecord.add`, if experts are recorded; on the host after `read`
    copied: torch.cuda.Event | None = None  # everything is on the host; None: it already is

    def read(self) -> tuple[list[int], list[float]]:
        """Return the tokens and their log-probs; waits for the copy to the host."""
        if self.copied is not None:
            self.copied.synchronize()
        tokens, logprobs = self.tokens.tolist(), self.logprobs.tolist()
        return [tokens[row] for row in self.rows], [logprobs[row] for row in self.rows]


class Runner:
    """Runs steps over one KV cache, for one policy version and one truncation."""

    asynchronous = False  # the next step should start before this step's tokens are read

    def __init__(
        self,
        sampler: Sampler,
        cache: KVCache,
        truncation: Truncation,
        max_num_seqs: int,  # sequences decoded at a time
        record: bool,  # record the experts that rows choose
    ) -> None:
        self.sampler, self.cache, self.truncation = sampler, cache, truncation
        self.max_num_seqs, self.record, self._weights = max_num_seqs, record, sampler.weights

    def serves(self, truncation: Truncation, max_num_seqs: int, longest: int, record: bool) -> bool:
        """Return whether the runner can be reused for sequences of `longest` tokens."""
        same = self.sampler.weights is self._weights and truncation == self.truncation
        return same and max_num_seqs == self.max_num_seqs and record == self.record

    def step(self, chunks: list[Chunk], computed: Computed) -> StepOutput:
        """Run chunks, call `computed` for each, and sample a token for the sequences that it returns."""
        raise NotImplementedError

    def forward(self, chunks: list[Chunk]) -> tuple[Tensor, Tensor | None]:
        """Run chunks, packed end to end, without a CUDA graph.

        Returns:
            Hidden states (T, H), and the experts of the rows as in `Rollout.routing` if they are recorded.
        """
        spans, ids = [], []
        for chunk in chunks:
            spans.append(Span(len(ids), chunk.stop - chunk.start, chunk.start, chunk.sequence.pages))
            ids += chunk.sequence.tokens(chunk.start, chunk.stop)
        announce(self.sampler.tracer, chunks)
        there = upload(torch.tensor(ids), self.sampler.layout.device)
        attention = self.sampler.paged(spans, self.cache.layers)
        routes = recording() if self.record else NO_ROUTES
        hidden = self.sampler.hidden_states(there, attention, routes=routes)
        return hidden, stored(routes.recorded(), self.sampler.experts[0].count) if self.record else None

    def close(self) -> None:
        """Free memory."""


def announce(tracer: Tracer | None, chunks: list[Chunk]) -> None:
    """Tell the tracer which tokens the rows of the next forward have."""
    if tracer is not None:
        starts = accumulate((chunk.stop - chunk.start for chunk in chunks), initial=0)
        tracer.expect(
            Context(row, chunk.start, chunk.sequence.tokens(0, chunk.stop))
            for row, chunk in zip(starts, chunks, strict=False)
        )


def rows_to_sample(chunks: list[Chunk], computed: Computed) -> tuple[list[Sequence], list[int]]:
    """Mark chunks as run. Returns the sequences that sample now, and the packed row of each; forks share a row."""
    sequences: list[Sequence] = []
    rows: list[int] = []
    row = 0
    for chunk in chunks:
        row += chunk.stop - chunk.start
        ready = computed(chunk)
        sequences += ready
        rows += [row - 1] * len(ready)
    return sequences, rows


class RoutingRecord:
    """The experts that the tokens of one `generate` went through, collected from its steps.

    One sample of a prompt runs the prompt's tokens, and the others take its keys and values, so its choices hold for
    all of them. Tokens that run again after a preemption choose the same experts.
    """

    def __init__(self) -> None:
        self._prompts: dict[int, np.ndarray] = {}  # by identity of the prompt, which its samples share
        self._responses: dict[Sequence, list[np.ndarray]] = {}  # (L, k) per token

    def add(self, chunks: list[Chunk], chosen: Tensor) -> None:
        """Add the choices of a forward. Earlier tokens of its responses have been added before.

        chosen: (T, L, k), experts of the chunks' rows and perhaps of more rows after them, as in `Rollout.routing`.
        """
        experts = chosen.numpy().copy()  # pinned memory that the runner reuses
        row = 0
        for sequence, start, stop, _ in chunks:
            prompt = sequence.prompt.token_ids
            own = row + max(0, min(stop, len(prompt)) - start)  # first row of the response
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
        """Return the experts of all tokens of prompt and response but the last: (T, L, k)."""
        own = self._responses.get(sequence, [])[: len(sequence.response) - 1]
        return torch.from_numpy(np.concatenate([self._prompts[id(sequence.prompt)], *(row[None] for row in own)]))
