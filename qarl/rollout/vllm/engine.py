"""The vLLM engine: samples responses with vLLM and publishes each policy version to it.

The first publish writes a checkpoint and starts vLLM on it; later publishes send the snapshot's tensors. If vLLM dies,
hangs or fails, it is restarted at the current version, up to `rollout.vllm.max_restarts` times. The learner's process
does not import vLLM, unless `rollout.vllm.process` is `inline`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from qarl.config import Config
from qarl.policy.trace import Tracer
from qarl.rollout.engine import (
    Progress,
    RolloutEngine,
    Samples,
    SamplingParams,
    ignore_progress,
    longest_of,
    request_seed,
    require_finite,
)
from qarl.rollout.shared import Headroom, own_headroom
from qarl.rollout.stopping import Stopping
from qarl.rollout.vllm.launch import LOG, launch_sampler, routing_of, sampler_settings, temporary_checkpoint
from qarl.rollout.vllm.process import Sampler, next_restart, start_error
from qarl.rollout.vllm.settings import Request
from qarl.types import Rollout
from qarl.weight_sync.sender import SamplerFault, WeightSender
from qarl.weight_sync.snapshot import ModelLayout, Snapshot

MARGIN = 2**30  # bytes of GPU memory to leave free, beyond the estimate, when vLLM wakes beside the learner
PROFILING_ERROR = "Error in memory profiling"  # an error message of vLLM's worker (0.24 to 0.32)


class VLLMEngine(RolloutEngine):
    """Runs a vLLM, started at the first publish.

    Args:
        config: The run's configuration.
        layout: Layout of the policy's model.
        tokenizer: The policy's tokenizer.
        weights: Sends the policy's versions to vLLM and verifies them.
        directory: Directory for the log (`sampler.log`) and, while vLLM loads it, the checkpoint.
        say: Called with one line for the user.
        prelaunched: A sampler whose processes already run; the first start uses it.
        tick: Called repeatedly while vLLM starts. If it raises, the start is aborted.
        update_bytes: GPU memory that an optimizer update needs. vLLM wakes during the update if both fit. Default: vLLM
            wakes for the next publish.
        headroom: Tests the free memory of all GPUs that vLLM uses. Default: the learner's GPU.

    Attributes:
        tracer: Records the operations of `generate`; only for a vLLM in this process with exact numerics.
        restarts: Number of restarts so far.
        phases: Seconds of each part of vLLM's last start.
    """

    tracer: Tracer | None = None

    def __init__(
        self,
        config: Config,
        layout: ModelLayout,
        tokenizer: PreTrainedTokenizerBase,
        weights: WeightSender,
        directory: Path,
        say: Callable[[str], None],
        prelaunched: Sampler | None = None,
        tick: Callable[[], None] = lambda: None,
        update_bytes: int | None = None,
        headroom: Headroom | None = None,
    ) -> None:
        self.config, self.layout, self.tokenizer, self.directory = config, layout, tokenizer, directory
        self.weights, self.say = weights, say
        self.log = directory / LOG
        self._prelaunched, self._tick = prelaunched, tick
        self._headroom, self._update_bytes = headroom or own_headroom(layout.device), update_bytes
        self._asleep = self._waking = False  # `_asleep` stays True while vLLM wakes
        self._freed = 0  # bytes of GPU memory that the last sleep freed
        self.metrics = weights.metrics
        self.restarts = 0
        self.phases: dict[str, float] = {}
        self._snapshot: Snapshot | None = None
        self._sampler: Sampler | None = None
        self._fault: SamplerFault | None = None

    # --- RolloutEngine -----------------------------------------------------------------------------------------

    def publish(self, snapshot: Snapshot) -> None:
        self.version, self._snapshot = None, snapshot  # the version is set after verification
        self.weights.scorer.install(snapshot)
        self._with_restarts(lambda: self._publish(snapshot))
        self.version = snapshot.version

    def sample(
        self, samples: Sequence[Samples], sampling: SamplingParams, version: int, progress: Progress
    ) -> list[Rollout]:
        longest_of([prompt for prompt, _ in samples], sampling, self.layout.max_length)  # raises if one does not fit
        order = [(prompt, number) for prompt, numbers in samples for number in numbers]
        requests = [Request(p.token_ids, request_seed(sampling.seed, p.id, sample)) for p, sample in order]
        kind = routing_of(self.layout) if sampling.record_routing else None
        sampling = replace(sampling, record_routing=kind is not None)

        def run() -> Any:
            if self._sampler is None or self._asleep or not self.weights.holds:
                assert self._snapshot is not None
                self._publish(self._snapshot)  # for a restarted vLLM, or one that dropped its weights to sleep
            assert self._sampler is not None
            if self.tracer is not None:
                return self._sampler.call("trace", (requests, sampling, self.tracer), progress)
            return self._sampler.call("generate", (requests, sampling), progress)

        responses = self._with_restarts(run)
        stopping = Stopping(self.tokenizer, sampling)
        rollouts, seed = [], sampling.seed
        for (prompt, number), r in zip(order, responses, strict=True):
            require_finite(r.logprobs, prompt, version)
            text = stopping.final_text(r.token_ids, r.stopped_by)
            routing = None
            if kind is not None:
                dtype, of_token = kind
                routing = torch.frombuffer(bytearray(r.routing), dtype=dtype).view(-1, *of_token)
            rollouts.append(
                Rollout(prompt.id, number, r.token_ids, r.logprobs, r.finish_reason, version, seed, text, routing)
            )
        return rollouts

    def sleep(self) -> None:
        level = self.config.rollout.vllm.sleep
        if self._sampler is None or (self._asleep and not self._waking):
            return
        try:
            self._wake(self._sampler)
            begin = time.perf_counter()
            freed = self._sampler.call("sleep", level, ignore_progress)
        except SamplerFault as fault:
            self._defer(fault)
            return
        if freed is None:  # vLLM does not share the learner's GPU and keeps its memory
            return
        self._asleep, self._freed = True, freed
        self.metrics["time/sampler_sleep_s"] = time.perf_counter() - begin
        self.metrics["memory/sampler_freed_gib"] = freed / 2**30
        if level == 2:
            self.weights.forget()  # vLLM has no weights until the next full publish

    def wake(self) -> None:
        waits = self._asleep and not self._waking and self.config.rollout.vllm.process == "separate"
        needed = self._freed + self._update_bytes + MARGIN if waits and self._update_bytes is not None else None
        # `_headroom` may be a collective, so every rank calls it.
        if not self._headroom(needed) or self._sampler is None:
            return
        try:
            self._sampler.begin("wake", None)
            self._waking = True
        except SamplerFault as fault:
            self._defer(fault)

    def _wake(self, sampler: Sampler) -> None:
        """Wait until the sampler is awake."""
        if not self._asleep:
            return
        if not self._waking:
            torch.cuda.empty_cache()  # vLLM needs the memory in torch's cache
        begin = time.perf_counter()
        if not self._waking:
            sampler.begin("wake", None)
        self._waking = False
        sampler.finish(ignore_progress)
        self.metrics["time/sampler_wake_s"] = time.perf_counter() - begin
        self._asleep = False

    def _defer(self, fault: SamplerFault) -> None:
        """Stop a failed sampler. The next publish reports the fault, so that the current step completes."""
        self._stop()
        self._fault = fault

    def close(self) -> None:
        self._stop()
        if self._prelaunched is not None:
            self._prelaunched.close()
            self._prelaunched = None
        self.version = self._snapshot = None

    # --- publishing --------------------------------------------------------------------------------------------

    def _publish(self, snapshot: Snapshot) -> None:
        if self._fault is not None:
            fault, self._fault = self._fault, None
            raise fault
        if self._sampler is None:
            self._start(snapshot)
            return
        self._wake(self._sampler)
        self.weights.send(self._sampler, snapshot, self.config.rollout.vllm.publish)

    # --- the process -------------------------------------------------------------------------------------------

    def _start(self, snapshot: Snapshot) -> None:
        """Write the snapshot to a checkpoint and start vLLM on it."""
        begin = time.perf_counter()
        with temporary_checkpoint(self.directory) as checkpoint:
            settings = sampler_settings(self.config, self.layout, checkpoint)
            expected = snapshot.fingerprints
            self._sampler = self._prelaunched or launch_sampler(self.config, self.layout.device, self.directory)
            self._prelaunched = None
            self.weights.prepare(checkpoint, snapshot)  # while the process imports vLLM
            torch.cuda.empty_cache()
            self.metrics["time/sampler_prepare_s"] = time.perf_counter() - begin
            self._sampler.start(settings, expected, lambda responses, tokens: self._tick())
        self.weights.accept(self._sampler, snapshot, self.config.rollout.vllm.publish)
        self.metrics["time/sampler_start_s"] = time.perf_counter() - begin
        self.phases = self._sampler.capabilities["phases"]

    def _with_restarts(self, action: Callable[[], Any]) -> Any:
        """Run an action, and repeat it after every fault of vLLM that allows a restart; `_publish` then starts vLLM.

        Raises:
            SamplerError: vLLM failed at its first start, or `rollout.vllm.max_restarts` is reached.
        """
        vllm = self.config.rollout.vllm
        while True:
            try:
                return action()
            except SamplerFault as fault:
                started = self.weights.started
                self._stop()
                # A failed first start is repeated only if another process freed GPU memory while vLLM measured its own.
                # A start in the learner's process cannot be repeated.
                repeatable = PROFILING_ERROR in str(fault) and vllm.process == "separate"
                if not started and not (repeatable and self.restarts < vllm.max_restarts):
                    raise start_error(fault, self.log) from fault
                self.restarts = next_restart(
                    fault, self.restarts, vllm.max_restarts, "rollout.vllm", self.log, self.say
                )
            except BaseException:
                if not self.weights.holds:
                    self._stop()  # interrupted while loading weights, which are undefined now
                raise

    def _stop(self) -> None:
        if self._sampler is not None:
            self._sampler.close()
        self.weights.forget()
        self._sampler = None
        self._asleep = self._waking = False
