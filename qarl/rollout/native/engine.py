"""The native engine: generates in the learner's process with the policy's own modules and tensors.

Sampler and learner run the same code on the same tensors, and every operation is batch-invariant, so the log-probs
reported here equal the learner's recomputation bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from math import isfinite

import torch
from qarl_kernels.attention import PAGE
from qarl_kernels.logprob import Truncation
from transformers import PreTrainedTokenizerBase

from qarl.config import RolloutConfig
from qarl.errors import UserError
from qarl.memory.sizes import sampler_sizes
from qarl.memory.tensors import kv_cache_bytes
from qarl.policy.sampler import Sampler
from qarl.rollout.engine import (
    Progress,
    RolloutEngine,
    Samples,
    SamplingParams,
    longest_of,
    require_finite,
)
from qarl.rollout.native.async_runner import AsyncRunner
from qarl.rollout.native.pages import KVCache, PagePool
from qarl.rollout.native.plain import PlainRunner
from qarl.rollout.native.scheduler import Scheduler
from qarl.rollout.native.steps import RoutingRecord, Runner, StepOutput
from qarl.rollout.sequence import Sequence as Response
from qarl.rollout.sequence import uniforms
from qarl.rollout.stopping import Stopping
from qarl.types import Prompt, Rollout, mixed_versions
from qarl.utils.machine import gpu_bytes
from qarl.weight_sync.fingerprints import PublishError, verify_in_process
from qarl.weight_sync.snapshot import Snapshot


class Generation:
    """Responses in progress on one KV cache. Responses may be added while others are being generated.

    With an asynchronous runner, a step's tokens are read after the next step has started, and tokens sampled after the
    end of a response are dropped. Before a preemption all steps are read, because a response may have ended and a
    preempted response is recomputed from its tokens on the host.

    Args:
        sampler: The policy's forward.
        scheduler: Plans the steps.
        runner: Runs the steps.
        stopping: Stop conditions of all responses.
        version: Policy version of the sampler's weights.
        record: Collects the experts that tokens are routed to. None: they are not recorded.

    Attributes:
        version: Policy version that is stored with tokens that are read.
        finished: Number of responses that have ended.
        tokens: Number of tokens of all responses so far.
    """

    def __init__(
        self,
        sampler: Sampler,
        scheduler: Scheduler,
        runner: Runner,
        stopping: Stopping,
        version: int,
        record: RoutingRecord | None,
    ) -> None:
        self._sampler, self._scheduler, self._runner, self._stopping = sampler, scheduler, runner, stopping
        self._record = record
        self._unread: StepOutput | None = None
        self.version = version
        self.finished = self.tokens = 0

    @property
    def busy(self) -> bool:
        """Whether a response is in progress."""
        return self._scheduler.busy or self._unread is not None

    @property
    def preemptions(self) -> int:
        """Number of times that a sequence lost its pages."""
        return self._scheduler.preemptions

    def add(self, prompt: Prompt, samples: Iterable[int], seed: int) -> list[Response]:
        """Queue the responses with these sample numbers to one prompt."""
        limit = self._stopping.sampling.max_response_length
        responses = [Response(prompt, i, uniforms(seed, prompt.id, i, limit)) for i in samples]
        self._scheduler.add(responses)
        return responses

    def resume(self, response: Response) -> None:
        """Queue a response that has tokens already, such as one from a checkpoint."""
        self._scheduler.add([response])

    def step(self) -> list[Response]:
        """Start the next step and read the previous one. Returns the responses that got a token."""
        limit = self._stopping.sampling.max_response_length
        step = None
        if self._scheduler.busy and (self._unread is None or not self._scheduler.must_preempt):
            with torch.no_grad():
                step = self._runner.step(self._scheduler.plan(), self._scheduler.computed)
            for response in step.sequences:
                response.pending += 1
                if response.sampled == limit:
                    self._scheduler.finish(response)
            if not self._runner.asynchronous or self._sampler.tracer is not None:  # a tracer needs tokens on the host
                self._unread, step = step, None
        extended = self.settle()
        self._unread = step
        return extended

    def settle(self) -> list[Response]:
        """Read the step that was started last, if any. Returns the responses that got a token."""
        unread, self._unread = self._unread, None
        if unread is None:
            return []
        extended = self._read(unread)
        if self._record is not None:
            for chunks, experts in unread.routing:
                self._record.add(chunks, experts)
        for response in extended:
            if response.finish_reason is not None:
                self.finished += 1
                if response.sampled < self._stopping.sampling.max_response_length:
                    self._scheduler.finish(response)
        self.tokens += len(extended)
        return extended

    def use_version(self, version: int) -> None:
        """Set the policy version of the sampler's weights, from the next step on.

        Drops the recorded experts if no response is in progress. This is so in every run that records experts, because
        such runs wait for all responses before the weights change.
        """
        self.version = version
        if self._record is not None and not self.busy:
            self._record = RoutingRecord()

    def recompute(self) -> None:
        """Recompute the keys and values of all responses in progress with the sampler's current weights."""
        assert self._unread is None, "settle first"
        self._scheduler.preempt_all()

    def cancel(self, responses: Set[Response]) -> None:
        """Drop responses in progress."""
        assert self._unread is None, "settle first"
        self._scheduler.cancel(responses)

    def rollout(self, response: Response, seed: int) -> Rollout:
        """Return a response that has ended as a rollout. `Rollout.version` is the version of its last token."""
        routing = None if self._record is None else self._record.of(response)
        r = response
        assert r.finish_reason is not None, "a response has not ended"
        own = r.response, r.logprobs, r.finish_reason, r.versions[-1]
        return Rollout(r.prompt.id, r.sample, *own, seed, r.text, routing, versions=mixed_versions(r.versions))

    def _read(self, output: StepOutput) -> list[Response]:
        """Append a step's tokens to the responses that had not ended; return these responses."""
        extended = []
        for response, token, logprob in zip(output.sequences, *output.read(), strict=True):
            response.pending -= 1
            if response.finish_reason is None:
                if not isfinite(logprob):
                    require_finite([logprob], response.prompt, self.version)
                response.response.append(token)
                response.logprobs.append(logprob)
                response.versions.append(self.version)
                self._stopping.check(response)
                extended.append(response)
        return extended


