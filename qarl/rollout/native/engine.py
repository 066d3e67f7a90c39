"""The native engine: generates in process, on the policy's own modules and tensors.

Because sampler and learner run the same code on the same tensors, and every operation gives a row the same bits in
any batch, the log-probs reported here equal the learner's recomputation bit for bit on the CPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from qarl_kernels.attention import PAGE
from qarl_kernels.logprob import log_probs_of
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from qarl.config import RolloutConfig
from qarl.errors import UserError
from qarl.machine import gpu_bytes
from qarl.memory import kv_cache_bytes
from qarl.policy.attention import Span
from qarl.policy.sampler import Sampler
from qarl.policy.trace import Context
from qarl.rollout.engine import Progress, SamplingParams, ignore_progress, longest_of, require_finite, require_version
from qarl.rollout.native.pages import KVCache, PagePool
from qarl.rollout.native.sampling import draw, uniforms
from qarl.rollout.native.scheduler import Chunk, Scheduler
from qarl.rollout.native.sequence import Sequence as Response
from qarl.rollout.stopping import Stopping
from qarl.sizes import sampler_sizes
from qarl.types import Prompt, Rollout
from qarl.weight_sync.snapshot import Snapshot
from qarl.weight_sync.verify import PublishError, verify_in_process

LOGIT_ROWS = 128  # rows of logits held at once


class NativeEngine:
    """Continuous batching over a paged KV cache. See `RolloutEngine` for the contract.

    sampler: the policy's forward, which runs on the version that is published. preemptions: how often a sequence lost
    its pages in the last `generate`.
    """

    def __init__(self, sampler: Sampler, tokenizer: PreTrainedTokenizerBase, config: RolloutConfig) -> None:
        self.sampler, self.tokenizer, self.config = sampler, tokenizer, config
        self.version: int | None = None
        self.preemptions = 0
        self.metrics: dict[str, float] = {}
        self._cache: KVCache | None = None

    def publish(self, snapshot: Snapshot) -> None:
        self.version = None  # until proven, nothing is held
        self.sampler.install(snapshot)
        verify_in_process(snapshot.version, snapshot.tensors, self.sampler.held())
        self.version = snapshot.version

    def sleep(self) -> None:
        self._cache = None

    def wake(self) -> None:
        """Nothing to do: `generate` makes the KV cache that it needs."""

    def close(self) -> None:
        self._cache = None
        self.version = None

    def generate(
        self, prompts: Sequence[Prompt], sampling: SamplingParams, version: int, progress: Progress = ignore_progress
    ) -> list[Rollout]:
        require_version(self.version, version)
        if not self.sampler.current:  # a run draws from what was learned last
            raise PublishError(
                f"rollout: the policy was requantized (version {self.sampler.newest}) after the sampler "
                f"got version {version}; publish it first"
            )
        if not prompts:
            return []
        longest = longest_of(prompts, sampling, self.sampler.layout.max_length)
        sizes = self._sizes(longest)
        cache, pool = self._kv_cache(longest, min(sizes.max_num_seqs, len(prompts) * sampling.n))
        scheduler = Scheduler(
            pool, sizes.max_num_seqs, sizes.max_batched_tokens, sampling.max_response_length, cache.copy
        )
        stopping = Stopping(self.tokenizer, sampling)
        responses: list[Response] = []
        occurrences: Counter[int] = Counter()
        for prompt in prompts:
            # A prompt that is there twice gets other random numbers the second time.
            first = occurrences[prompt.id] * sampling.n
            occurrences[prompt.id] += 1
            samples = [
                Response(prompt, i, uniforms(sampling.seed, prompt.id, i, sampling.max_response_length))
                for i in range(first, first + sampling.n)
            ]
            scheduler.add(samples)
            responses += samples
        tokens = finished = 0
        with self.sampler.running():
            while scheduler.busy:
                drawn = self._step(scheduler, cache, sampling)
                tokens += len(drawn)
                for response in drawn:
                    stopping.check(response)
                    if response.finish_reason is not None:
                        scheduler.finish(response)
                        finished += 1
                progress(finished, tokens)
        self.preemptions = scheduler.preemptions
        return [
            Rollout(r.prompt.id, r.sample, r.response, r.logprobs, r.finish_reason, version, sampling.seed, r.text)
            for r in responses
        ]

    def _sizes(self, longest: int) -> RolloutConfig:
        """How much is done at once, also where that is left to the device. longest: tokens of a sequence."""
        layout = self.sampler.layout
        if layout.device.type == "cpu":
            return sampler_sizes(self.config, "cpu")
        sequence = kv_cache_bytes(longest, layout.layers, layout.kv_heads, layout.head_dim, layout.dtype.itemsize)
        return sampler_sizes(self.config, "cuda", sequence, gpu_bytes())

    def _kv_cache(self, longest: int, sequences: int) -> tuple[KVCache, PagePool]:
        """longest: tokens of one sequence. sequences: at the same time."""
        per_sequence = -(-longest // PAGE)
        pool = self.config.kv_cache_tokens
        count = per_sequence * sequences if pool is None else pool // PAGE
        if count < per_sequence:
            raise UserError(
                f"rollout.kv_cache_tokens: {self.config.kv_cache_tokens} cannot hold one sequence of "
                f"{longest} tokens; set at least {per_sequence * PAGE}"
            )
        if self._cache is None or self._cache.count != count:
            self._cache = None  # the old one goes before the new one comes
            layout = self.sampler.layout
            self._cache = KVCache(count, layout.layers, layout.kv_heads, layout.head_dim, layout.dtype, layout.device)
        return self._cache, PagePool(count, self._cache.clear)

    def _step(self, scheduler: Scheduler, cache: KVCache, sampling: SamplingParams) -> list[Response]:
        """One forward. Returns the responses that got a token."""
        chunks = scheduler.plan()
        hidden = self._forward(chunks, cache)
        drawing: list[Response] = []
        rows: list[int] = []
        row = 0
        for chunk in chunks:
            row += chunk.stop - chunk.start
            ready = scheduler.computed(chunk)
            drawing += ready
            rows += [row - 1] * len(ready)
        for start in range(0, len(drawing), LOGIT_ROWS):
            part = slice(start, start + LOGIT_ROWS)
            self._draw(drawing[part], rows[part], hidden, sampling)
        return drawing

    def _forward(self, chunks: list[Chunk], cache: KVCache) -> Tensor:
        spans, ids, row = [], [], 0
        for chunk in chunks:
            count = chunk.stop - chunk.start
            spans.append(Span(row, count, chunk.start, chunk.sequence.pages))
            ids += chunk.sequence.tokens(chunk.start, chunk.stop)
            row += count
        if self.sampler.tracer is not None:
            self.sampler.tracer.expect(
                Context(s.row, c.start, c.sequence.tokens(0, c.stop)) for s, c in zip(spans, chunks, strict=True)
            )
        attention = self.sampler.paged(spans, cache.layers)
        return self.sampler.hidden_states(torch.tensor(ids, device=self.sampler.layout.device), attention)

    def _draw(self, responses: list[Response], rows: list[int], hidden: Tensor, sampling: SamplingParams) -> None:
        """Give each response its next token, from the state in its row of `hidden` (T, H). Forks share a row."""
        distinct = list(dict.fromkeys(rows))
        log_probs = log_probs_of(self.sampler.logits(hidden[distinct]), sampling.truncation)
        if len(distinct) < len(rows):
            place = {row: i for i, row in enumerate(distinct)}
            log_probs = log_probs[[place[row] for row in rows]]
        if sampling.truncation.greedy:
            chosen = log_probs.argmax(-1)
        else:
            chosen = draw(log_probs, [float(r.points[len(r.response)]) for r in responses])
        if self.sampler.view.fused:  # the learner sums over tiles of the vocabulary, not over whole rows
            logprobs = self.sampler.logprobs(hidden[rows], chosen, sampling.truncation).tolist()
        else:
            logprobs = log_probs.gather(-1, chosen[:, None])[:, 0].tolist()
        for response, token, logprob in zip(responses, chosen.tolist(), logprobs, strict=True):
            require_finite([logprob], response.prompt, self.version)
            response.response.append(token)
            response.logprobs.append(logprob)
