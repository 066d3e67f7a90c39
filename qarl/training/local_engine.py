"""Engines of runs that do not sample what they learn from: given responses here, recorded ones in `replay`."""

from __future__ import annotations

from collections.abc import Callable

from transformers import PreTrainedTokenizerBase

from qarl.config import Config
from qarl.data import PromptStream
from qarl.policy.policy import Policy
from qarl.rewards import RewardResult
from qarl.rollout.native.engine import NativeEngine
from qarl.types import FinishReason, Prompt, Rollout

Taken = tuple[list[Prompt], list[Rollout], RewardResult]


class LocalEngine(NativeEngine):
    """Gives each step its responses. Evaluations sample with the native engine that it is."""

    def __init__(self, config: Config, policy: Policy, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(policy.sampler, tokenizer, config.rollout)
        self.policy = policy

    def take(self, count: int, step: int, tick: Callable[[], None]) -> Taken:
        """Return the prompts, responses and scores of a step, counted from 0; see `AsyncEngine.take`."""
        raise NotImplementedError

    def fill(self, step: int) -> None:
        """Do nothing: the responses are there."""

    def finish(self) -> None:
        """Do nothing: each step reads its own responses."""


class GivenResponses(LocalEngine):
    """Gives the responses of the data (`rollout.engine: data`), which have no score."""

    def __init__(
        self, config: Config, policy: Policy, tokenizer: PreTrainedTokenizerBase, stream: PromptStream
    ) -> None:
        super().__init__(config, policy, tokenizer)
        self.stream = stream

    def take(self, count: int, step: int, tick: Callable[[], None]) -> Taken:
        prompts = self.stream.next(count)
        tick()
        return prompts, [self._rollout(prompt) for prompt in prompts], RewardResult([0.0] * count, {}, {}, [])

    def _rollout(self, prompt: Prompt) -> Rollout:
        """The given response in the form of a sampled one. No sampler reported log-probs."""
        given = prompt.response
        assert given is not None, "a row without a response"
        tokens, version = given.token_ids, self.policy.version
        reason: FinishReason = "stop" if given.complete else "length"
        return Rollout(prompt.id, 0, tokens, [0.0] * len(tokens), reason, version, 0, "", written=given.written)
