"""The vLLM engine: draws responses from vLLM, to which each policy version is published and proved to have arrived.

The first publish exports the policy and starts vLLM on it; later ones send the tensors of the snapshot themselves. A
vLLM that dies, hangs or fails is started anew at the current version, a configured number of times. The learner's
process never imports vLLM, unless `rollout.vllm.process` is inline.
"""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from qarl.config import Config
from qarl.errors import UserError
from qarl.exporting.snapshot_checkpoint import write_snapshot_checkpoint
from qarl.policy.policy import Policy
from qarl.publish.delta import Shipment, flatten, plan_shipment, unflatten
from qarl.publish.snapshot import Snapshot
from qarl.publish.verify import Fingerprint, PublishError
from qarl.rollout.engine import Progress, SamplingParams, ignore_progress, longest_of, require_finite, require_version
from qarl.rollout.stopping import Stopping
from qarl.rollout.vllm.canary import Bound, Difference, difference
from qarl.rollout.vllm.carriers import Carrier
from qarl.rollout.vllm.inline import InlineSampler
from qarl.rollout.vllm.launch import drawing_of, sampler_settings
from qarl.rollout.vllm.process import SamplerFault, SamplerProcess
from qarl.rollout.vllm.settings import Publication, Request, request_seed
from qarl.rollout.vllm.transport import make_carrier
from qarl.types import Prompt, Rollout

MEMORY_HINT = " (rollout.vllm.memory_frac, rollout.kv_cache_tokens and model.max_length decide what it takes)"


class SamplerError(UserError):
    """vLLM cannot go on, however often it is started."""


@dataclass
class _Held:
    """What the running vLLM holds: the snapshot whose fingerprints it proved. tensors: for delta publishing only."""

    version: int
    prints: Mapping[str, Fingerprint]
    tensors: dict[str, torch.Tensor] | None


