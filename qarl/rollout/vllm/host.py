"""The side of the vLLM engine that holds vLLM: starts it, loads what is published, generates, scores, sleeps.

It lives in the sampler's own process (`worker.py`), or in the learner's (`rollout.vllm.process: inline`). Importing
this module does not import vLLM; making a host does.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from qarl_kernels.logprob import Truncation
from torch import nn

from qarl.policy.trace import Tracer
from qarl.rollout.vllm.alone import keep_compiled_code_private
from qarl.rollout.vllm.asleep import Freed, beside_others
from qarl.rollout.vllm.held import HeldModel
from qarl.rollout.vllm.limits import known_limits
from qarl.rollout.vllm.loading import Loader, stored
from qarl.rollout.vllm.meeting import agreed
from qarl.rollout.vllm.phases import Phases
from qarl.rollout.vllm.recording import Experts, Recording, Taps, recorded
from qarl.rollout.vllm.settings import Drawing, Request, Response, SamplerSettings, vllm_environment
from qarl.rollout.vllm.start import import_ahead, require_served, start_vllm
from qarl.weight_sync.fingerprints import Fingerprint, fingerprints
from qarl.weight_sync.receiver import Arriving, receive
from qarl.weight_sync.shards import METADATA, Shard, shard_prints
from qarl.weight_sync.verify import PublishError, verify

if TYPE_CHECKING:
    from qarl.rollout.vllm.exact.model import Forward

Progress = Callable[[int, int], None]

logger = logging.getLogger("vllm.qarl")  # beside vLLM's own, in the sampler's log


class Host:
    """A started vLLM and what it holds.

    expected: fingerprints of the snapshot in `settings.checkpoint`, by published name. phases: of the start, so far.
    Raises whatever vLLM raises when it cannot start; PublishError when it lacks a layer of the snapshot, UserError when
    qarl's kernels cannot serve one.
    """

    _policy: Forward | None = None  # the policy's forward, where that is what vLLM runs

    def __init__(
        self, settings: SamplerSettings, expected: Mapping[str, Fingerprint], phases: Phases | None = None
    ) -> None:
        os.environ |= vllm_environment(os.environ, settings.linear_kernels, settings.numerics, settings.threads)
        keep_compiled_code_private()
        self.settings, self._expected = settings, expected
        self._phases = Phases() if phases is None else phases
        self._llm = start_vllm(settings, self._phases)
        self._worker = self._llm.collective_rpc(_itself)[0]
        self._head = None
        self._shard = Shard(settings.shard, settings.shards)
        if settings.numerics == "exact":
            from qarl.rollout.vllm.exact.start import forward_of

            self._policy = forward_of(self._worker.model_runner)
            self._head = self._policy.head
        elif settings.linear_kernels == "qarl" or settings.cuda is None:
            # Without it vLLM's packed copy of a tied output layer would outlive its reloads on the CPU.
            from qarl.rollout.vllm.head import use_float32_head

            self._head = use_float32_head(self._model)
        if settings.linear_kernels == "qarl":
            require_served(self._model)
        self._parts = self._parts_in_checkpoint()
        self.held = HeldModel(self._model, self._parts)
        self._loader = Loader(self._worker, self.held, expected, settings.checkpoint, settings.staging, self._shard)
        if settings.routing:
            _ = self._experts  # kernels that cannot tell them are refused now, and not by the first call that asks
        self._phases.end("ready")
        logger.info(self._phases.line())

    import_ahead = staticmethod(import_ahead)

    @property
    def _model(self) -> nn.Module:
        return self._worker.model_runner.get_model()

    def capabilities(self) -> dict[str, Any]:
        """What the other side wants to know of a started engine.

        proved_frac: share of the snapshot's bytes whose arrival digests prove. notes: what vLLM does otherwise
        than the scheme says. phases: seconds of the parts of its start.
        """
        import vllm

        quantization = json.loads((self.settings.checkpoint / "config.json").read_text()).get("quantization_config")
        own = self.settings.linear_kernels == "vllm"  # and experts that it has no kernels for were refused before
        _, note = known_limits(quantization, vllm.__version__, experts=False) if own else ("", "")
        return {
            "proved_frac": self.held.proved_frac,
            "notes": [f"vLLM {vllm.__version__}: {note}"] if note else [],
            "phases": self._phases.seconds,
        }

    # --- publishing --------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def publish(self, version: int, arriving: Arriving, expected: Mapping[str, Fingerprint]) -> dict[str, float]:
        """Load what arrives, in layer order, and check what is held afterwards.

        arriving: tensors in checkpoint layout, or patches of those held (see `receive`). expected: fingerprints of
        the whole snapshot. Returns the seconds of its parts: receive, load, check.
        Raises PublishError: other bytes arrived than were sent, or other ones are held, here or in another process of
        the same model.
        """
        fault: Exception | None = None
        seconds: dict[str, float] = {}
        try:
            seconds = self._publish(version, arriving, expected)
        except Exception as error:
            fault = error
        if self._shard.count > 1 and not agreed(fault is None) and fault is None:
            fault = PublishError(f"publish of version {version}: another process of the same model refused it")
        if fault is not None:
            raise fault
        return seconds

    def _publish(self, version: int, arriving: Arriving, expected: Mapping[str, Fingerprint]) -> dict[str, float]:
        begin = time.perf_counter()
        tensors = receive(version, arriving, expected, lambda name: self._loader.base(name, expected))
        received = self._now()
        if tensors:
            self._loader.load(tensors)
            if not self._llm.reset_prefix_cache():
                raise PublishError(f"publish of version {version}: vLLM still runs requests of an earlier version")
            if self._head is not None:
                self._head.refresh()
            if self._policy is not None:
                self._policy.follow()
        loaded = self._now()
        if self._shard.count > 1:
            self._parts |= shard_prints(tensors.items(), self._shard)
            expected = self._parts
        self.held.check(version, expected)
        if self._head is not None and not self._head.fresh():
            raise PublishError(f"publish of version {version}: vLLM's output layer does not multiply with its weight")
        return {"receive": received - begin, "load": loaded - received, "check": self._now() - loaded}

    def _parts_in_checkpoint(self) -> dict[str, Fingerprint]:
        """Fingerprints of what this process must hold of the snapshot that vLLM started from, by published name.

        Raises PublishError where the checkpoint is not the snapshot.
        """
        if self._shard.count == 1:
            return dict(self._expected)
        checkpoint, device = self.settings.checkpoint, self._worker.device
        whole = {name: print_ for name, print_ in self._expected.items() if not name.endswith(METADATA)}
        verify(0, whole, fingerprints(stored(checkpoint, set(whole), device)), "the checkpoint")
        return dict(self._expected) | shard_prints(stored(checkpoint, set(whole), device), self._shard)

    def _now(self) -> float:
        """Seconds, when all work given to the GPU is done."""
        if self.settings.cuda is not None:
            torch.cuda.synchronize()
        return time.perf_counter()

    def score(self, sequences: Sequence[list[int]]) -> list[list[float]]:
        """Natural-log probabilities of every token but the first of each sequence, at temperature 1."""
        from vllm import SamplingParams

        self._shape(Truncation())
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        outputs = self._run([(tokens, params) for tokens in sequences])
        return [
            [entry[token].logprob for entry, token in zip(outputs[i].prompt_logprobs[1:], tokens[1:], strict=True)]
            for i, tokens in enumerate(sequences)
        ]

    # --- generation --------------------------------------------------------------------------------------------

    def generate(self, requests: Sequence[Request], drawing: Drawing, progress: Progress) -> list[Response]:
        """A response to each request. progress: called after every step with the responses finished and their tokens;
        what it raises ends the call, and vLLM forgets the requests."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        # Where the policy shapes distributions vLLM need only know whether it draws: it takes 0.01 to 2 alone.
        temperature = drawing.temperature if self._policy is None else float(drawing.temperature > 0)
        common = {
            "max_tokens": drawing.max_tokens,
            "temperature": temperature,
            "top_p": drawing.top_p,
            "top_k": drawing.top_k,
            "min_p": drawing.min_p,
            "stop": list(drawing.stop),
            "stop_token_ids": list(drawing.stop_token_ids),
            "logprobs": 0,
            "flat_logprobs": True,
            "detokenize": bool(drawing.stop),
            "ignore_eos": True,  # what ends a response is in stop_token_ids
            "output_kind": RequestOutputKind.FINAL_ONLY,
        }
        self._shape(Truncation(drawing.temperature, drawing.top_k, drawing.top_p, drawing.min_p))
        asked = [(r.token_ids, SamplingParams(seed=r.seed, **common)) for r in requests]
        if not drawing.routing:
            outputs = self._run(asked, progress)
            return [_response(outputs[i].outputs[0]) for i in range(len(requests))]
        self._llm.reset_prefix_cache()  # what is found in it from now on, this call has computed
        recording = Recording(*self._experts)
        with recorded(self._worker.model_runner, recording):
            outputs = self._run(asked, progress)
        drawn = [outputs[i].outputs[0] for i in range(len(requests))]
        told = recording.of([[*r.token_ids, *d.token_ids] for r, d in zip(requests, drawn, strict=True)])
        return [_response(d, routing.numpy().tobytes()) for d, routing in zip(drawn, told, strict=True)]

    @cached_property
    def _experts(self) -> tuple[Experts, int]:
        """Where the experts of each forward's rows are, and how many experts a layer has."""
        count = next(module.moe_config.num_experts for module in self._model.modules() if hasattr(module, "moe_config"))
        buffer = None if self._policy is None else self._policy.routing
        return Taps(self._model) if buffer is None else buffer, count

    def trace(self, requests: Sequence[Request], drawing: Drawing, tracer: Tracer) -> list[Response]:
        """`generate`, with every operation of its forwards told to the tracer; where numerics are exact."""
        from qarl.rollout.vllm.exact.tracing import traced

        assert self._policy is not None, "only the policy's own forward is traced"
        self._llm.reset_prefix_cache()  # or the prompts' forwards would not run again
        with traced(self._worker.model_runner, self._policy, tracer):
            return self.generate(requests, drawing, lambda finished, tokens: None)

    def _shape(self, truncation: Truncation) -> None:
        """How distributions are shaped from now on, where that is not vLLM's own task."""
        if self._policy is not None:
            self._policy.truncation = truncation

    def _run(self, requests: Iterable[tuple[list[int], Any]], progress: Progress | None = None) -> dict[int, Any]:
        """Final outputs by index."""
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
                if progress is not None:
                    progress(len(outputs), tokens)
        except BaseException:
            engine.abort_request([name for name in added if int(name) not in outputs])
            raise
        return outputs

    # --- memory ------------------------------------------------------------------------------------------------

    def sleep(self, level: int) -> int | None:
        """Give the KV cache back, and the weights: parked in host memory (level 1) or dropped (level 2).

        Returns the bytes of the GPU that this freed; None where `settings.sleep` keeps everything.
        """
        if not self.settings.sleep:
            return None
        self._loader.sleep()
        freed = Freed()
        with beside_others(self._worker):
            self._llm.sleep(level=level)
        return freed.nbytes()

    def wake(self) -> None:
        """Take the memory again. After a sleep of level 2 the weights hold nothing until the next, full publish."""
        self._llm.wake_up()
        self._loader.wake()

    def close(self) -> None:
        """Let go of the engine and its memory."""
        self._llm.llm_engine.engine_core.shutdown()
        del self._llm, self._worker, self.held, self._loader, self._head
        self._policy = None
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _itself(worker: Any) -> Any:
    return getattr(worker, "worker", worker)


def _response(output: Any, routing: bytes = b"") -> Response:
    # The drawn token comes first of each position's.
    logprobs = [output.logprobs.logprobs[start] for start in output.logprobs.start_indices]
    reason = "stop" if output.finish_reason == "stop" else "length"
    return Response(list(output.token_ids), logprobs, reason, output.stop_reason, routing)
