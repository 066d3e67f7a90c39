"""Prompts that the sampler got and no step has learned from yet, with their responses and scores."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from qarl.rewards import RewardResult
from qarl.rollout.vllm.settings import Group, Partial
from qarl.types import Prompt, Rollout, mixed_versions


@dataclass(eq=False)
class Wave:
    """Groups started together with `rollout.async.oversample` above 1. Steps take those that complete first.

    Attributes:
        number: Number of its first group.
        needed: Number of groups that will still be learned from. When this many are complete, the others are cancelled.
    """

    number: int
    needed: int


@dataclass
class PendingGroup:
    """A prompt and its responses.

    Attributes:
        number: Number of the group in the run.
        step: Training step that the group was meant for when submitted, from 0; it determines the seed.
        submitted: Training step before which the sampler got the group. Learned from at most `steps_ahead` steps later.
        prompt: The prompt.
        seed: Seed of the random numbers of its responses.
        first: Number of the first sample.
        n: Number of samples.
        rank: Rank whose sampler generates the responses. Other ranks only know the prompt.
        rollouts: Finished responses by sample number.
        partial: Unfinished responses from a checkpoint, by sample number.
        scores: Scores of the responses, in the order of sample numbers; None until they are scored.
        wave: The wave it competes in; None if the group is always learned from.
        cancelled: Whether the sampler dropped it, because enough other groups of its wave were complete earlier.
    """

    number: int
    step: int
    submitted: int
    prompt: Prompt
    seed: int
    first: int
    n: int
    rank: int = 0
    rollouts: dict[int, Rollout] = field(default_factory=dict)
    partial: dict[int, Partial] = field(default_factory=dict)
    scores: RewardResult | None = None
    wave: Wave | None = None
    cancelled: bool = False

    @property
    def samples(self) -> range:
        return range(self.first, self.first + self.n)

    @property
    def complete(self) -> bool:
        return len(self.rollouts) == self.n

    @property
    def ended(self) -> bool:
        """Whether the sampler has nothing left to do for this group."""
        return self.complete or self.cancelled

    @property
    def ordered(self) -> list[Rollout]:
        """The responses of a complete group, in the order of sample numbers."""
        return [self.rollouts[sample] for sample in self.samples]

    @property
    def versions(self) -> set[int]:
        """Policy versions that sampled the tokens known to this process."""
        own = [r.versions or [r.version] for r in self.rollouts.values()]
        return {version for versions in [*own, *(p[2] for p in self.partial.values())] for version in versions}

    def request(self) -> Group:
        """Return the order for the missing responses."""
        missing = [sample for sample in self.samples if sample not in self.rollouts]
        partial = {sample: self.partial[sample] for sample in missing if sample in self.partial}
        return Group(self.number, self.prompt.id, self.prompt.token_ids, self.seed, missing, partial)

    def finish(self, sample: int, *answer: Any) -> None:
        """Store a response that the sampler's process sent. answer: see `NativeHost.step`."""
        tokens, logprobs, reason, text, versions, routing = answer
        experts = None
        if routing is not None:
            dtype, shape, data = routing
            experts = torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype)).view(shape)
        own = tokens, logprobs, reason, versions[-1]
        self.rollouts[sample] = Rollout(
            self.prompt.id, sample, *own, self.seed, text, experts, versions=mixed_versions(versions)
        )
        self.partial.pop(sample, None)


@dataclass(frozen=True)
class Published:
    """A publish in the sampler's sequence of orders. scores: The learner's log-probs of the canary, in nats."""

    version: int
    scores: list[float]


@dataclass(frozen=True)
class Added:
    """Groups in the sampler's sequence of orders."""

    groups: list[PendingGroup]


class OrderLog:
    """The orders that a restarted sampler must get so that every missing response is sampled with the same weights.

    The log begins with the publish before the first incomplete group.
    """

    def __init__(self) -> None:
        self.entries: list[Published | Added] = []

    def append(self, entry: Published | Added) -> None:
        """Add an order, and drop those that no missing response needs."""
        self.entries.append(entry)
        self.prune()

    def prune(self) -> None:
        """Drop the orders that no missing response needs."""
        entries = [e for e in self.entries if not (isinstance(e, Added) and all(g.ended for g in e.groups))]
        while len(entries) > 1 and isinstance(entries[0], Published) and isinstance(entries[1], Published):
            del entries[0]
        self.entries = entries

    def repeat(self, waits: bool) -> list[Published | Added]:
        """Return the orders for a restarted process.

        waits: Whether missing responses are sampled with the weights they were ordered with; otherwise with the newest.
        """
        self.prune()
        newest = [entry for entry in self.entries if isinstance(entry, Published)][-1:]
        return self.entries if waits else [*newest, *(e for e in self.entries if isinstance(e, Added))]

    @property
    def versions(self) -> set[int]:
        """Published versions in the log."""
        return {e.version for e in self.entries if isinstance(e, Published)}

    @property
    def last_version(self) -> int | None:
        """The version published last."""
        return max(self.versions, default=None)
