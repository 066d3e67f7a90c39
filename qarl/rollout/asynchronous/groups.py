"""Prompts that the sampler got and no step has learned from yet: their responses, scores and saved form."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from qarl.errors import UserError
from qarl.rewards import RewardResult
from qarl.rewards.frames import pack
from qarl.rollout.vllm.settings import Group, Partial
from qarl.types import Prompt, Rollout


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
        submitted: Training step before which the sampler got the group. It is learned from within `steps_ahead` steps.
        prompt: The prompt.
        seed: Seed of the random numbers of its responses.
        first: Number of the first sample.
        n: Number of samples.
        rank: Rank whose sampler generates the responses. Other ranks only know the prompt.
        rollouts: Finished responses by sample number.
        partial: Unfinished responses from a checkpoint, by sample number.
        scores: Scores of the responses, in the order of sample numbers; None until they are scored.
        wave: The wave it competes in; None if the group is always learned from.
        cancelled: Whether enough other groups of its wave were complete earlier.
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
        mixed = versions if len(set(versions)) > 1 else None
        last = versions[-1]
        rollout = Rollout(
            self.prompt.id, sample, tokens, logprobs, reason, last, self.seed, text, experts, versions=mixed
        )
        self.rollouts[sample] = rollout
        self.partial.pop(sample, None)


@dataclass(frozen=True)
class Published:
    """A publish in the sampler's sequence of orders. scores: the canary's log-probs, computed by the learner."""

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

        waits: Sample responses with the weights that they were ordered with. Otherwise with the newest weights.
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


# --- checkpoints -----------------------------------------------------------------------------------------------------


def save_groups(groups: Iterable[PendingGroup]) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """Return tensors by name and JSON rows that `load_groups` reads.

    The tensors `tokens` (int64) and `logprobs` (float64) have those of all responses, finished and unfinished,
    concatenated in the order of the JSON.
    """
    tokens: list[int] = []
    logprobs: list[float] = []
    tensors: dict[str, Tensor] = {}
    rows = []
    for group in groups:
        responses: list[dict[str, Any]] = []
        for sample, r in sorted(group.rollouts.items()):
            tokens += r.token_ids
            logprobs += r.logprobs
            versions = r.versions or [r.version] * len(r.token_ids)
            responses.append(
                {"sample": sample, "reason": r.finish_reason, "text": r.text, "versions": run_lengths(versions)}
            )
            if r.routing is not None:
                tensors[f"routing/{group.number}/{sample}"] = r.routing
        for sample, (own, values, versions) in sorted(group.partial.items()):
            tokens += own
            logprobs += values
            responses.append({"sample": sample, "reason": None, "text": "", "versions": run_lengths(versions)})
        row: dict[str, Any] = {
            "number": group.number,
            "step": group.step,
            "submitted": group.submitted,
            "prompt": group.prompt.id,
        }
        row["prompt_sha256"] = prompt_digest(group.prompt)
        if group.wave is not None:
            row["wave"] = [group.wave.number, group.wave.needed]
        if group.rank:
            row["rank"] = group.rank
        rows.append({**row, "seed": group.seed, "first": group.first, "responses": responses})
    tensors["tokens"] = torch.tensor(tokens, dtype=torch.int64)
    tensors["logprobs"] = torch.tensor(logprobs, dtype=torch.float64)
    return tensors, rows


def prompt_digest(prompt: Prompt) -> str:
    """Return the SHA-256 of what a prompt's responses and scores depend on."""
    return hashlib.sha256(json.dumps([prompt.token_ids, prompt.text, pack(prompt.columns)]).encode()).hexdigest()


def load_groups(
    tensors: Mapping[str, Tensor], rows: list[dict[str, Any]], prompt_of: Callable[[int, str | None], Prompt], n: int
) -> list[PendingGroup]:
    """Return the groups that `save_groups` saved. Raises UserError if the tensors do not match the rows."""
    ids, values = tensors["tokens"].tolist(), tensors["logprobs"].tolist()
    groups, waves, at = [], dict[int, Wave](), 0
    for row in rows:
        prompt = prompt_of(row["prompt"], row.get("prompt_sha256"))
        own = row["step"], row["submitted"], prompt, row["seed"], row["first"], n, row.get("rank", 0)
        group = PendingGroup(row["number"], *own)
        if (wave := row.get("wave")) is not None:
            group.wave = waves.setdefault(wave[0], Wave(*wave))
        for response in row["responses"]:
            versions = [version for version, count in response["versions"] for _ in range(count)]
            span = slice(at, at + len(versions))
            at = span.stop
            tokens, logprobs, sample = ids[span], values[span], response["sample"]
            if response["reason"] is None:
                group.partial[sample] = tokens, logprobs, versions
                continue
            group.finish(sample, tokens, logprobs, response["reason"], response["text"], versions, None)
            if (routing := tensors.get(f"routing/{group.number}/{sample}")) is not None:
                object.__setattr__(group.rollouts[sample], "routing", routing)
        groups.append(group)
    if at != len(ids) or at != len(values):
        raise UserError("the saved responses do not have the lengths that their list states")
    return groups


def merged_logs(logs: list[list[list[Any]]]) -> list[list[Any]]:
    """Merge the saved order logs of all ranks, which have different groups and were pruned differently."""
    if len(logs) == 1:
        return logs[0]
    added: dict[int, list[int]] = {}  # group numbers by the version published before them
    for log in logs:
        for operation, what in log:
            if operation == "publish":
                groups = added.setdefault(what, [])
            else:
                groups += what
    merged: list[list[Any]] = []
    for version in sorted(added):
        merged.append(["publish", version])
        if added[version]:
            merged.append(["add", sorted(added[version])])
    return merged


def run_lengths(values: Iterable[int]) -> list[list[int]]:
    """Return [value, count] of each run of equal values."""
    return [[value, sum(1 for _ in run)] for value, run in groupby(values)]