class VLLMEngine:
    """A vLLM, started at the first publish. See `RolloutEngine` for the contract.

    policy: computes the canary and gives the configuration to export. canary: token sequences of two tokens or more.
    place: directory for the log (`sampler.log`) and, while vLLM loads it, the exported policy. say: gets one line about
    what the user should know. restarts: used up so far.
    """

    def __init__(
        self,
        config: Config,
        policy: Policy,
        tokenizer: PreTrainedTokenizerBase,
        canary: list[list[int]],
        place: Path,
        say: Callable[[str], None],
    ) -> None:
        self.config, self.policy, self.tokenizer, self.place = config, policy, tokenizer, place
        self.canary, self.say = canary, say
        self.log = place / "sampler.log"
        self.version: int | None = None
        self.restarts = 0
        self.metrics: dict[str, float] = {}
        self._snapshot: Snapshot | None = None
        self._sampler: SamplerProcess | InlineSampler | None = None
        self._carrier: Carrier | None = None
        self._held: _Held | None = None
        self._bound: Bound | None = None
        self._asleep = False
        self._fault: SamplerFault | None = None

    # --- the contract ------------------------------------------------------------------------------------------

    def publish(self, snapshot: Snapshot) -> None:
        self.version, self._snapshot = None, snapshot  # until proven, nothing is held
        self.policy.install_sampler(snapshot)
        self._again_after_faults(lambda: self._publish(snapshot))
        self.version = snapshot.version

    def generate(
        self, prompts: Sequence[Prompt], sampling: SamplingParams, version: int, progress: Progress = ignore_progress
    ) -> list[Rollout]:
        require_version(self.version, version)
        if not prompts:
            return []
        longest_of(prompts, sampling, self.policy.max_length)  # raises where one does not fit
        order: list[tuple[Prompt, int]] = []
        occurrences: Counter[int] = Counter()
        for prompt in prompts:
            first = occurrences[prompt.id] * sampling.n
            occurrences[prompt.id] += 1
            order += [(prompt, sample) for sample in range(first, first + sampling.n)]
        requests = [Request(p.token_ids, request_seed(sampling.seed, p.id, sample)) for p, sample in order]
        drawing = drawing_of(sampling)

        def draw() -> Any:
            if self._sampler is None or self._asleep or self._held is None:
                assert self._snapshot is not None
                self._publish(self._snapshot)  # a new process, or one whose weights slept away
            assert self._sampler is not None
            return self._sampler.call("generate", (requests, drawing), progress)

        responses = self._again_after_faults(draw)
        stopping = Stopping(self.tokenizer, sampling)
        rollouts = []
        for (prompt, sample), response in zip(order, responses, strict=True):
            require_finite(response.logprobs, prompt, version)
            text = stopping.final_text(response.token_ids, response.stopped_by)
            rollouts.append(
                Rollout(
                    prompt.id,
                    sample,
                    response.token_ids,
                    response.logprobs,
                    response.finish_reason,
                    version,
                    sampling.seed,
                    text,
                )
            )
        return rollouts

    def sleep(self) -> None:
        level = self.config.rollout.vllm.sleep_level
        if self._sampler is None or self._asleep:
            return
        try:
            freed = self._sampler.call("sleep", level, ignore_progress)
        except SamplerFault as fault:
            self._stop()
            self._fault = fault  # for the next publish, where a step is done
            return
        if freed is None:
            return
        self._asleep = True
        self.metrics["memory/sampler_freed_gib"] = freed / 2**30
        if level == 2:
            self._held = None  # nothing, until it is published whole

    def wake(self) -> None:
        """Nothing yet: a sampler wakes at the next publish or generate."""

    def _wake(self) -> None:
        assert self._sampler is not None
        if self._asleep:
            torch.cuda.empty_cache()  # the learner's spare memory is what the sampler gave it
            begin = time.perf_counter()
            self._sampler.call("wake", None, ignore_progress)
            self.metrics["time/sampler_wake_s"] = time.perf_counter() - begin
            self._asleep = False

    def close(self) -> None:
        self._stop()
        self.version = self._snapshot = None

    # --- publishing --------------------------------------------------------------------------------------------

    def _publish(self, snapshot: Snapshot) -> None:
        if self._fault is not None:
            fault, self._fault = self._fault, None
            raise fault
        if self._sampler is None:
            self._start(snapshot)
            return
        self._wake()
        mode = self.config.rollout.vllm.publish
        try:
            self._send(snapshot, mode)
        except PublishError as error:
            if mode == "full":
                raise
            self.say(f"{error}; sending everything")
            self._held = None
            self._send(snapshot, "full")

    def _send(self, snapshot: Snapshot, mode: str) -> None:
        assert self._sampler is not None and self._bound is not None
        prints = snapshot.fingerprints()
        held, self._held = self._held, None
        shipment = plan_shipment(
            snapshot.tensors, prints, held and held.prints, held and held.tensors, self._sampler.facts["units"], mode
        )
        found = self._ship(shipment, snapshot.version, prints)
        self._bound.check(snapshot.version, found)
        self._measure(found, shipment)
        self._held = _Held(snapshot.version, prints, dict(snapshot.tensors) if mode == "delta" else None)

    def _ship(self, shipment: Shipment, version: int, prints: Mapping[str, Fingerprint]) -> Difference:
        """Send, and score the canary on both sides: the policy's side while the sampler loads."""
        assert self._sampler is not None
        tensors = flatten(shipment)
        carrier = self._carrier
        # In one process what is published is handed over as it is.
        cargo = list(unflatten(tensors.items())) if carrier is None else carrier.pack(tensors)
        try:
            self._sampler.begin("publish", Publication(version, cargo, prints, self.canary))
            expected = self.policy.score(self.canary).tolist()
            seconds, scored = self._sampler.finish(ignore_progress)
            self.metrics |= {f"time/publish_{part}_s": value for part, value in seconds.items()}
            return difference(_joined(scored), expected)
        except SamplerFault:
            carrier = None  # closed with the sampler, it takes back what that one never released
            raise
        finally:
            if carrier is not None:
                carrier.release()

    def _measure(self, found: Difference, shipment: Shipment | None) -> None:
        self.metrics |= {"publish/canary_abs_mean": found.mean, "publish/canary_abs_max": found.max}
        if shipment is not None:
            self.metrics["publish/sent_mib"] = shipment.nbytes / 2**20
            self.metrics["publish/sent_frac"] = shipment.nbytes / shipment.full_nbytes
        if self._sampler is not None:
            self.metrics["publish/proved_frac"] = self._sampler.facts["proved_frac"]

    # --- the process -------------------------------------------------------------------------------------------

    def _start(self, snapshot: Snapshot) -> None:
        """Export the snapshot, start vLLM on it, and take the bound of later publishes from how it computes then."""
        vllm = self.config.rollout.vllm
        folder = self.place / "sampler"
        shutil.rmtree(folder, ignore_errors=True)  # of a start that was cut off
        prints = snapshot.fingerprints()
        torch.cuda.empty_cache()
        try:
            model = self.policy.model
            write_snapshot_checkpoint(
                folder,
                snapshot,
                model.config,
                model.generation_config,
                self.tokenizer,
                self.policy.scheme,
                self.config.quant.ignore,
                self.policy.dtype,
            )
            settings = sampler_settings(self.config, self.policy, folder)
            if vllm.process == "inline":
                self._sampler = InlineSampler(settings, prints, self.log)
            else:
                self._carrier, plan = make_carrier(self.policy.device, vllm.device)
                self._sampler = SamplerProcess(settings, prints, plan, self.log, vllm.timeout_s)
            self._sampler.start(ignore_progress)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        scored = _joined(self._sampler.call("score", self.canary, ignore_progress))
        found = difference(scored, self.policy.score(self.canary).tolist())
        bound = Bound.of(found)
        if self._bound is None:
            self._bound = bound
            for note in self._sampler.facts["notes"]:
                self.say(note)
        else:
            self._bound.check(snapshot.version, found)
        self._measure(found, None)
        self._held = _Held(snapshot.version, prints, dict(snapshot.tensors) if vllm.publish == "delta" else None)

    def _again_after_faults(self, action: Callable[[], Any]) -> Any:
        """Do it, and after a fault of vLLM again with a new one, as often as the configuration allows."""
        while True:
            try:
                return action()
            except SamplerFault as fault:
                self._note(fault)
            except BaseException:
                if self._held is None:
                    self._stop()  # in the middle of a load: what it holds now is unknown
                raise

    def _note(self, fault: SamplerFault) -> None:
        """End the sampler that failed; the next publish or generate starts another, up to the limit (SamplerError)."""
        started = self._held is not None or self._bound is not None
        self._stop()
        limit = self.config.rollout.vllm.max_restarts
        if not started:
            hint = MEMORY_HINT if "memory" in str(fault).lower() or "KV cache" in str(fault) else ""
            raise SamplerError(f"rollout.vllm: vLLM did not start: {fault}{hint}; see {self.log}") from fault
        if self.restarts == limit:
            raise SamplerError(
                f"rollout.vllm: vLLM failed: {fault}; restarted {limit} times already "
                f"(rollout.vllm.max_restarts), see {self.log}"
            ) from fault
        self.restarts += 1
        self.say(f"vLLM failed: {fault}; restart {self.restarts} of {limit}, see {self.log}")

    def _stop(self) -> None:
        if self._sampler is not None:
            self._sampler.close()
        if self._carrier is not None:
            self._carrier.close()
        self._sampler = self._carrier = self._held = None
        self._asleep = False


def _joined(scores: list[list[float]]) -> list[float]:
    return [logprob for sequence in scores for logprob in sequence]
