"""Steps on Triton kernels, which run ahead of the host: tokens stay on the device and feed the next step.

A decode step reads and writes tensors that stay where they are (`Inputs`, the tokens drawn last), so that a GPU runs it
as a CUDA graph; the rows that its size has left over are empty. Prefills run as they are, beside the decodes of the
same step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from qarl_kernels.attention import PAGE
from qarl_kernels.logprob import Truncation
from torch import Tensor

from qarl.policy.routes import stored, stored_dtype
from qarl.policy.sampler import Sampler
from qarl.rollout.native.graphs import Graphs, chunks_of_pages, ladder
from qarl.rollout.native.inputs import Inputs
from qarl.rollout.native.pages import KVCache
from qarl.rollout.native.routing import Ran, routes_of, spans_of
from qarl.rollout.native.scheduler import Chunk
from qarl.rollout.native.sequence import Sequence
from qarl.rollout.native.steps import LOGIT_ROWS, Computed, drawing, packed, tell
from qarl.transfer import upload


@dataclass
class DeviceDrawn:
    """rows: of each sequence's token in `tokens` and `logprobs`, which `there` says are on the host, as `ran` is."""

    sequences: list[Sequence]
    rows: list[int]
    tokens: Tensor
    logprobs: Tensor
    there: torch.cuda.Event | None
    ran: list[Ran]

    def read(self) -> tuple[list[int], list[float]]:
        if self.there is not None:
            self.there.synchronize()
        tokens, logprobs = self.tokens.tolist(), self.logprobs.tolist()
        return [tokens[row] for row in self.rows], [logprobs[row] for row in self.rows]


