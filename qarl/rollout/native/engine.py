"""The native engine: generates in process, on the policy's own modules and tensors.

Because sampler and learner run the same code on the same tensors, and every operation gives a row the same bits in
any batch, the log-probs reported here equal the learner's recomputation bit for bit on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from qarl_kernels.attention import PAGE
from qarl_kernels.logprob import log_probs_of
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from qarl.config import RolloutConfig
from qarl.errors import UserError
from qarl.policy.attention import Span, sampler_context
from qarl.policy.policy import Policy
from qarl.publish.snapshot import Snapshot, verify
from qarl.rollout.engine import Progress, SamplingParams, ignore_progress, require_version
from qarl.rollout.native.pages import PagePool
from qarl.rollout.native.sampling import draw, uniform
from qarl.rollout.native.scheduler import Chunk, Scheduler
from qarl.rollout.native.sequence import Sequence as Response
from qarl.types import Prompt, Rollout

LOGIT_ROWS = 128  # rows of logits held at once


class NativeEngine:
    """Continuous batching over a paged KV cache. See `RolloutEngine` for the contract.

    preemptions: how often a sequence lost its pages in the last `generate`.
    """

    def __init__(self, policy: Policy, tokenizer: PreTrainedTokenizerBase, config: RolloutConfig) -> None:
        self.policy, self.tokenizer, self.config = policy, tokenizer, config
        self.version: int | None = None
        self.preemptions = 0
        self._caches: list[tuple[Tensor, Tensor]] = []

    def publish(self, snapshot: Snapshot) -> None:
        manifest = snapshot.manifest()
        self.version = None  # until proven, nothing is held
        self.policy.install_sampler(snapshot)
        verify(manifest, self._held_tensors())
        self.version = snapshot.version

    def _held_tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.policy.sampler_tensors()

    def sleep(self) -> None:
        self._caches = []

    def wake(self) -> None:
        """Nothing to do: `generate` makes the KV cache that it needs."""

    def close(self) -> None:
        self._caches = []
        self.version = None

    def generate(
        self, prompts: Sequence[Prompt], sampling: SamplingParams, version: int, progress: Progress = ignore_progress
    ) -> list[Rollout]:
        require_version(self.version, version)
        pool = self._page_pool(prompts, sampling)
        scheduler = Scheduler(pool, self.config.max_num_seqs, self.config.max_batched_tokens, self._copy_page)
        responses: list[Response] = []
        for prompt in prompts:
            samples = [Response(prompt, sample) for sample in range(sampling.n)]
            scheduler.add(samples)
            responses += samples
        tokens = finished = 0
        with self.policy.sampling():
            while scheduler.busy:
                drawn = self._step(scheduler, sampling)
                tokens += len(drawn)
                for response in drawn:
                    if response.finish_reason is not None:
                        scheduler.finish(response)
                        finished += 1
                progress(finished, tokens)
        self.preemptions = scheduler.preemptions
        return [
            Rollout(r.prompt.id, r.sample, r.response, r.logprobs, r.finish_reason, version, sampling.seed, r.text)
            for r in responses
        ]

    def _page_pool(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> PagePool:
        longest = max(len(p.token_ids) for p in prompts) + sampling.max_response_length
        if longest > self.policy.max_length:
            raise UserError(f"rollout.max_response_length: prompt and response reach {longest} tokens, the model's "
                            f"context is {self.policy.max_length}; lower it or data.max_prompt_length")  # fmt: skip
        per_sequence = -(-longest // PAGE)
        if self.config.kv_cache_tokens is None:
            count = per_sequence * min(self.config.max_num_seqs, len(prompts) * sampling.n)
        else:
            count = self.config.kv_cache_tokens // PAGE
        if count < per_sequence:
            raise UserError(f"rollout.kv_cache_tokens: {self.config.kv_cache_tokens} cannot hold one sequence of "
                            f"{longest} tokens; set at least {per_sequence * PAGE}")  # fmt: skip
        if not self._caches or self._caches[0][0].shape[0] < count:
            self._caches = []
            model = self.policy.config
            heads = model.num_key_value_heads
            head_dim = getattr(model, "head_dim", None) or model.hidden_size // model.num_attention_heads
            shape = (count, heads, PAGE, head_dim)
            make = lambda: torch.zeros(shape, dtype=self.policy.dtype, device=self.policy.device)  # noqa: E731
            self._caches = [(make(), make()) for _ in range(model.num_hidden_layers)]
        return PagePool(count)

    def _copy_page(self, source: int, target: int) -> None:
        for keys, values in self._caches:
            keys[target] = keys[source]
            values[target] = values[source]

    def _step(self, scheduler: Scheduler, sampling: SamplingParams) -> list[Response]:
        """One forward. Returns the responses that got a token."""
        chunks = scheduler.plan()
        hidden = self._forward(chunks)
        drawing: list[Response] = []
        rows: list[int] = []
        row = 0
        for chunk in chunks:
            row += chunk.stop - chunk.start
            ready = scheduler.computed(chunk)
            drawing += ready
            rows += [row - 1] * len(ready)
        for start in range(0, len(drawing), LOGIT_ROWS):
            self._draw(drawing[start : start + LOGIT_ROWS], hidden[rows[start : start + LOGIT_ROWS]], sampling)
        return drawing

    def _forward(self, chunks: list[Chunk]) -> Tensor:
        spans, ids, positions, row = [], [], [], 0
        for chunk in chunks:
            count = chunk.stop - chunk.start
            spans.append(Span(row, count, chunk.start, chunk.sequence.pages))
            ids += chunk.sequence.tokens(chunk.start, chunk.stop)
            positions += range(chunk.start, chunk.stop)
            row += count
        device = self.policy.device
        context = sampler_context(spans, device, self._caches)
        return self.policy.hidden_states(
            torch.tensor(ids, device=device), torch.tensor(positions, device=device), context
        )

    def _draw(self, responses: list[Response], hidden: Tensor, sampling: SamplingParams) -> None:
        """Give each response its next token. hidden: (R, H), the state after its last token."""
        log_probs = log_probs_of(self.policy.logits(hidden), sampling.truncation)
        points = [uniform(sampling.seed, r.prompt.id, r.sample, len(r.response)) for r in responses]
        chosen = draw(log_probs, points)
        chosen_logprobs = log_probs.gather(-1, chosen[:, None])[:, 0].tolist()
        for response, token, logprob in zip(responses, chosen.tolist(), chosen_logprobs, strict=True):
            response.response.append(token)
            response.logprobs.append(logprob)
            self._maybe_finish(response, sampling)

    def _maybe_finish(self, response: Response, sampling: SamplingParams) -> None:
        tokens = response.response
        if tokens[-1] in sampling.stop_token_ids:
            response.finish_reason = "stop"
            response.text = self._decode(tokens[:-1])
        elif sampling.stop and (text := self._text_before_stop(tokens, sampling.stop)) is not None:
            response.finish_reason, response.text = "stop", text
        elif len(tokens) == sampling.max_response_length:
            response.finish_reason = "length"
            response.text = self._decode(tokens)

    def _text_before_stop(self, tokens: list[int], stop: tuple[str, ...]) -> str | None:
        # a token is at least one byte, so a stop string that ends now lies within this many tokens (and a margin
        # for characters that several byte tokens make)
        tail = max(len(s.encode()) for s in stop) + 4
        recent = self._decode(tokens[-tail:])
        if not any(s in recent for s in stop):
            return None
        text = self._decode(tokens)
        cuts = [text.find(s) for s in stop if s in text]
        return text[: min(cuts)] if cuts else None

    def _decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
