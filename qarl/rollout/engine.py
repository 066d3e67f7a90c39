"""The base class of rollout engines, and checks and seeds that all engines share."""

from __future__ import annotations

import hashlib
import math
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from qarl_kernels.logprob import Truncation

from qarl.config import Config
from qarl.errors import UserError
from qarl.types import Prompt, Rollout
from qarl.weight_sync.fingerprints import PublishError
from qarl.weight_sync.snapshot import Snapshot


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of all prompts of one `generate`."""

    n: int  # responses per prompt
    seed: int  # a token depends only on (seed, prompt id, sample, position) and the distribution
    max_response_length: int  # tokens, including the stop token
    truncation: Truncation = field(default_factory=Truncation)
    stop: tuple[str, ...] = ()  # strings that end a response; its text ends before the first one
    stop_token_ids: frozenset[int] = frozenset()  # tokens that end a response and belong to it
    # Record `Rollout.routing` of a mixture of experts. Per token it takes layers * experts per token bytes, or twice as
    # many if a layer has more than 255 experts.
    record_routing: bool = False


def truncation_of(config: Config) -> Truncation:
    """Return the sampling distribution of a run."""
    rollout = config.rollout
    return Truncation(rollout.temperature, rollout.top_k, rollout.top_p, config.min_p)


Progress = Callable[[int, int], None]  # (finished responses, tokens generated so far)


def ignore_progress(finished: int, tokens: int) -> None:
    """Do nothing."""


class Generates(Protocol):
    """Generates responses: an engine, or the engines of several ranks together."""

    def generate(
        self, prompts: Sequence[Prompt], sampling: SamplingParams, version: int, progress: Progress = ignore_progress
    ) -> list[Rollout]:
        """See `RolloutEngine.generate`."""
        ...


Samples = tuple[Prompt, range]  # a prompt and the sample numbers of its responses


class RolloutEngine(Generates):
    """Samples responses from the policy version that was published last.

    Attributes:
        version: Policy version of its weights; None before the first publish.
        metrics: Metrics of the last publish and sleep, by name.
    """

    version: int | None = None
    metrics: dict[str, float]

    @abstractmethod
    def publish(self, snapshot: Snapshot) -> None:
        """Install the snapshot's tensors and verify them. Raises PublishError if they differ."""

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        version: int,
        progress: Progress = ignore_progress,
        first: Sequence[int] | None = None,
    ) -> list[Rollout]:
        """Generate n responses per prompt, in the order (prompt, sample).

        Args:
            prompts: Prompts to respond to.
            sampling: Sampling parameters.
            version: Policy version that the engine must have.
            progress: Called after every step. If it raises, the call ends and the engine stays usable.
            first: Number of each prompt's first sample. Default: `first_samples(prompts, sampling.n)`.

        Raises:
            PublishError: The engine does not have `version`.
            UserError: A prompt does not fit the context or the KV cache.
        """
        require_version(self.version, version)
        if not prompts:
            return []
        starts = zip(prompts, first or first_samples(prompts, sampling.n), strict=True)
        samples = [(prompt, range(start, start + sampling.n)) for prompt, start in starts]
        return self.sample(samples, sampling, version, progress)

    @abstractmethod
    def sample(
        self, samples: Sequence[Samples], sampling: SamplingParams, version: int, progress: Progress
    ) -> list[Rollout]:
        """Generate one response per sample of one or more prompts. `generate` has checked the version."""

    def sleep(self) -> None:
        """Free the memory that only generation needs. Does nothing by default."""

    def wake(self) -> None:
        """Start to allocate the memory that `sleep` freed, if it fits beside the learner's next update.

        Otherwise the next publish allocates it. May be called repeatedly. A collective if a sampler spans the GPUs of
        several ranks. Does nothing by default.
        """

    @abstractmethod
    def close(self) -> None:
        """Free all memory and end all processes. The engine cannot be used afterwards."""


def first_samples(prompts: Sequence[Prompt], n: int) -> list[int]:
    """Return the number of each prompt's first sample.

    If a prompt id occurs again, its samples continue at n, 2n, ..., so that each occurrence has its own random stream.
    """
    occurrences: Counter[int] = Counter()
    first = []
    for prompt in prompts:
        first.append(occurrences[prompt.id] * n)
        occurrences[prompt.id] += 1
    return first


def round_seed(seed: int, number: int) -> int:
    """Return the seed of sampling round `number` of a step, in [0, 2^63). Round 0 has the step's seed."""
    return seed if number == 0 else _hashed_seed(f"{seed}/round {number}")


def request_seed(seed: int, prompt_id: int, sample: int) -> int:
    """Return the seed of a response's random numbers in vLLM, in [0, 2^63)."""
    return _hashed_seed(f"{seed}/{prompt_id}/{sample}")


def _hashed_seed(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) >> 1


def require_version(held: int | None, wanted: int) -> None:
    """Raise PublishError if an engine does not have the requested version."""
    if held != wanted:
        state = "nothing was published to it" if held is None else f"it holds version {held}"
        raise PublishError(f"rollout: the policy is at version {wanted} but the sampler is stale ({state})")


def longest_of(prompts: Sequence[Prompt], sampling: SamplingParams, context: int) -> int:
    """Return the number of tokens of the longest prompt plus `max_response_length`.

    Raises:
        UserError: The sum exceeds `context` tokens, or a prompt has no tokens.
    """
    for prompt in prompts:
        if not prompt.token_ids:
            raise UserError(f"rollout: prompt {prompt.id} has no tokens; give it text, or drop the row")
    longest = max(len(p.token_ids) for p in prompts) + sampling.max_response_length
    if longest > context:
        raise UserError(
            f"rollout.max_response_length: prompt and response may reach {longest} tokens, but the model's "
            f"context is {context}; lower it or data.max_prompt_length"
        )
    return longest


def require_finite(logprobs: Sequence[float], prompt: Prompt, version: int | None) -> None:
    """Raise UserError if a log-prob of a response is NaN or infinite."""
    if not all(map(math.isfinite, logprobs)):
        raise UserError(
            f"rollout: the log-probs of prompt {prompt.id} are not finite at policy version {version}; "
            "lower optim.lr, or use model.dtype float32"
        )
