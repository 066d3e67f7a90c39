"""vLLM as the sampler of asynchronous rollouts, with the interface of `asynchronous.host.Host`.

vLLM runs requests; this module knows which response each of them is, and which policy version sampled each token. When
new weights arrive, vLLM finishes the batches that it has started, so the tokens that it reports until then are of the
earlier version and all later ones of the new version.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from qarl.config import Config
from qarl.config.yaml_io import parse_yaml
from qarl.policy.load import load_tokenizer
from qarl.rollout.asynchronous.process import AsyncSettings, Group, Partial
from qarl.rollout.engine import require_finite, round_seed
from qarl.rollout.stopping import Stopping
from qarl.rollout.vllm.host import Host
from qarl.rollout.vllm.settings import Request, Response, request_seed
from qarl.types import Prompt
from qarl.weight_sync.update import WeightUpdate


@dataclass
class InProgress:
    """A response that vLLM is sampling.

    Attributes:
        group: Number of its group.
        before: Tokens that an earlier process sampled; for vLLM they belong to the prompt.
        versions: Policy versions of vLLM's own tokens, up to the last publish.
    """

    group: int
    prompt: Prompt
    sample: int
    before: Partial
    versions: list[int] = field(default_factory=list)

    def extended(self, tokens: list[int], logprobs: list[float], version: int) -> Partial:
        """Return the whole response. tokens, logprobs: vLLM's own; those after the last publish have `version`."""
        versions = self.versions + [version] * (len(tokens) - len(self.versions))
        return self.before[0] + tokens, self.before[1] + logprobs, self.before[2] + versions


class VLLMHost:
    """See `asynchronous.host.Host`. host: A started vLLM."""

    def __init__(self, host: Host, settings: AsyncSettings) -> None:
        config = Config.model_validate(parse_yaml(settings.config, "configuration"))
        assert config.rollout.asynchronous is not None, "the run samples asynchronously"
        self.in_flight, self.busy_s = config.rollout.asynchronous.in_flight, 0.0
        self._host, self._sampling = host, settings.sampling
        self._stopping = Stopping(load_tokenizer(config.model), settings.sampling)
        self._version: int | None = None
        self._responses: dict[str, InProgress] = {}  # by vLLM's name of the request

    @property
    def busy(self) -> bool:
        """Whether a response is in progress."""
        return bool(self._responses)

    # --- orders ------------------------------------------------------------------------------------------------

    def receive(self, update: WeightUpdate, arriving: Any, meanwhile: Callable[[], None]) -> Any:
        """Return the tensors as they arrive: `publish` verifies them together with the other processes of vLLM."""
        return arriving

    def publish(self, update: WeightUpdate, received: Any) -> dict[str, float]:
        """See `asynchronous.host.Host.publish`. `receive` is a part of it."""
        for name, count, _ in self._host.partial_outputs():
            versions = self._responses[name].versions
            versions += [self._version] * (count - len(versions))
        seconds = self._host.publish(update.version, received, update.expected, self.in_flight)
        self._version = update.version
        return seconds

    def score(self, canary: Sequence[list[int]], meanwhile: Callable[[], None]) -> list[list[float]]:
        """Return the log-probs of each token sequence. The responses in progress continue, without `meanwhile`."""
        begin = time.perf_counter()
        scores = self._host.score(canary)
        if self.busy:
            self.busy_s += time.perf_counter() - begin
        return scores

    def add(self, groups: list[Group]) -> None:
        """Queue the missing responses of groups; those with tokens already continue."""
        assert self._version is not None, "weights come first"
        for group in groups:
            prompt = Prompt(group.prompt_id, group.token_ids, "")
            for sample in group.samples:
                before = group.partial.get(sample, ([], [], []))
                done = len(before[0])
                # A continued response has random numbers of its own: vLLM cannot begin in the middle of a stream.
                seed = request_seed(round_seed(group.seed, done), group.prompt_id, sample)
                left = replace(self._sampling, max_response_length=self._sampling.max_response_length - done)
                name = f"{group.number}/{sample}"
                self._responses[name] = InProgress(group.number, prompt, sample, before)
                self._host.add(name, Request(group.token_ids + before[0], seed), left)

    def cancel(self, groups: list[int]) -> None:
        """See `asynchronous.host.Host.cancel`."""
        names = [name for name, response in self._responses.items() if response.group in groups]
        self._host.cancel(names)
        for name in names:
            del self._responses[name]

    def partials(self) -> list[tuple[int, int, list[int], list[float], list[int]]]:
        """Return (group, sample, tokens, log-probs, versions) of unfinished responses with tokens; after `settle`."""
        assert self._version is not None
        found = []
        for name, count, own in self._host.partial_outputs():
            response = self._responses[name]
            if count or response.before[0]:
                found.append((response.group, response.sample, *response.extended(*own(), self._version)))
        return found

    # --- generation --------------------------------------------------------------------------------------------

    def step(self) -> list[tuple[Any, ...]]:
        """Run a step of vLLM. Returns the responses that ended, as `finished` sends them."""
        begin = time.perf_counter()
        ended = self._host.step()
        self.busy_s += time.perf_counter() - begin
        return self._finished(ended)

    def settle(self) -> list[tuple[Any, ...]]:
        """Finish the batches that vLLM has started, before weights change. Returns as `step`."""
        return self._finished(self._host.drain())

    def _finished(self, ended: Iterable[tuple[str, Response]]) -> list[tuple[Any, ...]]:
        assert self._version is not None or not ended
        return [self._answer(self._responses.pop(name), response) for name, response in ended]

    def _answer(self, response: InProgress, end: Response) -> tuple[Any, ...]:
        require_finite(end.logprobs, response.prompt, self._version)
        tokens, logprobs, versions = response.extended(end.token_ids, end.logprobs, self._version)
        reason, stopped_by = end.finish_reason, end.stopped_by
        before = len(response.before[0])
        if before and (length := self._stopping.stopped_at(tokens, before)) is not None:
            tokens, logprobs, versions = tokens[:length], logprobs[:length], versions[:length]
            reason, stopped_by = "stop", ""
        text = self._stopping.final_text(tokens, stopped_by)
        return response.group, response.sample, tokens, logprobs, reason, text, versions, None
