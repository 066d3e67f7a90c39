"""The sampler's side of the vLLM engine: starts vLLM, loads published weights, generates, scores, sleeps.

It runs in the sampler's own process (`worker.py`), or in the learner's (`rollout.vllm.process: inline`). Importing this
module does not import vLLM; making a host does.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from qarl_kernels.logprob import Truncation

from qarl.policy.trace import Tracer
from qarl.rollout.engine import Progress, SamplingParams, ignore_progress
from qarl.rollout.vllm.numerics import Numerics, numerics_of
from qarl.rollout.vllm.phases import Phases
from qarl.rollout.vllm.recording import Recording, recorded
from qarl.rollout.vllm.sandbox import keep_compiled_code_private
from qarl.rollout.vllm.settings import Request, Response, SamplerSettings, vllm_environment
from qarl.weight_sync.fingerprints import Fingerprint, PublishError
from qarl.weight_sync.update import Arriving, receive

if TYPE_CHECKING:
    from vllm import LLM

GREW = "Memory usage increased after sleeping"  # error of vLLM's worker, 0.24 to 0.32

logger = logging.getLogger("vllm.qarl")  # beside vLLM's own, in the sampler's log


class Host:
    """A started vLLM and the weights it holds.

    expected: Fingerprints of the snapshot in `settings.checkpoint`, by published name.

    Raises:
        PublishError: The model lacks a layer of the snapshot.
        UserError: qarl's kernels do not support a layer.
        Exception: Whatever vLLM raises if it cannot start.
    """

    def __init__(
        self, settings: SamplerSettings, expected: Mapping[str, Fingerprint], phases: Phases | None = None
    ) -> None:
        threads = None if settings.on_gpu else torch.get_num_threads()
        os.environ |= vllm_environment(os.environ, settings.numerics, threads)
        keep_compiled_code_private()
        self.settings = settings
        self._phases = Phases() if phases is None else phases
        self.numerics = numerics_of(settings)
        self._llm = start_vllm(settings, self.numerics, self._phases)
        self._worker = self._llm.collective_rpc(lambda worker: getattr(worker, "worker", worker))[0]
        self.numerics.started(self._worker, expected)
        if settings.routing:
            self.numerics.experts()  # refuse kernels that cannot report them now, not at the first call that asks
        self._phases.end("ready")
        logger.info(self._phases.line())

    def capabilities(self) -> dict[str, Any]:
        """Return what `Connection` reports to the learner. phases: seconds of each part of the start."""
        return {
            "proved_frac": self.numerics.proved_frac,
            "notes": self.numerics.notes(),
            "phases": self._phases.seconds,
        }

    # --- publishing --------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def publish(self, version: int, arriving: Arriving, expected: Mapping[str, Fingerprint]) -> dict[str, float]:
        """Load the tensors of a publish and verify what the model holds afterwards.

        Args:
            arriving: Tensors in checkpoint layout, or patches of held tensors, by published name.
            expected: Fingerprints of the whole snapshot.

        Returns:
            Seconds of the parts receive, load and check.

        Raises:
            PublishError: Bytes that arrived or that the model holds differ from those sent, here or in another process
                with a part of the same model.
        """
        try:
            seconds = self._publish(version, arriving, expected)
        except Exception:
            self.numerics.agreed(False)
            raise
        if not self.numerics.agreed(True):
            raise PublishError(f"publish of version {version}: another process of the same model refused it")
        return seconds

    def _publish(self, version: int, arriving: Arriving, expected: Mapping[str, Fingerprint]) -> dict[str, float]:
        begin = time.perf_counter()
        tensors = receive(version, arriving, expected, lambda name: self.numerics.base(name, expected))
        received = self._now()
        if tensors:
            self.numerics.load(tensors)
            if not self._llm.reset_prefix_cache():
                raise PublishError(f"publish of version {version}: vLLM still runs requests of an earlier version")
        loaded = self._now()
        self.numerics.check(version, expected)
        return {"receive": received - begin, "load": loaded - received, "check": self._now() - loaded}

    def _now(self) -> float:
        """Seconds, after all queued work of the GPU."""
        if self.settings.on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter()

    def score(self, sequences: Sequence[list[int]]) -> list[list[float]]:
        """Natural-log probabilities of every token but the first of each sequence, at temperature 1."""
        import vllm

        self.numerics.shape(Truncation())
        params = vllm.SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        outputs = self._run([(tokens, params) for tokens in sequences], ignore_progress)
        return [
            [entry[token].logprob for entry, token in zip(output.prompt_logprobs[1:], tokens[1:], strict=True)]
            for output, tokens in zip(outputs, sequences, strict=True)
        ]

    # --- generation --------------------------------------------------------------------------------------------

    def generate(self, requests: Sequence[Request], sampling: SamplingParams, progress: Progress) -> list[Response]:
        """Sample one response per request.

        progress: Called after every step with the number of finished responses and their tokens. If it raises, the
        call ends and vLLM drops the requests.
        """
        import vllm
        from vllm.sampling_params import RequestOutputKind

        # vLLM accepts temperatures from 0.01 to 2. The policy's sampler applies any; vLLM only decides greedy or not.
        own = self.numerics.forward is None
        cut = sampling.truncation
        common = {
            "max_tokens": sampling.max_response_length,
            "temperature": cut.temperature if own else float(cut.temperature > 0),
            "top_p": cut.top_p,
            "top_k": cut.top_k,
            "min_p": cut.min_p,
            "stop": list(sampling.stop),
            "stop_token_ids": sorted(sampling.stop_token_ids),
            "logprobs": 0,
            "flat_logprobs": True,
            "detokenize": bool(sampling.stop),
            "ignore_eos": True,  # what ends a response is in stop_token_ids
            "output_kind": RequestOutputKind.FINAL_ONLY,
        }
        self.numerics.shape(cut)
        with_params = [(r.token_ids, vllm.SamplingParams(seed=r.seed, **common)) for r in requests]
        if not sampling.record_routing:
            return [_response(output) for output in self._run(with_params, progress)]
        self._llm.reset_prefix_cache()  # cached prefixes must come from this call, whose experts are recorded
        recording = Recording(*self.numerics.experts())
        with recorded(self._worker.model_runner, recording):
            outputs = self._run(with_params, progress)
        pairs = zip(requests, outputs, strict=True)
        routing = recording.routing([[*request.token_ids, *output.outputs[0].token_ids] for request, output in pairs])
        return [_response(output, rows.numpy().tobytes()) for output, rows in zip(outputs, routing, strict=True)]

    def trace(self, requests: Sequence[Request], sampling: SamplingParams, tracer: Tracer) -> list[Response]:
        """`generate` with every operation of its forwards reported to the tracer; exact numerics only."""
        from qarl.rollout.vllm.exact.tracing import traced

        assert self.numerics.forward is not None, "only the policy's own forward is traced"
        self._llm.reset_prefix_cache()  # or the prompts' forwards would not run again
        with traced(self._worker.model_runner, self.numerics.forward, tracer):
            return self.generate(requests, sampling, ignore_progress)

    def _run(self, requests: Sequence[tuple[list[int], Any]], progress: Progress) -> list[Any]:
        """Final outputs, in the order of the requests."""
        from vllm.inputs import TokensPrompt

        engine = self._llm.llm_engine
        added: list[str] = []
        outputs: dict[int, Any] = {}
        tokens = 0
        try:
            for index, (token_ids, params) in enumerate(requests):
                engine.add_request(str(index), TokensPrompt(prompt_token_ids=token_ids), params)
                added.append(str(index))
            while engine.has_unfinished_requests():
                for output in engine.step():
                    if output.finished:
                        outputs[int(output.request_id)] = output
                        tokens += len(output.outputs[0].token_ids)
                progress(len(outputs), tokens)
        except BaseException:
            engine.abort_request([name for name in added if int(name) not in outputs])
            raise
        return [outputs[index] for index in range(len(requests))]

    # --- memory ------------------------------------------------------------------------------------------------

    def sleep(self, level: int) -> int | None:
        """Free the KV cache and the weights, which are parked in host memory (level 1) or dropped (level 2).

        Returns the freed bytes of the GPU, or None if vLLM does not share the learner's GPU and keeps everything.
        """
        if not self.settings.arguments.get("enable_sleep_mode"):
            return None
        from vllm.device_allocator.cumem import CuMemAllocator

        self.numerics.before_sleep()
        reserved = torch.cuda.memory_reserved()
        held = CuMemAllocator.get_instance().get_current_usage()  # weights and KV cache; a sleep unmaps both
        with beside_others(self._worker):
            self._llm.sleep(level=level)
        return held + reserved - torch.cuda.memory_reserved()  # torch's cache is freed too

    def wake(self) -> None:
        """Allocate the memory again. After level 2 the weights are undefined until the next full publish."""
        self._llm.wake_up()
        self.numerics.after_sleep()

    def close(self) -> None:
        """Free the engine and its memory."""
        self._llm.llm_engine.engine_core.shutdown()
        del self._llm, self._worker, self.numerics
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def start_vllm(settings: SamplerSettings, numerics: Numerics, phases: Phases) -> LLM:
    """Load the model in `settings.checkpoint`. Raises whatever vLLM raises."""
    from vllm import LLM

    from qarl.rollout.vllm.sampling import batch_seeded_noise

    batch_seeded_noise()
    with numerics.starting():
        phases.end("imports")
        with phases.of_worker(numerics.loaded):
            return LLM(str(settings.checkpoint), **settings.arguments)


@contextmanager
def beside_others(worker: Any) -> Iterator[None]:
    """While entered, vLLM's worker can sleep although other processes allocate memory on its GPU.

    After freeing its memory the worker compares the free memory of the whole GPU with that before, and fails if there
    is less. Nothing is left to do then.
    """
    sleep = worker.sleep

    @wraps(sleep)
    def sleeping(*arguments: Any, **options: Any) -> None:
        try:
            sleep(*arguments, **options)
        except AssertionError as error:
            if GREW not in str(error):
                raise

    with patch.object(worker, "sleep", sleeping):
        yield


def _response(output: Any, routing: bytes = b"") -> Response:
    (response,) = output.outputs
    # The sampled token is the first entry of each position.
    logprobs = [response.logprobs.logprobs[start] for start in response.logprobs.start_indices]
    reason = "stop" if response.finish_reason == "stop" else "length"
    return Response(list(response.token_ids), logprobs, reason, response.stop_reason, routing)
