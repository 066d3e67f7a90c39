"""Samplers of several ranks: split of the prompts, exchange of the responses, GPU memory shared with the learners.

There may be fewer samplers than ranks; the other ranks have a `NoSampler`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from qarl.config.rollout import RolloutConfig
from qarl.distributed.ranks import Ranks
from qarl.distributed.together import together
from qarl.policy.sampler import Sampler
from qarl.rollout.engine import Progress, RolloutEngine, Samples, SamplingParams, first_samples, ignore_progress
from qarl.types import Prompt, Rollout
from qarl.weight_sync.snapshot import Snapshot

Headroom = Callable[[int | None], bool]
"""Returns whether every GPU of a sampler has this many free bytes.

A caller that has no sampler to wake passes None and gets False; it only takes part in the collective.
"""


def generate_share(
    engine: RolloutEngine,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    version: int,
    progress: Progress,
    ranks: Ranks,
    samplers: range,
) -> list[Rollout]:
    """Generate responses to this rank's share of all ranks' prompts (`Ranks.share`).

    The responses do not depend on the number of ranks.

    Args:
        engine: This rank's engine.
        prompts: Prompts of all ranks.
        sampling: Sampling parameters.
        version: Policy version.
        progress: See `RolloutEngine.generate`.
        ranks: The ranks of the run.
        samplers: Ranks that have a sampler.
    """
    if ranks.count == 1:
        return engine.generate(prompts, sampling, version, progress)
    own, first = ranks.share(len(prompts), samplers), first_samples(prompts, sampling.n)
    return engine.generate([prompts[i] for i in own], sampling, version, progress, [first[i] for i in own])


class NoSampler(RolloutEngine):
    """The engine of a rank without a sampler.

    Installs published snapshots into the policy's own sampling forward, so that no older version stays in memory, and
    takes part in the `headroom` collective of samplers that wake on its GPU.
    """

    def __init__(self, sampler: Sampler, headroom: Headroom | None = None) -> None:
        self._sampler, self._headroom = sampler, headroom
        self.metrics = {}

    def publish(self, snapshot: Snapshot) -> None:
        self._sampler.install(snapshot)
        self.version = snapshot.version

    def sample(
        self, samples: Sequence[Samples], sampling: SamplingParams, version: int, progress: Progress
    ) -> list[Rollout]:
        raise AssertionError("a rank without a sampler has no prompts")

    def wake(self) -> None:
        if self._headroom is not None:
            self._headroom(None)

    def close(self) -> None:
        self.version = None


class SharedEngine:
    """Combines the engines of all ranks: every rank gets all responses. `generate` is a collective."""

    def __init__(
        self,
        engine: RolloutEngine,
        ranks: Ranks,
        check: Callable[[], None],  # called by all ranks after each `generate`
        samplers: range,  # see `generate_share`
        longer_s: float,  # seconds that one rank may take longer than another, see `together`
    ) -> None:
        self._engine, self._ranks, self._check = engine, ranks, check
        self._samplers, self._longer_s = samplers, longer_s

    def generate(
        self, prompts: Sequence[Prompt], sampling: SamplingParams, version: int, progress: Progress = ignore_progress
    ) -> list[Rollout]:
        """See `RolloutEngine.generate`. prompts: Prompts of all ranks. Returns the responses to all of them."""

        def own() -> list[Rollout]:
            return generate_share(self._engine, prompts, sampling, version, progress, self._ranks, self._samplers)

        rollouts = gather_rollouts(together(self._ranks, own, self._longer_s), self._ranks)
        progress(len(rollouts), sum(len(rollout.token_ids) for rollout in rollouts))
        self._check()
        return rollouts


def publish_together(engine: RolloutEngine, snapshot: Snapshot, ranks: Ranks, rollout: RolloutConfig) -> None:
    """Publish a snapshot to the sampler of each rank; a collective."""
    if rollout.spans:
        together(ranks, torch.cuda.empty_cache)  # another rank's vLLM will start or wake on this GPU
    together(ranks, lambda: engine.publish(snapshot), rollout.restarts_s)


class Learns(Protocol):
    """A learner with a hook that runs before the last update of a step, when its memory use no longer grows."""

    before_last_update: Callable[[], None] | None


@contextmanager
def asleep(engine: RolloutEngine, learner: Learns, ranks: Ranks, rollout: RolloutConfig) -> Iterator[None]:
    """Context manager: each rank's sampler sleeps, so that the learner can use its memory.

    The sampler begins to wake before the learner's last update if both fit in memory, otherwise on exit. Entering is a
    collective if a sampler spans the GPUs of several ranks.
    """
    if rollout.spans:
        together(ranks, engine.sleep)
    else:
        engine.sleep()
    learner.before_last_update = engine.wake
    try:
        yield
    finally:
        learner.before_last_update = None
    engine.wake()


def gather_rollouts(own: list[Rollout], ranks: Ranks) -> list[Rollout]:
    """Gather the rollouts of all ranks, in rank order; a collective."""
    if ranks.count == 1:
        return own
    headers = ranks.gather([_header(rollout) for rollout in own])
    ids = ranks.gather_tensors(torch.tensor([i for r in own for i in r.token_ids], dtype=torch.int64))
    logprobs = ranks.gather_tensors(torch.tensor([x for r in own for x in r.logprobs], dtype=torch.float64))
    experts = _gather_routing(own, headers, ranks)
    found = []
    for rows, tokens, values in zip(headers, ids, logprobs, strict=True):
        lengths = [row["token_ids"] for row in rows]
        for row, i, x in zip(rows, tokens.split(lengths), values.split(lengths), strict=True):
            routing = None if row["routing"] is None else next(experts)
            found.append(Rollout(**{**row, "token_ids": i.tolist(), "logprobs": x.tolist(), "routing": routing}))
    return found


def _header(rollout: Rollout) -> dict[str, Any]:
    """Return the fields of a rollout as JSON, with the length of `token_ids`, and dtype and shape of `routing`."""
    routing = rollout.routing
    shape = None if routing is None else [str(routing.dtype).removeprefix("torch."), list(routing.shape)]
    return {**vars(rollout), "token_ids": len(rollout.token_ids), "logprobs": None, "routing": shape}


def _gather_routing(own: list[Rollout], headers: list[list[dict[str, Any]]], ranks: Ranks) -> Iterator[Tensor]:
    """Gather the recorded experts of all ranks' rollouts, in rank order; a collective if any rollout has them."""
    if not any(row["routing"] for rows in headers for row in rows):
        return iter(())
    mine = [rollout.routing.reshape(-1).view(torch.uint8) for rollout in own if rollout.routing is not None]
    every = ranks.gather_tensors(torch.cat(mine) if mine else torch.empty(0, dtype=torch.uint8))
    found = []
    for rows, data in zip(headers, every, strict=True):
        shapes = [(getattr(torch, row["routing"][0]), row["routing"][1]) for row in rows if row["routing"]]
        sizes = [dtype.itemsize * math.prod(shape) for dtype, shape in shapes]
        for (dtype, shape), part in zip(shapes, data.split(sizes), strict=True):
            found.append(part.clone().view(dtype).view(shape))  # a copy is aligned for its dtype, a slice may not be
    return iter(found)


def own_headroom(device: torch.device) -> Headroom:
    """Return the `Headroom` of a sampler on one learner's GPU."""
    return lambda needed: needed is not None and has_headroom(device, needed)


def ranks_headroom(device: torch.device, ranks: Ranks, size: int) -> Headroom:
    """Return the `Headroom` of samplers that span the GPUs of `size` ranks each; a collective of all ranks.

    The first rank of each sampler passes the bytes that every GPU of the sampler needs.
    """

    def headroom(needed: int | None) -> bool:
        first = ranks.rank - ranks.rank % size
        requested = ranks.gather(needed)[first]
        free = ranks.gather(requested is not None and has_headroom(device, requested))
        return needed is not None and all(free[first : first + size])

    return headroom


def has_headroom(device: torch.device, needed: int) -> bool:
    """Return whether `needed` bytes of a GPU are free. Empties torch's cache if that can free enough."""
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if torch.cuda.mem_get_info(device)[0] + cached < needed:
        return False
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0] >= needed
