"""The protocol of a rollout engine: what the training loop asks of a sampler, whichever one it is."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from qarl_kernels.logprob import Truncation

from qarl.config import Config
from qarl.errors import UserError
from qarl.types import Prompt, Rollout
from qarl.weight_sync.snapshot import Snapshot
from qarl.weight_sync.verify import PublishError


@dataclass(frozen=True)
class SamplingParams:
    """How responses are drawn. The same for every prompt of one `generate`.

    n: responses per prompt. seed: of the random stream; a token's draw depends on (seed, prompt id, sample,
    position) and on nothing else. max_response_length: tokens, the stop token included. stop_token_ids: end a
    response and belong to it. stop: strings that end a response; its text is cut before the first of them.
    record_routing: of a mixture of experts, give each rollout its `routing`; a model without experts has none to give.
    It costs L * k bytes a token on the host (two of more than 255 experts), and their way there.
    """

    n: int
    seed: int
    max_response_length: int
    truncation: Truncation = field(default_factory=Truncation)
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    record_routing: bool = False


def truncation_of(config: Config) -> Truncation:
    """What a run draws from."""
    rollout = config.rollout
    return Truncation(rollout.temperature, rollout.top_k, rollout.top_p, config.min_p)


Progress = Callable[[int, int], None]  # (finished responses, tokens generated so far)


def ignore_progress(finished: int, tokens: int) -> None:
    """For callers who show nothing."""


class Draws(Protocol):
    """Gives responses: an engine, or those of several ranks together."""

    def generate(
        self, prompts: Sequence[Prompt], sampling: SamplingParams, version: int, progress: Progress = ignore_progress
    ) -> list[Rollout]:
        """See `RolloutEngine.generate`."""
        ...


class RolloutEngine(Draws, Protocol):
    """Draws responses from the policy version last published to it.

    version: of the tensors it holds, None before the first publish. metrics: what it measured of its last publish and
    sleep, by metric name.
    """

    version: int | None

    @property
    def metrics(self) -> dict[str, float]: ...

    def publish(self, snapshot: Snapshot) -> None:
        """Take over the snapshot's tensors and prove that they arrived. Raises PublishError."""
        ...

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        version: int,
        progress: Progress = ignore_progress,
        first: Sequence[int] | None = None,
    ) -> list[Rollout]:
        """n responses to each prompt, in the order (prompt, sample).

        first: the number of each prompt's first sample; None: as `first_samples` counts them in these prompts.
        progress: called after every step; what it raises ends the call and leaves the engine usable.
        Raises PublishError if `version` is not held, UserError for what does not fit the context or the KV cache.
        """
        ...

    def sleep(self) -> None:
        """Give memory back that only generation needs."""
        ...

    def wake(self) -> None:
        """Begin to take that memory back, where the learner's next update leaves room for it; otherwise the next
        publish does. It may be called again; a collective where a sampler is on several ranks' GPUs."""
        ...

    def close(self) -> None:
        """Release everything; the engine is not used afterwards."""
        ...


def first_samples(prompts: Sequence[Prompt], n: int) -> list[int]:
    """The number of each prompt's first sample, of n.

    A prompt id that occurs again continues its samples at n, 2n, ..., so that each occurrence has its own random
    stream.
    """
    occurrences: Counter[int] = Counter()
    first = []
    for prompt in prompts:
        first.append(occurrences[prompt.id] * n)
        occurrences[prompt.id] += 1
    return first


def require_version(held: int | None, wanted: int) -> None:
    """Raise PublishError when an engine is asked to draw from a version that it does not hold."""
    if held != wanted:
        state = "nothing was published to it" if held is None else f"it holds version {held}"
        raise PublishError(f"rollout: the policy is at version {wanted} but the sampler is stale ({state})")


def longest_of(prompts: Sequence[Prompt], sampling: SamplingParams, context: int) -> int:
    """Tokens of the longest prompt and a response of full length. Raises UserError where that exceeds `context`, and
    for a prompt without tokens."""
    for prompt in prompts:
        if not prompt.token_ids:
            raise UserError(f"rollout: prompt {prompt.id} has no tokens; give it text, or drop the row")
    longest = max(len(p.token_ids) for p in prompts) + sampling.max_response_length
    if longest > context:
        raise UserError(
            f"rollout.max_response_length: prompt and response reach {longest} tokens, the model's "
            f"context is {context}; lower it or data.max_prompt_length"
        )
    return longest


def require_finite(logprobs: Sequence[float], prompt: Prompt, version: int | None) -> None:
    """Raise UserError where a response's log-probs are NaN or infinite."""
    if not all(map(math.isfinite, logprobs)):
        raise UserError(
            f"rollout: the log-probs of prompt {prompt.id} are not finite at policy version {version}; "
            "lower optim.lr, or use model.dtype float32"
        )
