"""Asynchronous engine steps on Triton kernels: sampled tokens stay on the device and are the next step's input.

A decode reads and writes tensors at fixed addresses (`Inputs` and the last sampled tokens), so it can run as a CUDA
graph. A graph may have more rows than there are sequences; the surplus rows are padding. Prefills of the same step run
after the decode, without a graph.
"""

from __future__ import annotations

import numpy as np
import torch
from qarl_kernels.attention import PAGE
from qarl_kernels.logprob import Truncation
from torch import Tensor

from qarl.policy.fused_attention import DecodeAttention
from qarl.policy.routes import NO_ROUTES, recording, stored, stored_dtype
from qarl.policy.sampler import Sampler
from qarl.rollout.native.graphs import Graphs, Inputs, graph_pages, graph_rows
from qarl.rollout.native.pages import KVCache
from qarl.rollout.native.scheduler import Chunk
from qarl.rollout.native.steps import LOGIT_ROWS, Computed, Runner, StepOutput, announce, rows_to_sample
from qarl.rollout.sequence import Sequence
from qarl.utils.transfer import upload


class AsyncRunner(Runner):
    """See `Runner`.

    Args:
        longest: Maximum tokens of a sequence.
        graphs: Run decodes as CUDA graphs.
    """

    asynchronous = True

    def __init__(
        self,
        sampler: Sampler,
        cache: KVCache,
        truncation: Truncation,
        max_num_seqs: int,
        record: bool,
        longest: int,
        graphs: bool,
    ) -> None:
        super().__init__(sampler, cache, truncation, max_num_seqs, record)
        device = self.device = sampler.layout.device
        most, pages = graph_rows(max_num_seqs), graph_pages(longest)
        sampled, words = most + max_num_seqs, sum(Inputs.sizes(most, pages))
        self._memory = torch.zeros(words + sampled, dtype=torch.int64, device=device)
        # Inputs of a decode, then the last step's tokens: those of decodes first, then those of prefills. They share
        # one tensor, so that `Inputs.token_index` can point into both.
        self._block, self._tokens = self._memory.split([words, sampled])
        self._logprobs = torch.zeros(sampled, dtype=torch.float32, device=device)
        self._hidden: Tensor | None = None  # of a decode, kept for top-k and top-p: these are not in the graph
        self._row: dict[Sequence, int] = {}  # row of each sequence's token in `_tokens`
        self._table = np.zeros((most, pages), np.int32)  # pages of the sequences in `_order`
        self._order: list[Sequence] = []
        self._graphs = Graphs(device) if graphs else None
        self._experts = torch.empty(0, device=device)  # experts of the last decode's rows, if recorded
        if record:
            first, layers = sampler.experts[0], len(sampler.experts)
            shape, self._count = (most, layers, first.per_token), first.count
            self._experts = torch.zeros(shape, dtype=stored_dtype(first.count), device=device)
        self._routing: list[tuple[list[Chunk], Tensor]] = []  # experts of this step, being copied to the host

    def serves(self, truncation: Truncation, max_num_seqs: int, longest: int, record: bool) -> bool:
        fits = graph_pages(longest) <= self._table.shape[1]
        return fits and super().serves(truncation, max_num_seqs, longest, record)

    def step(self, chunks: list[Chunk], computed: Computed) -> StepOutput:
        # Rows [0, size) of `_tokens` are for decodes, including the padding of their graph; prefills follow.
        singles = [chunk for chunk in chunks if chunk.single]
        size = self._decode(singles) if singles else 0
        sequences, _ = rows_to_sample(singles, computed)
        rows = list(range(len(sequences)))
        if prefills := [chunk for chunk in chunks if not chunk.single]:
            sampled = self._prefill(prefills, computed, size)
            self._order = []  # a recomputed sequence has other pages than in `_table`
            sequences += sampled
            rows += range(size, size + len(sampled))
        self._row = dict(zip(sequences, rows, strict=True))
        return self._output(sequences, rows)

    def close(self) -> None:
        if self._graphs is not None:
            self._graphs.close()

    # --- decodes -----------------------------------------------------------------------------------------------

    def _decode(self, chunks: list[Chunk]) -> int:
        """Decode one token per sequence into the first rows of `_tokens`. Returns the number of rows that ran."""
        size, pages = graph_rows(len(chunks)), graph_pages(max(chunk.stop for chunk in chunks))
        inputs = Inputs.of(self._block, size, pages)
        host = torch.zeros(inputs.block.shape, dtype=torch.int64, pin_memory=self.device.type == "cuda")
        self._fill(Inputs.of(host, size, pages), chunks)
        inputs.block.copy_(host, non_blocking=True)
        announce(self.sampler.tracer, chunks)
        if self._graphs is None or self.sampler.tracer is not None:
            self._run(inputs)
        else:
            self._graphs.run((size, pages), lambda: self._run(inputs))
        if self.record:
            self._routing.append((chunks, self._to_host(self._experts[: len(chunks)])))
        if self.truncation.ranked:  # sampling is not part of the graph
            assert self._hidden is not None
            self._sample_parts(self._hidden[: len(chunks)], inputs.points[: len(chunks)], 0)
        return size

    def _fill(self, inputs: Inputs, chunks: list[Chunk]) -> None:
        """Write the inputs of a decode, on the host. Rows after those of the chunks are padding."""
        count = len(chunks)
        sequences = [chunk.sequence for chunk in chunks]
        lengths = np.fromiter((chunk.stop for chunk in chunks), np.int64, count)
        positions = lengths - 1
        # Prefills of one token, which the host knows.
        joining = [row for row, chunk in enumerate(chunks) if chunk.prefill is not None]
        self._update_table(sequences, positions, bool(joining))
        page, offset = positions // PAGE, positions % PAGE
        begin = len(self._block)
        inputs.token_index.numpy()[:count] = [begin + self._row.get(sequence, 0) for sequence in sequences]
        for row in joining:
            (inputs.host_tokens.numpy()[row],) = sequences[row].tokens(positions[row], lengths[row])
            inputs.token_index.numpy()[row] = row
        inputs.positions.numpy()[:count] = positions
        inputs.slots.numpy()[:count] = self._table[np.arange(count), page].astype(np.int64) * PAGE + offset
        inputs.slots.numpy()[count:] = -1
        inputs.points.numpy()[:count] = [sequence.points[sequence.sampled] for sequence in sequences]
        inputs.lengths.numpy()[:count] = lengths
        table = inputs.table.numpy()
        table[:count] = self._table[:count, : table.shape[1]]

    def _update_table(self, sequences: list[Sequence], positions: np.ndarray, joining: bool) -> None:
        """Write the sequences' pages to `_table`. Only add new pages if the sequences are those of the last step.

        joining: Whether a sequence was started or resumed, so that its pages in the table may be wrong.
        """
        if joining or sequences != self._order:
            self._order = sequences
            for line, sequence in zip(self._table, sequences, strict=False):
                line[: len(sequence.pages)] = sequence.pages
            return
        for row in np.flatnonzero(positions % PAGE == 0):
            self._table[row, positions[row] // PAGE] = sequences[row].pages[-1]

    def _run(self, inputs: Inputs) -> None:
        """Run a decode; this is what a CUDA graph captures. All tensors are on the device at fixed addresses."""
        size, pages = inputs.table.shape
        attention = DecodeAttention(
            inputs.positions, inputs.slots, inputs.table, inputs.lengths, pages * PAGE, self.cache.layers
        )
        routes = recording() if self.record else NO_ROUTES
        hidden = self.sampler.hidden_states(self._memory[inputs.token_index], attention, routes=routes)
        if self.record:
            self._experts[:size] = stored(routes.recorded(), self._count)
        if not self.truncation.ranked:
            self._sample(hidden, inputs.points, slice(0, size))
            return
        if self._hidden is None:
            self._hidden = torch.empty(
                graph_rows(self.max_num_seqs), hidden.shape[1], dtype=hidden.dtype, device=self.device
            )
        self._hidden[:size] = hidden

    # --- prefills ----------------------------------------------------------------------------------------------

    def _prefill(self, chunks: list[Chunk], computed: Computed, first: int) -> list[Sequence]:
        """Run chunks of prompts. Returns the sequences that got a token; their rows in `_tokens` begin at `first`."""
        hidden, experts = self.forward(chunks)
        if experts is not None:
            self._routing.append((chunks, self._to_host(experts)))
        sequences, rows = rows_to_sample(chunks, computed)
        if not sequences:
            return sequences
        points = self._upload([float(sequence.points[sequence.sampled]) for sequence in sequences], torch.float64)
        self._sample_parts(hidden[self._upload(rows)], points, first)
        return sequences

    def _upload(self, values: list[int] | list[float], dtype: torch.dtype = torch.int64) -> Tensor:
        return upload(torch.tensor(values, dtype=dtype), self.device)

    # --- tokens ------------------------------------------------------------------------------------------------

    def _sample_parts(self, hidden: Tensor, points: Tensor, first: int) -> None:
        """Sample tokens into the rows from `first` on, computing logits of LOGIT_ROWS rows at a time."""
        for start in range(0, len(hidden), LOGIT_ROWS):
            part = slice(start, min(start + LOGIT_ROWS, len(hidden)))
            self._sample(hidden[part], points[part], slice(first + part.start, first + part.stop))

    def _sample(self, hidden: Tensor, points: Tensor, into: slice) -> None:
        """Sample one token and its log-prob per hidden state (R, H). points: (R,) float64."""
        from qarl_kernels.draw import draw

        distribution = self.sampler.distribution(hidden, self.truncation)
        if self.truncation.greedy:
            tokens = distribution.logits.argmax(-1)
        else:
            tokens = draw(distribution.logits, distribution.lse, points)
        self._tokens[into] = tokens
        self._logprobs[into] = distribution.logprobs(tokens)

    def _output(self, sequences: list[Sequence], rows: list[int]) -> StepOutput:
        """Start copies of tokens, log-probs and experts to the host."""
        count = max(rows, default=-1) + 1
        tokens, logprobs = self._to_host(self._tokens[:count]), self._to_host(self._logprobs[:count])
        routing, self._routing = self._routing, []
        copied = None
        if self.device.type == "cuda":
            copied = torch.cuda.Event()
            copied.record(torch.cuda.current_stream(self.device))
        return StepOutput(sequences, rows, tokens, logprobs, routing, copied)

    def _to_host(self, values: Tensor) -> Tensor:
        """Start a copy to the host."""
        if self.device.type != "cuda":
            return values.clone()
        copy = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        return copy.copy_(values, non_blocking=True)
