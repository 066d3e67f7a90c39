"""A step's scored responses: what the learner trains on, and the parts of it that one forward runs over."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import torch
from qarl_kernels.truncation import Replay, Truncation
from torch import Tensor

from qarl.distributed.ranks import Ranks
from qarl.errors import UserError
from qarl.objectives import Segments, compute_advantages
from qarl.objectives.base import AdvantageKind
from qarl.policy.routes import NO_ROUTES, Routes
from qarl.policy.routing import numbers_of
from qarl.training.cutting import Response, by_tokens, by_work, deal, for_ranks, work
from qarl.training.kept import KeptColumn
from qarl.transfer import upload
from qarl.types import Prompt, Rollout

CPU = torch.device("cpu")


class Column:
    """A float32 value for each response token of a batch, filled and read a part at a time.

    Without gradient, one tensor (T_r,) for each response, so that parts may be cut in any way. What is filled in stays
    on its device; the first read on the CPU brings everything over in one copy, and is what waits for the device.
    """

    def __init__(self, values: Sequence[Tensor | None]) -> None:
        self._values = list(values)
        self._new: set[int] = set()  # filled in here since all ranks had the same

    @classmethod
    def empty(cls, responses: int) -> Column:
        return cls([None] * responses)

    def fill(self, part: Part, packed: Tensor) -> None:
        """packed: (T,) of the part's responses, one after the other, on any device."""
        lengths = [len(response) for response in part.responses]
        for index, values in zip(part.indices, packed.detach().split(lengths), strict=True):
            self._values[index] = values
        self._new.update(part.indices)

    def known(self, part: Part) -> bool:
        """Whether all of the part's responses are filled in."""
        return all(self._values[index] is not None for index in part.indices)

    def share(self, ranks: Ranks) -> None:
        """Every rank has what any of them has filled in since the last time. Where several have, it is the same."""
        if ranks.count == 1:
            return
        self._fetch()
        own = [(index, self._filled(index)) for index in sorted(self._new)]
        self._new.clear()
        places = torch.tensor([(index, len(values)) for index, values in own], dtype=torch.int64).reshape(-1, 2)
        packed = torch.cat([values for _, values in own]) if own else torch.empty(0)
        every = zip(ranks.gather_tensors(places), ranks.gather_tensors(packed), strict=True)
        for indices, values in ((there[:, 0].tolist(), found.split(there[:, 1].tolist())) for there, found in every):
            for index, value in zip(indices, values, strict=True):
                self._values[index] = value

    def read(self, part: Part) -> Tensor:
        """(T,) of the part's responses, one after the other, on the part's device."""
        if {self._filled(index).device.type for index in part.indices} not in ({"cpu"}, {part.device.type}):
            self._fetch()
        return upload(torch.cat([self._filled(index) for index in part.indices]), part.device)

    def __getitem__(self, response: int) -> Tensor:
        """(T_r,) on the CPU."""
        if self._filled(response).device.type != "cpu":
            self._fetch()
        return self._filled(response)

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[Tensor]:
        return (self[index] for index in range(len(self)))

    def _filled(self, response: int) -> Tensor:
        values = self._values[response]
        assert values is not None, f"response {response} was not filled in yet"
        return values

    def _fetch(self) -> None:
        """Bring everything to the CPU."""
        away = {index: x for index, x in enumerate(self._values) if x is not None and x.device.type != "cpu"}
        if away:
            here = torch.cat(list(away.values())).cpu().split([len(x) for x in away.values()])
            for index, values in zip(away, here, strict=True):
                self._values[index] = values


