"""The scored responses of a step, and the subsets of them (minibatches, micro-batches) that forwards run over."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import compress, pairwise
from typing import NamedTuple

import torch
from qarl_kernels.truncation import Replay, Truncation
from torch import Tensor

from qarl.batch.columns import Column, KeptColumn, RoutingColumn
from qarl.batch.micro_batches import Response, assign, micro_batch_ends, work
from qarl.distributed.ranks import Ranks
from qarl.errors import UserError
from qarl.objectives.advantages import compute_advantages
from qarl.objectives.base import AdvantageKind
from qarl.objectives.segments import Segments
from qarl.policy.routes import NO_ROUTES, Routes, numbers_of
from qarl.types import Prompt, Rollout
from qarl.utils.transfer import upload

CPU = torch.device("cpu")


@dataclass
class Batch:
    """Scored responses of one step, in the order of the sampler."""

    version: int  # policy version at the beginning of the step
    device: torch.device  # the learner's device; parts are read there by default
    prompts: list[list[int]]  # token ids of each response's prompt
    responses: list[list[int]]  # token ids
    groups: list[int]  # index in the step of each response's prompt
    advantages: Tensor  # (R,) float32 on the CPU
    logp_sampler: Column  # as the sampler reported (behaviour policy)
    logp_old: Column = field(init=False)  # learner at `version`, from its first forward over each response
    logp: Column = field(init=False)  # learner, from its last training forward
    logp_ref: Column = field(init=False)  # reference policy, if the objective needs it
    written: list[list[bool]] | None = None  # whether the policy wrote each token; None: all
    routing: list[Tensor] | None = None  # `Rollout.routing` of each response, if the sampler recorded it
    replays: bool = False  # forwards use the experts in `routing`
    chosen: RoutingColumn | None = None  # learner's experts at `version`, for model.routing replay_learner
    kept: KeptColumn | None = None  # learner's truncated sets at `version`, for objective.truncation_set replay
    router: Column | None = None  # experts and their log-probs at `version`, for objective.router_shift_floor
    versions: list[list[int] | None] | None = None  # policy version per token; an entry is None if all are `version`
    given: bool = False  # responses are from the data; without a sampler's log-probs, `logp_sampler` is `logp_old`
    router_shift: Column = field(init=False)  # log of the router-shift ratio at the last forward, with `router`

    def __post_init__(self) -> None:
        self.logp_old, self.logp, self.logp_ref, self.router_shift = (Column.empty(len(self)) for _ in range(4))
        if self.given:
            self.logp_sampler = self.logp_old

    def __len__(self) -> int:
        return len(self.responses)

    @property
    def own_tokens(self) -> list[list[int]]:
        """Token ids of each response that the policy wrote, which are those with a log-prob."""
        return own_tokens(self.responses, self.written)

    @cached_property
    def prompt_numbers(self) -> list[int]:
        """Per response, the first group with the same prompt. Responses with equal numbers share a prompt."""
        numbers: dict[tuple[int, ...], int] = {}
        pairs = zip(self.prompts, self.groups, strict=True)
        return [numbers.setdefault(tuple(prompt), group) for prompt, group in pairs]

    def stale(self, index: int) -> bool:
        """Return whether an earlier policy version sampled tokens of a response."""
        return self._versions(index) is not None

    def _versions(self, index: int) -> list[int] | None:
        return None if self.versions is None else self.versions[index]

    def trust_sampler(self, verified: float, seed: int, step: int) -> None:
        """Use the sampler's log-probs as `logp_old` for responses of earlier versions, except for a random fraction.

        Args:
            verified: Fraction of these responses that still get a forward.
            seed: With `step`, determines which ones.
            step: Step number.
        """
        stale = [i for i in range(len(self)) if self.stale(i)]
        count = len(stale) - math.ceil(verified * len(stale))
        if trusted := self.part(sorted(random.Random(f"verify-{seed}-{step}").sample(stale, count))):
            self.logp_old.fill(trusted, trusted.logp_sampler)

    def in_advance(self, minibatches: Sequence[Part]) -> Iterator[tuple[int, Part]]:
        """Yield the forwards that fill `logp_old` before the first update: (policy version, part), newest first.

        The first minibatch needs none if all of its tokens are of `version`, because its training forward fills the
        column. Responses with a known `logp_old` need none either. Given responses need none, because their objective
        uses no ratio; their first training forward fills the column.
        """
        if self.given:
            return
        order = [i for minibatch in minibatches for i in minibatch.indices]
        later = order if minibatches[0].stale else order[len(minibatches[0]) :]
        yield self.version, self.part([i for i in later if not self.stale(i)])
        by_version: dict[int, list[int]] = {}
        for i in order:
            versions = self._versions(i)
            if versions is not None and not self.logp_old.known(self.part([i])):
                for version in set(versions):
                    by_version.setdefault(version, []).append(i)
        for version in sorted(by_version, reverse=True):
            yield version, self.part(by_version[version])

    def share(self, ranks: Ranks) -> None:
        """Give every rank the log-probs that any rank has computed; a collective."""
        self.share_old(ranks)
        for column in (self.logp, self.logp_ref):
            column.share(ranks)

    def share_old(self, ranks: Ranks) -> None:
        """Give every rank the log-probs and kept sets of forwards at the rollout's weights; a collective."""
        self.logp_old.share(ranks)
        for column in (self.kept, self.chosen, self.router):
            if column is not None:
                column.share(ranks)

    @property
    def served(self) -> Batch:
        """The batch without recorded sets and experts, for the sampler's arithmetic if the learner has another.

        With those of the learner (`truncation_set: replay`, `routing: replay_learner`), log-probs would differ from the
        sampler's although no weight has changed.
        """
        return self if self.kept is None and self.chosen is None else self._without_records

    @cached_property
    def _without_records(self) -> Batch:
        return replace(self, kept=None, chosen=None)

    def part(self, indices: Sequence[int], device: torch.device | None = None) -> Part:
        """Return the responses `indices` as a part, read on `device` (default: the batch's)."""
        return Part(self, tuple(indices), self.device if device is None else device)

    def whole(self, device: torch.device | None = None) -> Part:
        """Return all responses as a part, in their order."""
        return self.part(range(len(self)), device)

    def minibatches(self, size: int, seed: int, step: int, epoch: int) -> list[Part]:
        """Split the batch into minibatches of `size`, shuffled by (seed, step, epoch).

        If `size` is a multiple of the group size, whole groups are shuffled, so responses keep sharing the forward of
        their prompt. Otherwise single responses are.
        """
        count, members = len(self), self.groups.count(self.groups[0])
        unit = members if size % members == 0 else 1
        units = [list(range(start, start + unit)) for start in range(0, count, unit)]
        if size < count:
            random.Random(f"minibatch-{seed}-{step}-{epoch}").shuffle(units)
        order = [index for unit_ in units for index in unit_]
        return [self.part(order[start : start + size]) for start in range(0, count, size)]


