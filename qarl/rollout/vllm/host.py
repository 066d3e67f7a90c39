"""The sampler's side of the vLLM engine: starts vLLM, loads published weights, generates, scores, sleeps.

It runs in the sampler's process (`rollout/vllm_worker.py`), or in the learner's with `rollout.vllm.process: inline`.
Importing this module does not import vLLM; creating a `Host` does.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch

from qarl.policy.trace import Tracer
from qarl.rollout.engine import Progress, SamplingParams, ignore_progress
from qarl.rollout.vllm.numerics import Numerics
from qarl.rollout.vllm.phases import Phases
from qarl.rollout.vllm.recording import RoutingRecorder, record_forwards
from qarl.rollout.vllm.sandbox import keep_compiled_code_private
from qarl.rollout.vllm.settings import InFlight, Request, Response, SamplerSettings, vllm_environment
from qarl.types import FinishReason
from qarl.utils.transfer import synchronized_s
from qarl.weight_sync.fingerprints import Fingerprint, PublishError
from qarl.weight_sync.update import Arriving, WeightUpdate, receive

if TYPE_CHECKING:
    from vllm import LLM

GREW = "Memory usage increased after sleeping"  # an error message of vLLM's worker (0.24 to 0.32)

logger = logging.getLogger("vllm.qarl")  # a child of vLLM's logger, so it writes to the sampler's log


class Host:
    """A running vLLM engine and its weights.

    Args:
        settings: How vLLM is started.
        expected: Fingerprints of the snapshot in `settings.checkpoint`, by published name.
        phases: Measures the parts of the start.

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
        self._finished_early: list[Any] = []  # outputs of `add` that finished during `score`
        self._salt: str | None = None  # vLLM's cache_salt: requests with different salts share no cached blocks
        self._worker: Any = self._llm.collective_rpc(lambda worker: getattr(worker, "worker", worker))[0]
        self.numerics.started(self._worker, expected)
        if settings.routing:
            self.numerics.experts()  # raises now, not in the first call, if the kernels cannot report experts
        self._phases.end("ready")
        logger.info(self._phases.line())

    def capabilities(self) -> dict[str, Any]:
        """Return `Connection.capabilities`."""
        return {
            "proved_frac": self.numerics.proved_frac,
            "notes": self.numerics.notes(),
            "phases": self._phases.seconds,
        }

    def execute(self, operation: str, payload: Any, unpack: Callable[[Any], Arriving], progress: Progress) -> Any:
        """Execute an order of the learner.

        Args:
            operation: Name of the operation.
            payload: Its arguments.
            unpack: Opens the tensors and patches in a publish's payload.
            progress: See `generate`.

        Returns:
            The result of the operation; of a publish, the seconds of its parts and the canary's log-probs.
        """
        match operation:
            case "publish":
                assert isinstance(payload, WeightUpdate)
                seconds = self.publish(payload.version, unpack(payload.payloads[0]), payload.expected)
                begin = time.perf_counter()
                scores = self.score(payload.canary)
                return seconds | {"score": time.perf_counter() - begin}, scores
            case "score":
                return self.score(payload)
            case "generate":
                requests, sampling = payload
                return self.generate(requests, sampling, progress)
            case "trace":
                return self.trace(*payload)
            case "sleep":
                return self.sleep(payload)
            case "wake":
                return self.wake()
        raise AssertionError(f"unknown operation {operation!r}")

    # --- publishing --------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def publish(
        self, version: int, arriving: Arriving, expected: Mapping[str, Fingerprint], in_flight: InFlight = "wait"
    ) -> dict[str, float]:
        """Load the tensors of a publish and verify the model's tensors afterwards. Call `drain` first.

        Args:
            version: Policy version.
            arriving: Tensors in checkpoint layout, or patches of the model's tensors, by published name.
            expected: Fingerprints of the whole snapshot.
            in_flight: Whether requests in progress recompute or keep their keys and values. `wait`: there are none.

        Returns:
            Seconds of the parts `receive`, `load` and `check`.

        Raises:
            PublishError: The received bytes or the model's tensors differ from those sent, in this process or in
                another process with a part of the same model.
        """
        try:
            seconds = self._publish(version, arriving, expected, in_flight)
        except Exception:
            self.numerics.all_agree(False)
            raise
        if not self.numerics.all_agree(True):
            raise PublishError(f"publish of version {version}: another process of the same model rejected it")
        return seconds

    def _publish(
        self, version: int, arriving: Arriving, expected: Mapping[str, Fingerprint], in_flight: InFlight
    ) -> dict[str, float]:
        begin, device = time.perf_counter(), torch.device("cuda" if self.settings.on_gpu else "cpu")
        tensors = receive(version, arriving, expected, lambda name: self.numerics.base(name, expected))
        received = synchronized_s(device)
        if tensors:
            self.numerics.load(tensors)
            if in_flight == "keep_kv":
                self._salt = str(version)  # vLLM cannot clear a prefix cache that running requests use
            elif not self._llm.reset_prefix_cache(reset_running_requests=in_flight == "recompute_kv"):
                raise PublishError(f"publish of version {version}: vLLM still runs requests of an earlier version")
        loaded = synchronized_s(device)
        self.numerics.check(version, expected)
        return {"receive": received - begin, "load": loaded - received, "check": synchronized_s(device) - loaded}

    def score(self, sequences: Sequence[list[int]]) -> list[list[float]]:
        """Return log-probs in nats, at temperature 1, of every token but the first of each sequence.

        Requests in progress continue meanwhile. With vLLM's scheduling policy `priority`, scoring comes first.
        """
        import vllm

        # With a seed, because `batch_seeded_noise` needs one for every request of a batch.
        params = vllm.SamplingParams(seed=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        outputs = self._run([(tokens, params) for tokens in sequences], ignore_progress, priority=-1)
        return [
            [entry[token].logprob for entry, token in zip(output.prompt_logprobs[1:], tokens[1:], strict=True)]
            for output, tokens in zip(outputs, sequences, strict=True)
        ]

    # --- generation --------------------------------------------------------------------------------------------

    def generate(self, requests: Sequence[Request], sampling: SamplingParams, progress: Progress) -> list[Response]:
        """Sample one response per request.

        Args:
            requests: Prompts and seeds.
            sampling: Sampling parameters.
            progress: Called after every step with the number of finished responses and their tokens. If it raises, the
                requests are aborted.

        Returns:
            Responses in the order of the requests.
        """
        self.numerics.shape(sampling.truncation)
        with_params = [(r.token_ids, self._params(sampling, r.seed)) for r in requests]
        if not sampling.record_routing:
            return [_response(output) for output in self._run(with_params, progress)]
        self._llm.reset_prefix_cache()  # experts are only known for prefixes that this call computes
        recording = RoutingRecorder(*self.numerics.experts())
        with record_forwards(self._worker.model_runner, recording):
            outputs = self._run(with_params, progress)
        pairs = zip(requests, outputs, strict=True)
        routing = recording.routing([[*request.token_ids, *output.outputs[0].token_ids] for request, output in pairs])
        return [_response(output, rows.numpy().tobytes()) for output, rows in zip(outputs, routing, strict=True)]

    def _params(self, sampling: SamplingParams, seed: int) -> Any:
        """Return vLLM's parameters of one request."""
        import vllm
        from vllm.sampling_params import RequestOutputKind

        # vLLM raises nonzero temperatures below 0.01 to 0.01 and rejects temperatures above 2. With exact numerics the
        # policy's sampler applies the temperature, and vLLM only decides between greedy and random sampling.
        vllm_samples, cut = self.numerics.forward is None, sampling.truncation
        return vllm.SamplingParams(
            seed=seed,
            max_tokens=sampling.max_response_length,
            temperature=cut.temperature if vllm_samples else float(cut.temperature > 0),
            top_p=cut.top_p,
            top_k=cut.top_k,
            min_p=cut.min_p,
            stop=list(sampling.stop),
            stop_token_ids=sorted(sampling.stop_token_ids),
            logprobs=0,
            flat_logprobs=True,
            detokenize=bool(sampling.stop),
            ignore_eos=True,  # stop_token_ids has all tokens that end a response
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def trace(self, requests: Sequence[Request], sampling: SamplingParams, tracer: Tracer) -> list[Response]:
        """As `generate`, reporting every operation of the forwards to the tracer. Exact numerics only."""
        from qarl.rollout.vllm.exact.tracing import traced

        assert self.numerics.forward is not None, "only the policy's forward can be traced"
        self._llm.reset_prefix_cache()  # so that the prompts' forwards run
        with traced(self._worker.model_runner, self.numerics.forward, tracer):
            return self.generate(requests, sampling, ignore_progress)

    def _run(self, requests: Sequence[tuple[list[int], Any]], progress: Progress, priority: int = 0) -> list[Any]:
        """Run requests to their end. Returns vLLM's outputs in their order; other outputs are kept for `step`."""
        from vllm.inputs import TokensPrompt

        engine = self._llm.llm_engine
        added: list[str] = []
        outputs: dict[str, Any] = {}
        tokens = 0
        try:
            for index, (token_ids, params) in enumerate(requests):
                engine.add_request(str(index), TokensPrompt(prompt_token_ids=token_ids), params, priority=priority)
                added.append(str(index))
            while len(outputs) < len(added):
                for output in self._step():
                    if output.request_id not in added:
                        self._finished_early.append(output)
                        continue
                    outputs[output.request_id] = output
                    tokens += len(output.outputs[0].token_ids)
                progress(len(outputs), tokens)
        except BaseException:
            engine.abort_request([name for name in added if name not in outputs])
            raise
        return [outputs[name] for name in added]

    def _step(self) -> list[Any]:
        """Run an engine step. Returns the outputs of requests that finished in it."""
        return [output for output in self._llm.llm_engine.step() if output.finished]

    # --- for asynchronous rollouts -----------------------------------------------------------------------------------

    def add(self, name: str, request: Request, sampling: SamplingParams) -> None:
        """Add a request; `step` advances it.

        Args:
            name: Name of the request. Must not be a number, because `generate` and `score` use numbers.
            request: Prompt and seed.
            sampling: Sampling parameters. Truncation must be the same for all requests in progress.
        """
        from vllm.inputs import TokensPrompt

        self.numerics.shape(sampling.truncation)
        prompt = TokensPrompt(prompt_token_ids=request.token_ids)
        if self._salt is not None:
            prompt["cache_salt"] = self._salt
        self._llm.llm_engine.add_request(name, prompt, self._params(sampling, request.seed))

    def step(self) -> list[tuple[str, Response]]:
        """Run an engine step. Returns (name, response) of each request that finished since the last call."""
        return self._with_earlier(self._step())

    def drain(self) -> list[tuple[str, Response]]:
        """Finish the batches that vLLM has scheduled ahead, without starting another one. Returns as `step`."""
        from vllm.v1.core.sched.interface import PauseState

        client: Any = self._llm.llm_engine.engine_core
        core = client.engine_core
        ended: list[Any] = []
        if core.batch_queue:  # only with asynchronous scheduling
            core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
            try:
                while core.batch_queue:
                    ended += self._step()
            finally:
                core.scheduler.set_pause_state(PauseState.UNPAUSED)
        return self._with_earlier(ended)

    def cancel(self, names: list[str]) -> None:
        """Abort requests in progress. Call `drain` first."""
        self._llm.llm_engine.abort_request(names)

    def _with_earlier(self, ended: list[Any]) -> list[tuple[str, Response]]:
        ended, self._finished_early = [*self._finished_early, *ended], []
        return [(output.request_id, _response(output)) for output in ended]

    def partial_outputs(self) -> Iterator[tuple[str, int, Callable[[], tuple[list[int], list[float]]]]]:
        """Yield (name, number of tokens, function that returns token ids and log-probs) of each request in progress.

        After `drain` this includes all tokens that were sampled.
        """
        for state in self._llm.llm_engine.output_processor.request_states.values():
            tokens: Any = state.detokenizer
            logprobs = state.logprobs_processor
            count = tokens.num_output_tokens()
            yield state.external_req_id, count, partial(_so_far, tokens, logprobs)

    # --- memory ------------------------------------------------------------------------------------------------

    def sleep(self, level: int) -> int | None:
        """Free the KV cache and the weights, which are copied to host memory (level 1) or dropped (level 2).

        Returns:
            Freed bytes of GPU memory; None if vLLM does not share the learner's GPU and frees nothing.
        """
        if not self.settings.arguments.get("enable_sleep_mode"):
            return None
        from vllm.device_allocator.cumem import CuMemAllocator

        self.numerics.before_sleep()
        reserved = torch.cuda.memory_reserved()
        held = CuMemAllocator.get_instance().get_current_usage()  # bytes of weights and KV cache; a sleep unmaps both
        with tolerate_memory_growth(self._worker):
            self._llm.sleep(level=level)
        return held + reserved - torch.cuda.memory_reserved()  # a sleep also empties torch's cache

    def wake(self) -> None:
        """Allocate the memory again. After a sleep of level 2 the weights are undefined until the next full publish."""
        self._llm.wake_up()
        self.numerics.after_sleep()

    def close(self) -> None:
        """Shut vLLM down and free its memory."""
        self._llm.llm_engine.engine_core.shutdown()
        del self._llm, self._worker, self.numerics
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def start_vllm(settings: SamplerSettings, numerics: Numerics, phases: Phases) -> LLM:
    """Start vLLM on `settings.checkpoint`. Raises whatever vLLM raises."""
    from vllm import LLM

    from qarl.rollout.vllm.sampling import batch_seeded_noise, find_stop_strings_as_native

    batch_seeded_noise()
    find_stop_strings_as_native()
    with numerics.starting():
        phases.end("imports")
        with phases.time_worker(numerics.loaded):
            return LLM(str(settings.checkpoint), **settings.arguments)


@contextmanager
def tolerate_memory_growth(worker: Any) -> Iterator[None]:
    """Context manager: vLLM's worker can sleep although other processes allocate memory on its GPU.

    After it has freed its own memory, the worker raises an AssertionError if the GPU has less free memory than before.
    The sleep itself is complete by then, so the error is ignored.
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
    reason: FinishReason = "stop" if response.finish_reason == "stop" else "length"
    return Response(list(response.token_ids), _sampled(response.logprobs), reason, response.stop_reason, routing)


def _sampled(logprobs: Any) -> list[float]:
    """Return the log-probs of the sampled tokens, which are the first entry at each position."""
    return [logprobs.logprobs[start] for start in logprobs.start_indices]


def _so_far(detokenizer: Any, logprobs: Any) -> tuple[list[int], list[float]]:
    return list(detokenizer.output_token_ids), _sampled(logprobs.logprobs)


def numerics_of(settings: SamplerSettings) -> Numerics:
    """Return the implementation for `settings.numerics`. With `exact`, nothing of `own_kernels` is imported."""
    if settings.numerics == "exact":
        from qarl.rollout.vllm.exact.numerics import ExactNumerics

        return ExactNumerics(settings)
    from qarl.rollout.vllm.own_kernels.numerics import OwnKernels

    return OwnKernels(settings)