@dataclass
class Batch:
    """Scored responses of one step; index r counts responses, in the order the sampler gave them.

    version: of the policy that drew them all. device: where its parts are read, the learner's.
    prompts, responses: token ids of each response's prompt and of the response. groups: of each response, the
    position of its prompt in the step.
    advantages: (R,) float32 on the CPU. logp_sampler: as the sampler reported (behaviour policy). logp_old: the learner
    at `version`, the rollout's snapshot, from its first forward over each response. logp: of its last training forward.
    logp_ref: of the reference policy, where an objective asks for it.
    routing: `Rollout.routing` of each response, None where the sampler was not asked for it. replays: whether forwards
    send tokens through these experts. kept: the learner's truncated sets at `version`, for objective.truncation_set
    replay.
    """

    version: int
    device: torch.device
    prompts: list[list[int]]
    responses: list[list[int]]
    groups: list[int]
    advantages: Tensor
    logp_sampler: Column
    logp_old: Column = field(init=False)
    logp: Column = field(init=False)
    logp_ref: Column = field(init=False)
    routing: list[Tensor] | None = None
    replays: bool = False
    kept: KeptColumn | None = None

    def __post_init__(self) -> None:
        self.logp_old, self.logp, self.logp_ref = (Column.empty(len(self)) for _ in range(3))

    def __len__(self) -> int:
        return len(self.responses)

    def share(self, ranks: Ranks) -> None:
        """Give every rank the log-probs that any of them has computed; a collective."""
        self.share_old(ranks)
        for column in (self.logp, self.logp_ref):
            column.share(ranks)

    def share_old(self, ranks: Ranks) -> None:
        """Give every rank what forwards at the rollout's weights found: log-probs and kept sets; a collective."""
        self.logp_old.share(ranks)
        if self.kept is not None:
            self.kept.share(ranks)

    def part(self, indices: Sequence[int], device: torch.device | None = None) -> Part:
        return Part(self, tuple(indices), self.device if device is None else device)

    def whole(self, device: torch.device | None = None) -> Part:
        """All responses, in their order."""
        return self.part(range(len(self)), device)

    def minibatches(self, size: int, seed: int, step: int, epoch: int) -> list[Part]:
        """The batch cut into minibatches of `size`, shuffled as a function of (seed, step, epoch) alone.

        Whole groups are shuffled where `size` is a multiple of the group size, so that responses keep sharing their
        prompt's forward; single responses otherwise.
        """
        count, members = len(self), self.groups.count(self.groups[0])
        unit = members if size % members == 0 else 1
        units = [list(range(start, start + unit)) for start in range(0, count, unit)]
        if size < count:
            random.Random(f"minibatch-{seed}-{step}-{epoch}").shuffle(units)
        order = [index for unit_ in units for index in unit_]
        return [self.part(order[start : start + size]) for start in range(0, count, size)]


@dataclass(frozen=True)
class Part:
    """Some responses of a batch in an order of their own: a minibatch, or the micro-batch that one forward runs.

    indices: of the responses in the batch. device: where its segments, advantages and columns are read. repeated: rows
    of the first prompt, where the micro-batch before this one ran it too; else 0.
    """

    batch: Batch
    indices: tuple[int, ...]
    device: torch.device
    repeated: int = 0

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def prompts(self) -> list[list[int]]:
        return [self.batch.prompts[i] for i in self.indices]

    @property
    def responses(self) -> list[list[int]]:
        return [self.batch.responses[i] for i in self.indices]

    @property
    def tokens(self) -> int:
        """Response tokens."""
        return sum(map(len, self.responses))

    @property
    def forward_tokens(self) -> int:
        """Tokens of one forward: each response, and its prompt unless its left neighbour shares it."""
        groups = [self.batch.groups[i] for i in self.indices]
        shared = [False, *(a == b for a, b in pairwise(groups))]
        return self.tokens + sum(len(p) for p, known in zip(self.prompts, shared, strict=False) if not known)

    @cached_property
    def rows(self) -> int:
        """Rows of one forward, as `qarl.policy.packing.pack` lays them out: no response's last token is one."""
        return self.tokens - len(self) + sum(len(self.prompts[place]) for place in self._new_prompts)

    @property
    def counted(self) -> slice:
        """Of `rows`, those that are not repeated."""
        return slice(self.repeated, self.rows)

    @property
    def counted_rows(self) -> int:
        """How many are `counted`: over all micro-batches of a part the same, wherever it is cut."""
        return self.rows - self.repeated

    @cached_property
    def routing(self) -> Tensor | None:
        """The experts that the sampler sent the rows of one forward through: (rows, L, k) int16 on the part's device,
        -1 where that is not known; None where nothing is. Of a prompt that neighbours share, as the first one has it.
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
        """What a forward over the part is told of the experts."""
        return Routes(replay=self.routing, rows=self.rows) if self.batch.replays else NO_ROUTES

    @property
    def _new_prompts(self) -> list[int]:
        """The places of the responses whose prompt is not their left neighbour's."""
        prompts = self.prompts
        return [i for i, prompt in enumerate(prompts) if i == 0 or prompt != prompts[i - 1]]

    @property
    def work(self) -> float:
        """Of one forward, as `qarl.training.cutting` counts it."""
        return work(self._measured(self.indices))

    @cached_property
    def segments(self) -> Segments:
        return Segments.from_lengths([len(response) for response in self.responses], self.device)

    @property
    def advantages(self) -> Tensor:
        """(R,) of the part."""
        return upload(self.batch.advantages[list(self.indices)], self.device)

    @property
    def logp_old(self) -> Tensor:
        return self.batch.logp_old.read(self)

    @property
    def logp_sampler(self) -> Tensor:
        return self.batch.logp_sampler.read(self)

    def truncation(self, sampling: Truncation) -> Truncation:
        """Return how a forward over the part truncates: to its recorded sets if there are any, else as sampled."""
        kept = None if self.batch.kept is None else self.batch.kept.read(self)
        return sampling if kept is None else Replay.of(sampling, kept)

    def ends(self, stop_token_ids: Set[int]) -> Tensor:
        """bool (T,): tokens that end a response."""
        ends = [token in stop_token_ids for response in self.responses for token in response]
        return torch.tensor(ends, dtype=torch.bool, device=self.device)

    def where(self, keep: Callable[[float], bool]) -> Part:
        """The responses whose advantage `keep` takes."""
        advantages = self.batch.advantages.tolist()
        return self.batch.part([i for i in self.indices if keep(advantages[i])], self.device)

    def micro_batches(self, max_tokens: int, ranks: int = 1) -> list[Part]:
        """Cut into parts whose forward runs at most `max_tokens` tokens (one response at least).

        Responses to one prompt stay side by side, and groups of similar length come together. A GPU gets parts of
        similar work; on a CPU the cut, and with it the order of all sums, is by tokens alone. Several ranks get parts
        that divide among them.
        """
        batch = self.batch
        longest: dict[int, int] = {}  # of each group, prompt and longest response
        for i in self.indices:
            group = batch.groups[i]
            longest[group] = max(longest.get(group, 0), len(batch.prompts[i]) + len(batch.responses[i]))
        order = sorted(self.indices, key=lambda i: (longest[batch.groups[i]], batch.groups[i], i))
        cut = by_work if self.device.type == "cuda" else by_tokens
        ends = for_ranks(cut, self._measured(order), max_tokens, ranks)
        return [
            Part(batch, tuple(order[start:end]), self.device, self._repeated(order, start))
            for start, end in pairwise([0, *ends])
        ]

    def _repeated(self, order: Sequence[int], start: int) -> int:
        """Rows of the prompt at a place of an order, where the response before has the same."""
        prompts = self.batch.prompts
        again = start > 0 and prompts[order[start - 1]] == prompts[order[start]]
        return len(prompts[order[start]]) if again else 0

    def _measured(self, indices: Sequence[int]) -> list[Response]:
        batch = self.batch
        return [Response(batch.groups[i], len(batch.prompts[i]), len(batch.responses[i])) for i in indices]