class OwnRows(NamedTuple):
    """Number of rows of a forward that belong to a response.

    Attributes:
        prompt: Rows of its prompt; 0 if the previous response has the same prompt, because both share the rows.
        response: Rows of its own tokens, without the last one.
    """

    prompt: int
    response: int


@dataclass(frozen=True)
class Part:
    """Responses of a batch in any order: a minibatch, or the micro-batch of one forward."""

    batch: Batch
    indices: tuple[int, ...]  # indices of the responses in the batch
    device: torch.device  # device of segments, advantages and columns
    elsewhere: frozenset[int] = frozenset()  # `prompt_numbers` of prompts whose rows are `counted` in another part

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def prompts(self) -> list[list[int]]:
        """Token ids of each response's prompt."""
        return [self.batch.prompts[i] for i in self.indices]

    @property
    def responses(self) -> list[list[int]]:
        """Token ids of each response."""
        return [self.batch.responses[i] for i in self.indices]

    @property
    def written(self) -> list[list[bool]] | None:
        """Whether the policy wrote each token of the responses; None: all."""
        return None if self.batch.written is None else [self.batch.written[i] for i in self.indices]

    @property
    def served(self) -> Part:
        """The part for forwards in the sampler's arithmetic; see `Batch.served`."""
        batch = self.batch.served
        return self if batch is self.batch else replace(self, batch=batch)

    @property
    def stale(self) -> bool:
        """Whether an earlier policy version sampled tokens of some response."""
        return any(map(self.batch.stale, self.indices))

    def sampled_at(self, version: int) -> Tensor | None:
        """(T,) bool: tokens that a policy version sampled; None: all of them."""
        versions = [self.batch.versions[i] if self.batch.versions is not None else None for i in self.indices]
        if all(own is None or set(own) == {version} for own in versions):
            return None
        lengths = zip(versions, self.lengths, strict=True)
        flat = [v == version for own, length in lengths for v in (own or [self.batch.version] * length)]
        return torch.tensor(flat, device=self.device)

    @cached_property
    def lengths(self) -> list[int]:
        """Number of tokens of each response that the policy wrote."""
        written = self.written
        return [len(response) for response in self.responses] if written is None else list(map(sum, written))

    @property
    def tokens(self) -> int:
        """Number of response tokens that the policy wrote, T. Only these have a loss."""
        return sum(self.lengths)

    @property
    def forward_tokens(self) -> int:
        """Tokens of one forward: its rows, and the last token of each response."""
        return self.rows + len(self)

    @cached_property
    def rows(self) -> int:
        """Rows of one forward (`qarl.policy.attention.pack`). The last token of a response is not one of them."""
        prompts, responses = self.prompts, self.responses
        return sum(len(response) - 1 for response in responses) + sum(len(prompts[i]) for i in self._new_prompts)

    @cached_property
    def counted(self) -> slice | Tensor:
        """Rows that count in router losses and metrics: a slice, or indices if other rows are between them.

        A prompt that several micro-batches compute counts in one of them.
        """
        repeated = self._repeated
        if all(start == 0 for start, _ in repeated):
            return slice(sum(end for _, end in repeated), self.rows)
        counted = torch.ones(self.rows, dtype=torch.bool)
        for start, end in repeated:
            counted[start:end] = False
        return upload(counted.nonzero()[:, 0], self.device)

    @property
    def counted_rows(self) -> int:
        """Number of `counted` rows. Their sum over micro-batches does not depend on how the minibatch is split."""
        return self.rows - sum(end - start for start, end in self._repeated)

    @cached_property
    def _repeated(self) -> list[tuple[int, int]]:
        """Rows [start, end) of each prompt that another micro-batch counts."""
        found, start = [], 0
        for index, own in zip(self.indices, self.own_rows, strict=True):
            if own.prompt and self.batch.prompt_numbers[index] in self.elsewhere:
                found.append((start, start + own.prompt))
            start += sum(own)
        return found

    @cached_property
    def routing(self) -> Tensor | None:
        """Experts that the sampler chose for the rows of one forward: (rows, L, k) int16 on the part's device.

        -1 marks unknown choices; None if nothing was recorded. For a shared prompt, those recorded with its first
        response.
        """
        if self.batch.routing is None:
            return None
        found, new = [], set(self._new_prompts)
        for place, index in enumerate(self.indices):
            start = 0 if place in new else len(self.batch.prompts[index])
            found.append(self.batch.routing[index][start:])
        return numbers_of(upload(torch.cat(found), self.device))

    @property
    def routes(self) -> Routes:
        """Routing of a forward. Replays recorded experts if the run replays and all are known."""
        if self.batch.chosen is not None:
            chosen = self.batch.chosen.read(self)
            return NO_ROUTES if chosen is None else Routes(replay=chosen, rows=self.rows)
        return Routes(replay=self.routing, rows=self.rows) if self.batch.replays else NO_ROUTES

    @property
    def own_rows(self) -> list[OwnRows]:
        """Rows of one forward per response. Rows of a shared prompt belong to its first response."""
        new = set(self._new_prompts)
        return [
            OwnRows(len(prompt) if place in new else 0, len(response) - 1)
            for place, (prompt, response) in enumerate(zip(self.prompts, self.responses, strict=True))
        ]

    @property
    def _new_prompts(self) -> list[int]:
        """Positions in the part of the responses whose prompt differs from that of the previous response."""
        numbers = [self.batch.prompt_numbers[i] for i in self.indices]
        return [i for i, number in enumerate(numbers) if i == 0 or number != numbers[i - 1]]

    @property
    def work(self) -> float:
        """Estimated work of one forward; see `micro_batches.work`."""
        return work(self._measured(self.indices))

    @cached_property
    def segments(self) -> Segments:
        """The response of each token."""
        return Segments.from_lengths(self.lengths, self.device)

    @property
    def advantages(self) -> Tensor:
        """(R,) float32 advantages of the responses."""
        return upload(self.batch.advantages[list(self.indices)], self.device)

    @property
    def logp_old(self) -> Tensor:
        """(T,) float32 log-probs of the learner at the rollout's weights."""
        return self.batch.logp_old.read(self)

    @property
    def logp_sampler(self) -> Tensor:
        """(T,) float32 log-probs that the sampler reported."""
        return self.batch.logp_sampler.read(self)

    def truncation(self, sampling: Truncation) -> Truncation:
        """Return the truncation of a forward over the part: its recorded sets, or `sampling` if none are recorded."""
        kept = None if self.batch.kept is None else self.batch.kept.read(self)
        return sampling if kept is None else Replay.of(sampling, kept)

    def ends(self, stop_token_ids: Set[int]) -> Tensor:
        """(T,) bool: tokens that end a response."""
        own = own_tokens(self.responses, self.written)
        ends = [token in stop_token_ids for response in own for token in response]
        return torch.tensor(ends, dtype=torch.bool, device=self.device)

    def where(self, keep: Callable[[float], bool]) -> Part:
        """Select the responses whose advantage satisfies `keep`."""
        advantages = self.batch.advantages.tolist()
        return self.batch.part([i for i in self.indices if keep(advantages[i])], self.device)

    def micro_batches(self, max_tokens: int, ranks: int = 1, counted: Part | None = None) -> list[Part]:
        """Split into micro-batches of at most `max_tokens` tokens, with at least one response each.

        Responses to equal prompts stay next to each other, and prompts of similar length come together. On a GPU the
        micro-batches have similar work. On a CPU the split, and with it the order of all sums, depends on token counts
        only.

        Args:
            max_tokens: Token budget of a micro-batch.
            ranks: Number of ranks that share the micro-batches.
            counted: A part whose micro-batches already count the rows of its prompts, see `Part.counted`.
        """
        batch, numbers = self.batch, self.batch.prompt_numbers
        before = frozenset() if counted is None else frozenset(numbers[i] for i in counted.indices)
        longest: dict[int, int] = {}  # by prompt: its tokens and those of the longest response to it
        for i in self.indices:
            tokens = len(batch.prompts[i]) + len(batch.responses[i])
            longest[numbers[i]] = max(longest.get(numbers[i], 0), tokens)
        order = sorted(self.indices, key=lambda i: (longest[numbers[i]], numbers[i], i))
        ends = micro_batch_ends(self._measured(order), max_tokens, ranks, even=self.device.type == "cuda")
        return [
            Part(
                batch,
                tuple(order[start:end]),
                self.device,
                before | {numbers[i] for i in order[max(start - 1, 0) : start]},
            )
            for start, end in pairwise([0, *ends])
        ]

    def _measured(self, indices: Sequence[int]) -> list[Response]:
        batch = self.batch
        return [Response(batch.prompt_numbers[i], len(batch.prompts[i]), len(batch.responses[i])) for i in indices]


