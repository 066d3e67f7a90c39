"""Continuous batching: which tokens of which sequences run in the next forward, under a token and a page budget.

Every step decodes one token of each running sequence, oldest first, then fills the rest of the token budget with
chunks of waiting prompts. The samples of one prompt wait together: the first prefills, the others fork from its pages.
When pages run out, the youngest sequence is preempted: it gives its pages back and waits for them to be recomputed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from qarl_kernels.attention import PAGE

from qarl.rollout.native.pages import PagePool
from qarl.rollout.native.sequence import Sequence


@dataclass
class Prefill:
    """A sequence whose tokens are not all computed yet, and those that fork from it once they are."""

    lead: Sequence
    siblings: list[Sequence]


@dataclass(frozen=True)
class Chunk:
    """Tokens [start, stop) of a sequence that run in this step; `prefill` is set unless it is a decode."""

    sequence: Sequence
    start: int
    stop: int
    prefill: Prefill | None


class Scheduler:
    """copy_page(source, target): copies one page's keys and values in every layer."""

    def __init__(
        self, pool: PagePool, max_num_seqs: int, max_batched_tokens: int, copy_page: Callable[[int, int], None]
    ) -> None:
        self.pool, self.max_num_seqs, self.max_batched_tokens = pool, max_num_seqs, max_batched_tokens
        self.copy_page = copy_page
        self.waiting: deque[Prefill] = deque()
        self.running: list[Sequence] = []
        self.preemptions = 0

    def add(self, samples: list[Sequence]) -> None:
        """Queue the samples of one prompt."""
        self.waiting.append(Prefill(samples[0], samples[1:]))

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def plan(self) -> list[Chunk]:
        """The next step's chunks, each sequence at most once, with pages taken for them. Empty only when idle."""
        budget = self.max_batched_tokens
        chunks = []
        for sequence in list(self.running):
            if budget == 0:
                break
            if sequence in self.running and self._make_room(sequence):
                chunks.append(Chunk(sequence, sequence.length - 1, sequence.length, None))
                budget -= 1
        chunks = [c for c in chunks if c.sequence in self.running]  # a later one's need may preempt, never an earlier
        started = 0
        for prefill in list(self.waiting):
            if budget == 0 or len(self.running) + started >= self.max_num_seqs:
                break
            lead = prefill.lead
            stop = min(lead.length, lead.computed + budget)
            room = len(lead.pages) * PAGE + self.pool.free * PAGE
            stop = min(stop, room)
            if stop <= lead.computed:
                break
            self._take_pages(lead, stop)
            chunks.append(Chunk(lead, lead.computed, stop, prefill))
            budget -= stop - lead.computed
            started += 1
        assert chunks or not self.busy, "the KV pool cannot hold one sequence"
        return chunks

    def computed(self, chunk: Chunk) -> list[Sequence]:
        """Note that a chunk ran. Returns the sequences that now draw a token from its last row."""
        chunk.sequence.computed = chunk.stop
        if chunk.prefill is None:
            return [chunk.sequence]
        if chunk.stop < chunk.sequence.length:
            return []
        self.waiting.remove(chunk.prefill)
        self.running.append(chunk.sequence)
        return [chunk.sequence, *self._fork(chunk.prefill)]

    def _fork(self, prefill: Prefill) -> list[Sequence]:
        lead, forked = prefill.lead, []
        full = lead.computed // PAGE
        partial = lead.computed % PAGE > 0
        while prefill.siblings and len(self.running) < self.max_num_seqs and self.pool.free >= partial:
            sequence = prefill.siblings.pop(0)
            sequence.pages = [self.pool.share(page) for page in lead.pages[:full]]
            if partial:
                sequence.pages.append(self.pool.take())
                self.copy_page(lead.pages[full], sequence.pages[full])
            sequence.computed = lead.computed
            self.running.append(sequence)
            forked.append(sequence)
        if prefill.siblings:
            self.waiting.appendleft(Prefill(prefill.siblings[0], prefill.siblings[1:]))
        return forked

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence out; its pages are free again."""
        self.running.remove(sequence)
        self._drop_pages(sequence)

    def _make_room(self, sequence: Sequence) -> bool:
        """Pages for the sequence's next token, preempting others. False if it had to be preempted itself."""
        while self.pool.free < sequence.pages_missing(sequence.length):
            victim = self._youngest()
            if isinstance(victim, Prefill):
                self._drop_pages(victim.lead)
                continue
            self.preemptions += 1
            self.running.remove(victim)
            self._drop_pages(victim)
            self.waiting.appendleft(Prefill(victim, []))
            if victim is sequence:
                return False
        self._take_pages(sequence, sequence.length)
        return True

    def _youngest(self) -> Prefill | Sequence:
        """Who gives pages back first: a half-done prefill, else the sequence that started last."""
        for prefill in reversed(self.waiting):
            if prefill.lead.pages:
                return prefill
        return self.running[-1]

    def _take_pages(self, sequence: Sequence, upto: int) -> None:
        for _ in range(sequence.pages_missing(upto)):
            sequence.pages.append(self.pool.take())

    def _drop_pages(self, sequence: Sequence) -> None:
        self.pool.release(sequence.pages)
        sequence.pages, sequence.computed = [], 0