def rounds(parts: Sequence[Part], ranks: int) -> list[list[Part | None]]:
    """Which rank runs which part, in rounds; see `qarl.training.cutting.deal`."""
    return deal(parts, [part.work for part in parts] if ranks > 1 else [0.0] * len(parts), ranks)


def build_batch(
    prompts: list[Prompt],
    rollouts: list[Rollout],
    rewards: list[float],
    advantage: AdvantageKind,
    version: int,
    device: torch.device = CPU,
    replays: bool = False,
) -> Batch:
    """Rollouts (n for each prompt, in order) and their rewards -> a `Batch` with advantages over each prompt's group.

    A prompt that was dealt twice in the step is two groups. version: the policy's, before it learns from them; every
    rollout must be of it, and this is the one place where that is checked. replays: see `Batch`.
    Raises UserError where routing is to be replayed and the sampler did not give it.
    """
    n = len(rollouts) // len(prompts)
    by_group = [p for p in prompts for _ in range(n)]
    groups = [i for i in range(len(prompts)) for _ in range(n)]
    assert [p.id for p in by_group] == [r.prompt_id for r in rollouts], "rollouts are not in the order of the prompts"
    drawn_at = {rollout.version for rollout in rollouts}
    assert drawn_at == {version}, f"rollouts of policy versions {sorted(drawn_at)} for a learner at version {version}"
    routing = [r.routing for r in rollouts if r.routing is not None]
    if len(routing) < len(rollouts) and (replays or routing):
        raise UserError(
            f"model.routing: the sampler told the experts of {len(routing)} of {len(rollouts)} responses; "
            "use model.routing: own, or another rollout.engine"
        )
    return Batch(
        version=version,
        device=device,
        prompts=[p.token_ids for p in by_group],
        responses=[r.token_ids for r in rollouts],
        groups=groups,
        advantages=compute_advantages(torch.tensor(rewards, dtype=torch.float32), torch.tensor(groups), advantage),
        logp_sampler=Column([torch.tensor(r.logprobs, dtype=torch.float32) for r in rollouts]),
        routing=routing or None,
        replays=replays,
    )
