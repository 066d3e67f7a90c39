"""vLLM as the sampler of asynchronous rollouts, with the interface of `asynchronous.host.NativeHost`.

vLLM runs requests; this module tracks which response each request is, and which policy version sampled each token. When
new weights arrive, vLLM first finishes the batches that it has started. Tokens reported until then are from the earlier
version, all later ones from the new version.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from qarl.config import Config
from qarl.config.yaml_io import parse_yaml
from qarl.policy.load import load_tokenizer
from qarl.rollout.engine import request_seed, require_finite, round_seed
from qarl.rollout.stopping import Stopping
from qarl.rollout.vllm.host import Host
from qarl.rollout.vllm.settings import AsyncSettings, Group, Partial, Request, Response
from qarl.types import Prompt
from qarl.weight_sync.update import WeightUpdate


@dataclass
class InProgress:
    """A response that vLLM is sampling.

    Attributes:
        group: Number of its group.
        prompt: Its prompt.
        sample: Its sample number.
        before: What an earlier process sampled. vLLM gets these tokens as a part of the prompt.
        versions: Policy version of each token that vLLM sampled before the last publish.
    """

    group: int
    prompt: Prompt
    sample: int
    before: Partial
    versions: list[int] = field(default_factory=list)

    def extended(self, tokens: list[int], logprobs: list[float], version: int) -> Partial:
        """Return the whole response. tokens, logprobs: those that vLLM sampled; `version` sampled the newest ones."""
        versions = self.versions + [version] * (len(tokens) - len(self.versions))
        return self.before[0] + tokens, self.before[1] + logprobs, self.before[2] + versions


class VLLMHost:
    """Implements the interface of `NativeHost`. host: a started vLLM."""

    def __init__(self, host: Host, settings: AsyncSettings) -> None:
        config = Config.model_validate(parse_yaml(settings.config, "configuration"))
        assert config.rollout.asynchronous is not None, "the run samples asynchronously"
        self.in_flight, self.busy_s = config.rollout.asynchronous.in_flight, 0.0
        self._host, self._sampling = host, settings.sampling
        self._stopping = Stopping(load_tokenizer(config.model), settings.sampling)
        self._version: int | None = None
        self._responses: dict[str, InProgress] = {}  # by request name, GROUP/SAMPLE

    @property
    def busy(self) -> bool:
        """Whether a response is in progress."""
        return bool(self._responses)

    # --- orders ------------------------------------------------------------------------------------------------

    def receive(self, update: WeightUpdate, arriving: Any, meanwhile: Callable[[], None]) -> Any:
        """Return `arriving` unread: `publish` receives and verifies the tensors."""
        return arriving

    def publish(self, update: WeightUpdate, received: Any) -> dict[str, float]:
        """See `NativeHost.publish`; also receives the tensors."""
        # All tokens sampled so far are from the previous version.
        for name, count, _ in self._host.partial_outputs():
            assert self._version is not None, "the first order is a publish"
            versions = self._responses[name].versions
            versions += [self._version] * (count - len(versions))
        seconds = self._host.publish(update.version, received, update.expected, self.in_flight)
        self._version = update.version
        return seconds

    def score(self, canary: Sequence[list[int]], meanwhile: Callable[[], None]) -> list[list[float]]:
        """Return the log-probs of each token sequence. `meanwhile` is unused: vLLM continues the responses itself."""
        begin = time.perf_counter()
        scores = self._host.score(canary)
        if self.busy:
            self.busy_s += time.perf_counter() - begin
        return scores

    def add(self, groups: list[Group]) -> None:
        """Queue responses; those that already have tokens continue."""
        assert self._version is not None, "the first order is a publish"
        for group in groups:
            prompt = Prompt(group.prompt_id, group.token_ids, "")
            for sample in group.samples:
                before = group.partial.get(sample, ([], [], []))
                done = len(before[0])
                # A continued response gets another seed, because vLLM cannot start in the middle of a random stream.
                seed = request_seed(round_seed(group.seed, done), group.prompt_id, sample)
                left = replace(self._sampling, max_response_length=self._sampling.max_response_length - done)
                name = f"{group.number}/{sample}"
                self._responses[name] = InProgress(group.number, prompt, sample, before)
                self._host.add(name, Request(group.token_ids + before[0], seed), left)

    def cancel(self, groups: list[int]) -> None:
        """See `NativeHost.cancel`."""
        names = [name for name, response in self._responses.items() if response.group in groups]
        self._host.cancel(names)
        for name in names:
            del self._responses[name]

    def partials(self) -> list[tuple[int, int, list[int], list[float], list[int]]]:
        """See `NativeHost.partials`. Call `settle` first."""
        assert self._version is not None
        found = []
        for name, count, own in self._host.partial_outputs():
            response = self._responses[name]
            if count or response.before[0]:
                found.append((response.group, response.sample, *response.extended(*own(), self._version)))
        return found

    # --- generation --------------------------------------------------------------------------------------------

    def step(self) -> list[tuple[Any, ...]]:
        """Run a step of vLLM. Returns as `NativeHost.step`, without routing."""
        begin = time.perf_counter()
        ended = self._host.step()
        self.busy_s += time.perf_counter() - begin
        return self._finished(ended)

    def settle(self) -> list[tuple[Any, ...]]:
        """Finish the batches that vLLM has started, before weights change. Returns as `step`."""
        return self._finished(self._host.drain())

    def _finished(self, ended: Iterable[tuple[str, Response]]) -> list[tuple[Any, ...]]:
        return [self._answer(self._responses.pop(name), response) for name, response in ended]

    def _answer(self, response: InProgress, end: Response) -> tuple[Any, ...]:
        """Return a response as `NativeHost.step` does. A continued one is cut at a stop string that vLLM missed."""
        assert self._version is not None, "the first order is a publish"
        require_finite(end.logprobs, response.prompt, self._version)
        tokens, logprobs, versions = response.extended(end.token_ids, end.logprobs, self._version)
        reason, stopped_by = end.finish_reason, end.stopped_by
        before = len(response.before[0])
        if before and (length := self._stopping.stopped_at(tokens, before)) is not None:
            tokens, logprobs, versions = tokens[:length], logprobs[:length], versions[:length]
            reason, stopped_by = "stop", ""
        text = self._stopping.final_text(tokens, stopped_by)
        return response.group, response.sample, tokens, logprobs, reason, text, versions, None
