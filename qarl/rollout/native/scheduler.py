"""Continuous batching: selects the tokens of the next forward, within a token budget and the free pages.

Every step decodes one token of each running sequence, oldest first, and fills the rest of the token budget with chunks
of prompts (chunked prefill). The samples of a prompt are queued together: the first one runs the prompt, and the others
fork from its pages. A sample that is added later, or was preempted, shares the prompt's pages with a sample that is
still running. If only its last token is left to compute, its prefill runs like a decode.

A prefill starts only if the pool has pages for all of its tokens, so every started prefill can finish. If pages run
out, the youngest sequence is preempted: it loses its pages and is recomputed later. The oldest sequence is never
preempted, and the pool can hold any single sequence, so every step makes progress.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import NamedTuple

from qarl_kernels.attention import PAGE

from qarl.rollout.native.pages import PagePool
from qarl.rollout.sequence import Sequence


@dataclass
class Prefill:
    """A sequence whose keys and values must be computed, and the samples that fork from it afterwards."""

    lead: Sequence
    siblings: list[Sequence]


class Chunk(NamedTuple):
    """Tokens [start, stop) of a sequence that run in this step."""

    sequence: Sequence
    start: int
    stop: int
    prefill: Prefill | None  # None: a decode

    @property
    def single(self) -> bool:
        """Whether the chunk is one token, from which only this sequence samples its next token."""
        if self.prefill is None:
            return True
        return self.stop - self.start == 1 and self.stop == self.sequence.length and not self.prefill.siblings


class Scheduler:
    """Plans the steps of a generation.

    Attributes:
        waiting: Sequences without pages.
        prefilling: Sequences with pages for all their tokens, not all of them computed.
        running: Sequences that decode one token per step, oldest first.
        preemptions: Number of times that a sequence lost its pages.
    """

    def __init__(
        self,
        pool: PagePool,
        max_num_seqs: int,
        max_batched_tokens: int,
        max_response_length: int,  # tokens; to estimate which sequences will need more pages
        copy_page: Callable[[int, int, int], None],  # see `KVCache.copy`
    ) -> None:
        self.pool, self.max_num_seqs, self.max_batched_tokens = pool, max_num_seqs, max_batched_tokens
        self.max_response_length, self.copy_page = max_response_length, copy_page
        self.waiting: deque[Prefill] = deque()
        self.prefilling: list[Prefill] = []
        self.running: list[Sequence] = []
        self.preemptions = 0

    def add(self, samples: list[Sequence]) -> None:
        """Queue the samples of one prompt."""
        self.waiting.append(Prefill(samples[0], samples[1:]))

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.prefilling or self.running)

    @property
    def must_preempt(self) -> bool:
        """Whether the next step would preempt a sequence."""
        return (
            self.pool.free < len(self.running) and sum(s.pages_missing(s.length) for s in self.running) > self.pool.free
        )

    def plan(self) -> list[Chunk]:
        """Plan the next step: at most one chunk per sequence, with pages for its tokens. Empty only if idle."""
        budget = self.max_batched_tokens
        chunks = []
        index = 0
        while index < len(self.running) and budget > 0:  # preempts from the end, so never one with a chunk
            sequence = self.running[index]
            length = sequence.length
            if length <= PAGE * len(sequence.pages) or self._make_room(sequence):
                chunks.append(Chunk(sequence, length - 1, length, None))
                budget -= 1
            index += 1
        index = 0
        while budget > 0 and (index < len(self.prefilling) or self._start_prefill()):
            prefill = self.prefilling[index]
            start = prefill.lead.computed
            stop = min(prefill.lead.length, start + budget)
            chunks.append(Chunk(prefill.lead, start, stop, prefill))
            budget -= stop - start
            index += 1
        assert chunks or not self.busy, "the KV pool cannot hold one sequence"
        return chunks

    def computed(self, chunk: Chunk) -> list[Sequence]:
        """Mark a chunk as computed. Returns the sequences that sample a token from its last row."""
        chunk.sequence.computed = chunk.stop
        if chunk.prefill is None:
            return [chunk.sequence]
        if chunk.stop < chunk.sequence.length:
            return []
        self.prefilling.remove(chunk.prefill)
        self.running.append(chunk.sequence)
        return [chunk.sequence, *self._fork(chunk.prefill)]

    def finish(self, sequence: Sequence) -> None:
        """Remove a sequence and free its pages."""
        self.running.remove(sequence)
        self._drop_pages(sequence)

    def cancel(self, gone: Set[Sequence]) -> None:
        """Remove sequences and free their pages. Samples that are queued together must be removed together."""
        for sequence in [sequence for sequence in self.running if sequence in gone]:
            self.finish(sequence)
        for prefill in (prefill for prefill in self.prefilling if prefill.lead in gone):
            self._drop_pages(prefill.lead)
        self.prefilling = [prefill for prefill in self.prefilling if prefill.lead not in gone]
        self.waiting = deque(prefill for prefill in self.waiting if prefill.lead not in gone)

    def preempt_all(self) -> None:
        """Free the pages of all started sequences. They are recomputed before any waiting sequence starts."""
        started = [*(Prefill(sequence, []) for sequence in self.running), *self.prefilling]
        self.running, self.prefilling = [], []
        for prefill in reversed(started):
            self._drop_pages(prefill.lead)
            self.waiting.appendleft(prefill)

    def _start_prefill(self) -> bool:
        """Start the next waiting prefill. Returns False if there is none, no free slot, or not enough free pages."""
        slots = len(self.running) + sum(1 + len(p.siblings) for p in self.prefilling)
        if not self.waiting or slots >= self.max_num_seqs:
            return False
        lead = self.waiting[0].lead
        donor = next((s for s in self.running if s.prompt is lead.prompt), None)
        # The last token always runs: the next token is sampled from its hidden state.
        known = min(len(lead.prompt.token_ids), lead.length - 1) if donor else 0
        full = known // PAGE
        if lead.pages_missing(lead.length) - full > self.pool.free - self._reserve():
            return False
        prefill = self.waiting.popleft()
        if donor:
            lead.pages = [self.pool.share(page) for page in donor.pages[:full]]
            lead.computed = known
            if prefill.siblings:  # they have the same donor
                self.waiting.appendleft(Prefill(prefill.siblings[0], prefill.siblings[1:]))
                prefill.siblings = []
        self._take_pages(lead, lead.length)
        if donor and known % PAGE:
            self.copy_page(donor.pages[full], lead.pages[full], known % PAGE)
        self.prefilling.append(prefill)
        return True

    def _reserve(self) -> int:
        """Return the number of pages to keep free: one per started sequence that will need more pages.

        Without this reserve a new sequence would soon be preempted.
        """
        started = [*self.running, *(p.lead for p in self.prefilling)]
        return sum(s.pages_missing(len(s.prompt.token_ids) + self.max_response_length) > 0 for s in started)

    def _fork(self, prefill: Prefill) -> list[Sequence]:
        """Start as many siblings on the lead's pages as fit, and requeue the others. Returns those that started."""
        lead, siblings = prefill.lead, prefill.siblings
        full, partial = divmod(lead.computed, PAGE)
        slots = self.max_num_seqs - len(self.running) - len(self.prefilling)
        count = min(len(siblings), slots, self.pool.free if partial else len(siblings))
        forked, left = siblings[:count], siblings[count:]
        for sequence in forked:
            sequence.pages = [self.pool.share(page) for page in lead.pages[:full]]
            if partial:
                sequence.pages.append(self.pool.take())
                self.copy_page(lead.pages[full], sequence.pages[full], partial)
            sequence.computed = lead.computed
        self.running += forked
        if left:
            self.waiting.appendleft(Prefill(left[0], left[1:]))
        return forked

    def _make_room(self, sequence: Sequence) -> bool:
        """Take pages for the sequence's next token, preempting others. Returns False if it was preempted itself."""
        while self.pool.free < sequence.pages_missing(sequence.length):
            self.preemptions += 1
            victim = self.prefilling.pop() if self.prefilling else Prefill(self.running.pop(), [])
            self._drop_pages(victim.lead)
            self.waiting.appendleft(victim)
            if victim.lead is sequence:
                return False
        self._take_pages(sequence, sequence.length)
        return True

    def _take_pages(self, sequence: Sequence, upto: int) -> None:
        for _ in range(sequence.pages_missing(upto)):
            sequence.pages.append(self.pool.take())

    def _drop_pages(self, sequence: Sequence) -> None:
        self.pool.release(sequence.pages)
        sequence.pages, sequence.computed = [], 0
