"""From scored rollouts to what the learner trains on."""

from __future__ import annotations

import random
from collections.abc import Set
from dataclasses import dataclass

import torch
from torch import Tensor

from qarl.objectives import Segments, compute_advantages
from qarl.objectives.advantages import AdvantageKind
from qarl.types import Prompt, Rollout


@dataclass
class Batch:
    """Scored responses of one step; index r counts responses, in the order the sampler gave them.

    prompts, responses: token ids of each response's prompt and of the response. groups: of each response, the
    position of its prompt in the step.
    advantages: (R,) float32. logp_sampler: R tensors (T_r,) float32, as the sampler reported (behaviour policy).
    logp_old: R tensors (T_r,) float32 or None until the learner has recomputed them at the rollout's snapshot.
    logp: the same of the learner's last training forward over each response. logp_ref: of the reference policy, None
    where nobody asked.
    """

    prompts: list[list[int]]
    responses: list[list[int]]
    groups: list[int]
    advantages: Tensor
    logp_sampler: list[Tensor]
    logp_old: list[Tensor | None]
    logp: list[Tensor | None]
    logp_ref: list[Tensor | None]

    def __len__(self) -> int:
        return len(self.responses)

    def forward_tokens(self, indices: list[int]) -> int:
        """Tokens of one forward over `indices`: each response, and its prompt unless its left neighbour shares it."""
        before = [None, *indices]
        return sum(
            len(self.responses[i]) + (0 if j is not None and self.groups[i] == self.groups[j] else len(self.prompts[i]))
            for j, i in zip(before, indices, strict=False)
        )

    def segments(self, indices: list[int], device: torch.device) -> Segments:
        return Segments.from_lengths([len(self.responses[i]) for i in indices], device)

    def ends(self, indices: list[int], stop_token_ids: Set[int]) -> Tensor:
        """bool (T,): tokens that end a response, as `packed` lays them out."""
        return torch.tensor([t in stop_token_ids for i in indices for t in self.responses[i]], dtype=torch.bool)

    def texts(self, indices: list[int]) -> tuple[list[list[int]], list[list[int]]]:
        """Prompts and responses of `indices`, as `Policy.logprobs` takes them."""
        return [self.prompts[i] for i in indices], [self.responses[i] for i in indices]

    def split(self, values: Tensor, indices: list[int]) -> tuple[Tensor, ...]:
        """What `packed` put together: one tensor (T_r,) on the CPU for each of `indices`, without gradient."""
        return values.detach().cpu().split([len(self.responses[i]) for i in indices])

    def packed(self, values: list[Tensor | None], indices: list[int], device: torch.device) -> Tensor:
        """The per-response tensors of `indices`, one after the other: (T,)."""
        return torch.cat([values[i] for i in indices]).to(device)


def build_batch(
    prompts: list[Prompt], rollouts: list[Rollout], rewards: list[float], advantage: AdvantageKind
) -> Batch:
    """Rollouts (n for each prompt, in order) and their rewards -> a `Batch` with advantages over each prompt's group.

    A prompt that was dealt twice in the step is two groups.
    """
    n = len(rollouts) // len(prompts)
    by_group = [p for p in prompts for _ in range(n)]
    groups = [i for i in range(len(prompts)) for _ in range(n)]
    assert [p.id for p in by_group] == [r.prompt_id for r in rollouts], "rollouts are not in the order of the prompts"
    return Batch(
        prompts=[p.token_ids for p in by_group],
        responses=[r.token_ids for r in rollouts],
        groups=groups,
        advantages=compute_advantages(torch.tensor(rewards, dtype=torch.float32), torch.tensor(groups), advantage),
        logp_sampler=[torch.tensor(r.logprobs, dtype=torch.float32) for r in rollouts],
        logp_old=[None] * len(rollouts),
        logp=[None] * len(rollouts),
        logp_ref=[None] * len(rollouts),
    )


def minibatches(groups: list[int], size: int, seed: int, step: int, epoch: int) -> list[list[int]]:
    """Response indices cut into minibatches of `size`, shuffled as a function of (seed, step, epoch) alone.

    groups: of each response, members side by side. Whole groups are shuffled where `size` is a multiple of the group
    size, so that responses keep sharing their prompt's forward; single responses otherwise.
    """
    count = len(groups)
    members = groups.count(groups[0])
    unit = members if size % members == 0 else 1
    units = [list(range(start, start + unit)) for start in range(0, count, unit)]
    if size < count:
        random.Random(f"minibatch-{seed}-{step}-{epoch}").shuffle(units)
    order = [index for unit_ in units for index in unit_]
    return [order[start : start + size] for start in range(0, count, size)]


def micro_batches(batch: Batch, indices: list[int], max_tokens: int) -> list[list[int]]:
    """Cut a minibatch into parts whose forward runs at most `max_tokens` tokens (one response at least).

    Responses to one prompt stay side by side, and groups of similar length come together.
    """
    longest: dict[int, int] = {}  # of each group, prompt and longest response
    for i in indices:
        group = batch.groups[i]
        longest[group] = max(longest.get(group, 0), len(batch.prompts[i]) + len(batch.responses[i]))
    parts: list[list[int]] = []
    used = 0
    for i in sorted(indices, key=lambda i: (longest[batch.groups[i]], batch.groups[i], i)):
        shares = bool(parts) and batch.groups[parts[-1][-1]] == batch.groups[i]
        cost = len(batch.responses[i]) + (0 if shares else len(batch.prompts[i]))
        if not parts or used + cost > max_tokens:
            parts.append([])
            used, cost = 0, batch.forward_tokens([i])
        parts[-1].append(i)
        used += cost
    return parts