class NativeEngine(RolloutEngine):
    """Continuous batching over a paged KV cache.

    Attributes:
        preemptions: Number of times that a sequence lost its pages in the last `generate`.
    """

    def __init__(
        self,
        sampler: Sampler,  # the policy's forward with the published weights
        tokenizer: PreTrainedTokenizerBase,
        config: RolloutConfig,
        graphs: bool = True,  # run decodes as CUDA graphs on a GPU
    ) -> None:
        self.sampler, self.tokenizer, self.config, self.graphs = sampler, tokenizer, config, graphs
        self.preemptions, self.metrics = 0, {}
        self._cache: KVCache | None = None
        self._runner: Runner | None = None

    def publish(self, snapshot: Snapshot) -> None:
        self.version = None  # until the new version is verified
        self._close_runner()  # its graphs read the old version
        self.sampler.install(snapshot)
        verify_in_process(snapshot.version, snapshot.tensors, self.sampler.held())
        self.version = snapshot.version

    def sleep(self) -> None:
        self._close_runner()
        self._cache = None

    def close(self) -> None:
        self.sleep()
        self.version = None

    def sample(
        self, samples: Sequence[Samples], sampling: SamplingParams, version: int, progress: Progress
    ) -> list[Rollout]:
        if not self.sampler.current:
            raise PublishError(
                f"rollout: the policy was requantized (version {self.sampler.newest}) after the sampler "
                f"got version {version}; publish it first"
            )
        longest = longest_of([prompt for prompt, _ in samples], sampling, self.sampler.layout.max_length)
        generation = self.begin(sampling, version, longest, len(samples) * sampling.n)
        responses: list[Response] = []
        for prompt, numbers in samples:
            responses += generation.add(prompt, numbers, sampling.seed)
        while generation.busy:
            generation.step()
            progress(generation.finished, generation.tokens)
        self.preemptions = generation.preemptions
        return [generation.rollout(response, sampling.seed) for response in responses]

    def begin(self, sampling: SamplingParams, version: int, longest: int, sequences: int) -> Generation:
        """Begin a generation on the engine's KV cache. Only one generation at a time can use it.

        Args:
            sampling: Sampling parameters of all responses. `n` and `seed` are not used; they are arguments of `add`.
            version: Policy version of the sampler's weights.
            longest: Maximum tokens of a prompt and its response.
            sequences: Maximum number of responses in progress.
        """
        sizes = self._sizes(longest)
        cache = self._kv_cache(longest, min(sizes.max_num_seqs, sequences))
        record = RoutingRecord() if sampling.record_routing and self.sampler.experts else None
        runner = self._runner_of(cache, sampling.truncation, sizes, longest, record is not None)
        # Fused attention reads nothing past a sequence's end. Plain attention multiplies the values there by zero, so
        # they must not be NaN.
        pool = PagePool(cache.count, (lambda page: None) if runner.asynchronous else cache.clear)
        scheduler = Scheduler(
            pool, runner.max_num_seqs, sizes.max_batched_tokens, sampling.max_response_length, cache.copy
        )
        return Generation(self.sampler, scheduler, runner, Stopping(self.tokenizer, sampling), version, record)

    def _runner_of(
        self, cache: KVCache, truncation: Truncation, sizes: RolloutConfig, longest: int, record: bool
    ) -> Runner:
        """Return the last generation's runner with its CUDA graphs if it can be reused, else a new runner.

        `_kv_cache` closes the runner when it allocates a new cache, so an existing runner uses the current cache.
        """
        asynchronous = self.sampler.weights.fused
        # An asynchronous runner decodes every running sequence in every step, so the token budget limits them too.
        most = min(sizes.max_num_seqs, sizes.max_batched_tokens) if asynchronous else sizes.max_num_seqs
        runner = self._runner
        if runner is None or not runner.serves(truncation, most, longest, record):
            self._close_runner()
            if asynchronous:
                runner = AsyncRunner(self.sampler, cache, truncation, most, record, longest, self.graphs)
            else:
                runner = PlainRunner(self.sampler, cache, truncation, most, record)
        self._runner = runner
        return runner

    def _close_runner(self) -> None:
        if self._runner is not None:
            self._runner.close()
        self._runner = None

    def _sizes(self, longest: int) -> RolloutConfig:
        """Return the configuration with sizes filled in for the device. longest: maximum tokens of a sequence."""
        layout = self.sampler.layout
        if layout.device.type == "cpu":
            return sampler_sizes(self.config, "cpu")
        width = self.sampler.cache_dtype.itemsize
        sequence = kv_cache_bytes(longest, layout.layers, layout.kv_heads, layout.head_dim, width)
        return sampler_sizes(self.config, "cuda", sequence, gpu_bytes())

    def _kv_cache(self, longest: int, sequences: int) -> KVCache:
        """Return a KV cache for `sequences` sequences of up to `longest` tokens each."""
        per_sequence = -(-longest // PAGE)
        pool = self.config.kv_cache_tokens
        count = per_sequence * sequences if pool is None else pool // PAGE
        if count < per_sequence:
            raise UserError(
                f"rollout.kv_cache_tokens: {self.config.kv_cache_tokens} cannot hold one sequence of "
                f"{longest} tokens; set at least {per_sequence * PAGE}"
            )
        if self._cache is None or self._cache.count < count:
            self.sleep()  # free the old cache first
            layout = self.sampler.layout
            size = count, layout.layers, layout.kv_heads, layout.head_dim
            self._cache = KVCache(*size, self.sampler.cache_dtype, layout.device)
        return self._cache
