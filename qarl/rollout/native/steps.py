"""The interface of engine steps: chunks of sequences in, sampled tokens and recorded experts out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from qarl_kernels.logprob import Truncation
from torch import Tensor

from qarl.policy.pages import Span
from qarl.policy.routes import NO_ROUTES, recording, stored
from qarl.policy.sampler import Sampler
from qarl.policy.trace import Context, Tracer
from qarl.rollout.native.pages import KVCache
from qarl.rollout.native.scheduler import Chunk
from qarl.rollout.sequence import Sequence
from qarl.utils.transfer import upload

Computed = Callable[[Chunk], list[Sequence]]  # see `Scheduler.computed`
LOGIT_ROWS = 128  # rows of logits in memory at a time, except in CUDA graphs, which compute all rows at once


@dataclass
class StepOutput:
    """Tokens sampled in a step, one per sequence. Copies to the host may still be running.

    Attributes:
        sequences: Sequences that got a token.
        rows: Row of each sequence's token in `tokens` and `logprobs`.
        tokens: (R,) int64.
        logprobs: (R,) float32, in nats.
        routing: Arguments of `RoutingRecord.add`, if experts are recorded. Valid after `read`.
        copied: Event after the copies to the host; None if everything is on the host.
    """

    sequences: list[Sequence]
    rows: Iterable[int]
    tokens: Tensor
    logprobs: Tensor
    routing: list[tuple[list[Chunk], Tensor]]
    copied: torch.cuda.Event | None = None

    def read(self) -> tuple[list[int], list[float]]:
        """Wait for the copies to the host. Returns each sequence's token and its log-prob."""
        if self.copied is not None:
            self.copied.synchronize()
        tokens, logprobs = self.tokens.tolist(), self.logprobs.tolist()
        return [tokens[row] for row in self.rows], [logprobs[row] for row in self.rows]


class Runner:
    """Runs steps on one KV cache, for one policy version and one sampling distribution.

    Args:
        sampler: The policy's forward.
        cache: Keys and values.
        truncation: Temperature, top-k, top-p and min-p.
        max_num_seqs: Maximum number of sequences that decode in one step.
        record: Record the experts that rows are routed to.
    """

    asynchronous = False  # whether the next step should start before this step's tokens are read

    def __init__(
        self,
        sampler: Sampler,
        cache: KVCache,
        truncation: Truncation,
        max_num_seqs: int,
        record: bool,
    ) -> None:
        self.sampler, self.cache, self.truncation = sampler, cache, truncation
        self.max_num_seqs, self.record, self._weights = max_num_seqs, record, sampler.weights

    def serves(self, truncation: Truncation, max_num_seqs: int, longest: int, record: bool) -> bool:
        """Return whether the runner can be reused with these settings, for sequences of up to `longest` tokens."""
        same = self.sampler.weights is self._weights and truncation == self.truncation
        return same and max_num_seqs == self.max_num_seqs and record == self.record

    def step(self, chunks: list[Chunk], computed: Computed) -> StepOutput:
        """Run chunks, call `computed` for each, and sample one token for every sequence that it returns."""
        raise NotImplementedError

    def forward(self, chunks: list[Chunk]) -> tuple[Tensor, Tensor | None]:
        """Run chunks, concatenated without padding, without a CUDA graph.

        Returns:
            Hidden states (T, H), and the experts of the rows (T, L, k) as in `Rollout.routing`, None if not recorded.
        """
        spans: list[Span] = []
        ids: list[int] = []
        for chunk in chunks:
            spans.append(Span(len(ids), chunk.stop - chunk.start, chunk.start, chunk.sequence.pages))
            ids += chunk.sequence.tokens(chunk.start, chunk.stop)
        announce(self.sampler.tracer, chunks)
        token_ids = upload(torch.tensor(ids), self.sampler.layout.device)
        attention = self.sampler.paged(spans, self.cache.layers)
        routes = recording() if self.record else NO_ROUTES
        hidden = self.sampler.hidden_states(token_ids, attention, routes=routes)
        return hidden, stored(routes.recorded(), self.sampler.experts[0].count) if self.record else None

    def close(self) -> None:
        """Free the memory of CUDA graphs."""


def announce(tracer: Tracer | None, chunks: list[Chunk]) -> None:
    """Tell the tracer which tokens are in the rows of the next forward."""
    if tracer is not None:
        starts = accumulate((chunk.stop - chunk.start for chunk in chunks), initial=0)
        tracer.expect(
            Context(row, chunk.start, chunk.sequence.tokens(0, chunk.stop))
            for row, chunk in zip(starts, chunks, strict=False)
        )


def rows_to_sample(chunks: list[Chunk], computed: Computed) -> tuple[list[Sequence], list[int]]:
    """Mark chunks as computed. Returns the sequences that sample a token, and the row of each.

    Samples that fork from one prefill share a row.
    """
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
    """Collects the experts that the tokens of one generation are routed to.

    Only one sample of a prompt runs the prompt's tokens; the others share its keys and values, and its experts. Tokens
    that are recomputed after a preemption are routed to the same experts.
    """

    def __init__(self) -> None:
        self._prompts: dict[int, np.ndarray] = {}  # by identity of the prompt, which its samples share
        self._responses: dict[Sequence, list[np.ndarray]] = {}  # (L, k) per token

    def add(self, chunks: list[Chunk], chosen: Tensor) -> None:
        """Add the experts of a forward. Earlier tokens of its responses must have been added.

        Args:
            chunks: Chunks of the forward.
            chosen: (T, L, k) as in `Rollout.routing`: the experts of the chunks' rows, then of any rows of padding.
        """
        experts = chosen.numpy().copy()  # a copy, because the runner reuses the pinned memory
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
        """Return the experts of all tokens of prompt and response except the last: (T, L, k)."""
        own = self._responses.get(sequence, [])[: len(sequence.response) - 1]
        return torch.from_numpy(np.concatenate([self._prompts[id(sequence.prompt)], *(row[None] for row in own)]))