def own_tokens(responses: list[list[int]], written: list[list[bool]] | None) -> list[list[int]]:
    """Return the token ids of each response that the policy wrote, according to `written` (None: all)."""
    if written is None:
        return responses
    return [list(compress(*pair)) for pair in zip(responses, written, strict=True)]


def rounds(parts: Sequence[Part], ranks: int) -> list[list[Part | None]]:
    """Assign micro-batches to ranks in rounds of one per rank; see `micro_batches.assign`."""
    return assign(parts, [part.work for part in parts] if ranks > 1 else [0.0] * len(parts), ranks)


def build_batch(
    prompts: list[Prompt],
    rollouts: list[Rollout],
    rewards: list[float],
    advantage: AdvantageKind,
    version: int,
    device: torch.device = CPU,
    replays: bool = False,
    mask_truncated: bool = False,
    stale: bool | None = False,
    given: bool = False,
) -> Batch:
    """Build the batch of a step, with advantages over each prompt's group.

    Args:
        prompts: Prompts of the step. A prompt that occurs twice has two groups.
        rollouts: n per prompt, in the order of the prompts.
        rewards: One per rollout.
        advantage: Kind of advantage.
        version: Version of the policy. Unless the run is asynchronous, all rollouts must have it; this is the only
            place that checks it.
        device: The learner's device.
        replays: Whether forwards use the experts that the sampler recorded.
        mask_truncated: Whether responses that hit the length limit get advantage 0.
        stale: Whether earlier versions may have sampled tokens, so that `logp_old` is computed with each token's
            version. None: they may have, but `logp_old` is computed with `version`.
        given: Whether the responses are from the data. Their advantages are 1.

    Raises:
        UserError: Routing is to be replayed, but the sampler did not record it.
    """
    n = len(rollouts) // len(prompts)
    by_group = [p for p in prompts for _ in range(n)]
    groups = [i for i in range(len(prompts)) for _ in range(n)]
    assert [p.id for p in by_group] == [r.prompt_id for r in rollouts], "rollouts are not in the order of the prompts"
    sampled_at = {v for rollout in rollouts for v in rollout.versions or [rollout.version]}
    fits = sampled_at == {version} if stale is False else max(sampled_at) <= version
    assert fits, f"rollouts of policy versions {sorted(sampled_at)} for a learner at version {version}"
    versions: list[list[int] | None] | None = None
    if stale and sampled_at != {version}:
        every = [r.token_versions for r in rollouts]
        versions = [None if set(own) == {version} else own for own in every]
    routing = [r.routing for r in rollouts if r.routing is not None]
    if len(routing) < len(rollouts) and (replays or routing):
        raise UserError(
            f"model.routing: the sampler recorded the experts of {len(routing)} of {len(rollouts)} responses; "
            "use model.routing: own, or another rollout.engine"
        )
    if given:
        advantages = torch.ones(len(rollouts))
    else:
        advantages = compute_advantages(torch.tensor(rewards, dtype=torch.float32), torch.tensor(groups), advantage)
    if mask_truncated:  # after the group's mean, in which truncated responses count
        advantages[[i for i, rollout in enumerate(rollouts) if rollout.finish_reason == "length"]] = 0.0
    written = None
    if any(r.written is not None for r in rollouts):
        written = [[True] * len(r.token_ids) if r.written is None else r.written for r in rollouts]
    kept = [r.logprobs if r.written is None else list(compress(r.logprobs, r.written)) for r in rollouts]
    return Batch(
        version=version,
        device=device,
        prompts=[p.token_ids for p in by_group],
        responses=[r.token_ids for r in rollouts],
        groups=groups,
        advantages=advantages,
        logp_sampler=Column([torch.tensor(values, dtype=torch.float32) for values in kept]),
        written=written,
        versions=versions,
        routing=routing or None,
        replays=replays,
        given=given,
    )