class AheadRunner:
    """See `Runner`. max_num_seqs: sequences at a time. longest: tokens of one. graphs: whether they are made. record:
    whether it takes note of the experts that rows choose."""

    ahead = True

    def __init__(
        self,
        sampler: Sampler,
        cache: KVCache,
        truncation: Truncation,
        max_num_seqs: int,
        longest: int,
        graphs: bool = True,
        record: bool = False,
    ) -> None:
        self.sampler, self.cache, self.truncation, self.max_num_seqs = sampler, cache, truncation, max_num_seqs
        self._weights = sampler.weights
        device = self.device = sampler.layout.device
        most, pages = ladder(max_num_seqs), chunks_of_pages(longest)
        drawn, words = most + max_num_seqs, Inputs.words(most, pages)
        self._memory = torch.zeros(words + drawn, dtype=torch.int64, device=device)
        # Of the last step: those of single tokens first, then what prefills drew.
        self._block, self._tokens = self._memory.split([words, drawn])
        self._logprobs = torch.zeros(drawn, dtype=torch.float32, device=device)
        self._hidden: Tensor | None = None  # where tokens are ranked, which no graph does
        self._row: dict[Sequence, int] = {}  # of each sequence's token in `_tokens`
        self._table = np.zeros((most, pages), np.int32)  # pages of the sequences in `_order`
        self._order: list[Sequence] = []
        self._graphs = Graphs(device) if graphs else None
        self.record = record
        self._experts = torch.empty(0, device=device)  # of the last decodes' rows, where they are recorded
        if record:
            first, layers = sampler.experts[0], len(sampler.experts)
            shape, self._count = (most, layers, first.per_token), first.count
            self._experts = torch.zeros(shape, dtype=stored_dtype(first.count), device=device)
        self._ran: list[Ran] = []  # in this step, on its way to the host

    def serves(self, cache: KVCache, truncation: Truncation, max_num_seqs: int, longest: int, record: bool) -> bool:
        same = self.sampler.weights is self._weights and cache is self.cache and truncation == self.truncation
        same = same and record == self.record
        return same and max_num_seqs == self.max_num_seqs and chunks_of_pages(longest) <= self._table.shape[1]

    def take_page(self, page: int) -> None:
        """Attention reads no page past a sequence's end."""

    def step(self, chunks: list[Chunk], computed: Computed) -> DeviceDrawn:
        singles = [chunk for chunk in chunks if chunk.single]
        size = self._decode(singles) if singles else 0
        sequences, _ = drawing(singles, computed)
        rows = list(range(len(sequences)))
        if prefills := [chunk for chunk in chunks if not chunk.single]:
            drew = self._prefill(prefills, computed, size)
            self._order = []  # one of them may have had other pages before
            sequences += drew
            rows += range(size, size + len(drew))
        self._row = dict(zip(sequences, rows, strict=True))
        return self._on_their_way(sequences, rows)

    def close(self) -> None:
        if self._graphs is not None:
            self._graphs.close()

    # --- decodes -----------------------------------------------------------------------------------------------

    def _decode(self, chunks: list[Chunk]) -> int:
        """Draw for each sequence, into the first rows. Returns how many rows ran."""
        size, pages = ladder(len(chunks)), chunks_of_pages(max(chunk.stop for chunk in chunks))
        there = Inputs.of(self._block, size, pages)
        host = torch.zeros(there.block.shape, dtype=torch.int64, pin_memory=self.device.type == "cuda")
        self._fill(Inputs.of(host, size, pages), chunks)
        there.block.copy_(host, non_blocking=True)
        tell(self.sampler.tracer, chunks)
        if self._graphs is None or self.sampler.tracer is not None:
            self._run(there)
        else:
            self._graphs.run((size, pages), lambda: self._run(there))
        if self.record:
            self._tell(chunks, self._experts[: len(chunks)])
        if self._ranked:
            assert self._hidden is not None
            self._draw_parts(self._hidden[: len(chunks)], there.points[: len(chunks)], 0)
        return size

    def _fill(self, inputs: Inputs, chunks: list[Chunk]) -> None:
        count = len(chunks)
        sequences = [chunk.sequence for chunk in chunks]
        lengths = np.fromiter((chunk.stop for chunk in chunks), np.int64, count)
        positions = lengths - 1
        joining = [row for row, chunk in enumerate(chunks) if chunk.prefill is not None]
        self._note_pages(sequences, positions, bool(joining))
        page, offset = positions // PAGE, positions % PAGE
        begin = len(self._block)
        inputs.token.numpy()[:count] = [begin + self._row.get(sequence, 0) for sequence in sequences]
        for row in joining:
            (inputs.given.numpy()[row],) = sequences[row].tokens(positions[row], lengths[row])
            inputs.token.numpy()[row] = row
        inputs.positions.numpy()[:count] = positions
        inputs.slots.numpy()[:count] = self._table[np.arange(count), page].astype(np.int64) * PAGE + offset
        inputs.slots.numpy()[count:] = -1
        inputs.points.numpy()[:count] = [sequence.points[sequence.drawn] for sequence in sequences]
        inputs.lengths.numpy()[:count] = lengths
        table = inputs.table.numpy()
        table[:count] = self._table[:count, : table.shape[1]]

    def _note_pages(self, sequences: list[Sequence], positions: np.ndarray, joining: bool) -> None:
        """Pages of the sequences in `_table`. Where they are those of the step before, only some got one more."""
        if joining or sequences != self._order:
            self._order = sequences
            for line, sequence in zip(self._table, sequences, strict=False):
                line[: len(sequence.pages)] = sequence.pages
            return
        for row in np.flatnonzero(positions % PAGE == 0):
            self._table[row, positions[row] // PAGE] = sequences[row].pages[-1]

    def _run(self, inputs: Inputs) -> None:
        """What a graph holds: everything in it is on the device, and stays where it is."""
        from qarl.policy.fused_attention import DecodeAttention  # imports Triton, which the CPU does not need

        size, pages = inputs.table.shape
        attention = DecodeAttention(
            inputs.positions, inputs.slots, inputs.table, inputs.lengths, pages * PAGE, self.cache.layers
        )
        routes = routes_of(self.record)
        hidden = self.sampler.hidden_states(self._memory[inputs.token], attention, routes=routes)
        if self.record:
            self._experts[:size] = stored(routes.recorded(), self._count)
        if not self._ranked:
            self._draw(hidden, inputs.points, slice(0, size))
            return
        if self._hidden is None:
            self._hidden = torch.empty(
                ladder(self.max_num_seqs), hidden.shape[1], dtype=hidden.dtype, device=self.device
            )
        self._hidden[:size] = hidden

    @property
    def _ranked(self) -> bool:
        return self.truncation.active and (self.truncation.top_k > 0 or self.truncation.top_p < 1.0)

    # --- prefills ----------------------------------------------------------------------------------------------

    def _prefill(self, chunks: list[Chunk], computed: Computed, first: int) -> list[Sequence]:
        """Run chunks of prompts. Returns the sequences that drew, into rows from `first` on."""
        spans, ids = packed(chunks)
        tell(self.sampler.tracer, chunks)
        routes, attention = routes_of(self.record), self.sampler.paged(spans, self.cache.layers)
        hidden = self.sampler.hidden_states(self._there(ids), attention, routes=routes)
        if self.record:
            self._tell(chunks, stored(routes.recorded(), self._count))
        sequences, rows = drawing(chunks, computed)
        if not sequences:
            return sequences
        points = self._there([float(sequence.points[sequence.drawn]) for sequence in sequences], torch.float64)
        self._draw_parts(hidden[self._there(rows)], points, first)
        return sequences

    def _there(self, values: list[int] | list[float], dtype: torch.dtype = torch.int64) -> Tensor:
        return upload(torch.tensor(values, dtype=dtype), self.device)

    # --- tokens ------------------------------------------------------------------------------------------------

    def _draw_parts(self, hidden: Tensor, points: Tensor, first: int) -> None:
        """Tokens into rows from `first` on, with the logits of a few rows at a time."""
        for start in range(0, len(hidden), LOGIT_ROWS):
            part = slice(start, min(start + LOGIT_ROWS, len(hidden)))
            self._draw(hidden[part], points[part], slice(first + part.start, first + part.stop))

    def _draw(self, hidden: Tensor, points: Tensor, into: slice) -> None:
        """A token from each state (R, H), and its log-prob. points: (R,) float64."""
        from qarl_kernels.draw import draw

        distribution = self.sampler.distribution(hidden, self.truncation)
        if self.truncation.greedy:
            tokens = distribution.logits.argmax(-1)
        else:
            tokens = draw(distribution.logits, distribution.lse, points)
        self._tokens[into] = tokens
        self._logprobs[into] = distribution.logprobs(tokens)

    def _on_their_way(self, sequences: list[Sequence], rows: list[int]) -> DeviceDrawn:
        """Copies of what was drawn, which the host may read later."""
        count = max(rows, default=-1) + 1
        tokens, logprobs = self._to_host(self._tokens[:count]), self._to_host(self._logprobs[:count])
        ran, self._ran = self._ran, []
        there = None
        if self.device.type == "cuda":
            there = torch.cuda.Event()
            there.record(torch.cuda.current_stream(self.device))
        return DeviceDrawn(sequences, rows, tokens, logprobs, there, ran)

    def _tell(self, chunks: list[Chunk], experts: Tensor) -> None:
        """Take note of what the rows of chunks chose, (T, L, k)."""
        self._ran.append(Ran(spans_of(chunks), self._to_host(experts)))

    def _to_host(self, values: Tensor) -> Tensor:
        """A copy on the host, once the device has come so far."""
        if self.device.type != "cuda":
            return values.clone()
        copy = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        return copy.copy_(values, non_blocking=True)
