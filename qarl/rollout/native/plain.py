"""Steps in plain torch, whose tokens are there when they return: what a CPU runs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from qarl_kernels.logprob import Truncation, log_probs_of
from torch import Tensor

from qarl.policy.sampler import Sampler
from qarl.rollout.native.pages import KVCache
from qarl.rollout.native.routing import Ran, ran, routes_of
from qarl.rollout.native.sampling import draw
from qarl.rollout.native.scheduler import Chunk
from qarl.rollout.native.sequence import Sequence
from qarl.rollout.native.steps import LOGIT_ROWS, Computed, drawing, packed, tell


@dataclass
class PlainDrawn:
    sequences: list[Sequence]
    tokens: list[int]
    logprobs: list[float]
    ran: list[Ran]

    def read(self) -> tuple[list[int], list[float]]:
        return self.tokens, self.logprobs


class PlainRunner:
    """See `Runner`."""

    ahead = False

    def __init__(
        self, sampler: Sampler, cache: KVCache, truncation: Truncation, max_num_seqs: int, record: bool = False
    ) -> None:
        self.sampler, self.cache, self.truncation, self.max_num_seqs = sampler, cache, truncation, max_num_seqs
        self.record = record

    def serves(self, cache: KVCache, truncation: Truncation, max_num_seqs: int, longest: int, record: bool) -> bool:
        same = cache is self.cache and truncation == self.truncation and record == self.record
        return same and max_num_seqs == self.max_num_seqs

    def take_page(self, page: int) -> None:
        """Attention multiplies what lies behind a sequence's end by zero, which must not be NaN."""
        self.cache.clear(page)

    def step(self, chunks: list[Chunk], computed: Computed) -> PlainDrawn:
        spans, ids = packed(chunks)
        tell(self.sampler.tracer, chunks)
        attention = self.sampler.paged(spans, self.cache.layers)
        routes = routes_of(self.record)
        there = torch.tensor(ids, device=self.sampler.layout.device)
        hidden = self.sampler.hidden_states(there, attention, routes=routes)
        chose = [ran(chunks, routes, self.sampler.experts[0].count)] if self.record else []
        sequences, rows = drawing(chunks, computed)
        drawn = PlainDrawn(sequences, [], [], chose)
        for start in range(0, len(sequences), LOGIT_ROWS):
            part = slice(start, start + LOGIT_ROWS)
            points = [float(s.points[s.drawn]) for s in sequences[part]]
            tokens, logprobs = self._draw(hidden, rows[part], points)
            drawn.tokens += tokens
            drawn.logprobs += logprobs
        return drawn

    def close(self) -> None:
        """Nothing is held."""

    def _draw(self, hidden: Tensor, rows: list[int], points: list[float]) -> tuple[list[int], list[float]]:
        """A token for each point, from the states in its row of `hidden` (T, H), and its log-prob."""
        distinct = list(dict.fromkeys(rows))
        log_probs = log_probs_of(self.sampler.logits(hidden[distinct]), self.truncation)
        if len(distinct) < len(rows):
            place = {row: i for i, row in enumerate(distinct)}
            log_probs = log_probs[[place[row] for row in rows]]
        chosen = log_probs.argmax(-1) if self.truncation.greedy else draw(log_probs, points)
        return chosen.tolist(), log_probs.gather(-1, chosen[:, None])[:, 0].tolist()
