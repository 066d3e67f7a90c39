"""From scored rollouts to what the learner trains on."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from qarl.objectives import Segments, compute_advantages
from qarl.objectives.advantages import AdvantageKind
from qarl.types import Prompt, Rollout


@dataclass
class Batch:
    """Scored responses of one step; index r counts responses, in the order the sampler gave them.

    prompts, responses: token ids of each response's prompt and of the response.
    advantages: (R,) float32. logp_sampler: R tensors (T_r,) float32, as the sampler reported (behaviour policy).
    logp_old: R tensors (T_r,) float32 or None until the learner has recomputed them at the rollout's snapshot.
    """

    prompts: list[list[int]]
    responses: list[list[int]]
    advantages: Tensor
    logp_sampler: list[Tensor]
    logp_old: list[Tensor | None]

    def __len__(self) -> int:
        return len(self.responses)

    def tokens(self, index: int) -> int:
        """Tokens of prompt and response together: what a forward of response `index` costs."""
        return len(self.prompts[index]) + len(self.responses[index])

    def segments(self, indices: list[int], device: torch.device) -> Segments:
        return Segments.from_lengths([len(self.responses[i]) for i in indices], device)

    def packed(self, values: list[Tensor | None], indices: list[int], device: torch.device) -> Tensor:
        """The per-response tensors of `indices`, one after the other: (T,)."""
        return torch.cat([values[i] for i in indices]).to(device)


def build_batch(
    prompts: list[Prompt], rollouts: list[Rollout], rewards: list[float], advantage: AdvantageKind
) -> Batch:
    """Rollouts (n for each prompt, in order) and their rewards -> a `Batch` with advantages over each prompt's group."""
    by_group = [p for p in prompts for _ in range(len(rollouts) // len(prompts))]
    groups = torch.tensor([i for i in range(len(prompts)) for _ in range(len(rollouts) // len(prompts))])
    assert [p.id for p in by_group] == [r.prompt_id for r in rollouts], "rollouts are not in the order of the prompts"
    return Batch(
        prompts=[p.token_ids for p in by_group],
        responses=[r.token_ids for r in rollouts],
        advantages=compute_advantages(torch.tensor(rewards, dtype=torch.float32), groups, advantage),
        logp_sampler=[torch.tensor(r.logprobs, dtype=torch.float32) for r in rollouts],
        logp_old=[None] * len(rollouts),
    )


def minibatches(count: int, size: int, seed: int, step: int, epoch: int) -> list[list[int]]:
    """Response indices shuffled and cut into minibatches; a function of (seed, step, epoch) alone."""
    order = list(range(count))
    if size < count:
        random.Random(f"minibatch-{seed}-{step}-{epoch}").shuffle(order)
    return [order[start : start + size] for start in range(0, count, size)]


def micro_batches(batch: Batch, indices: list[int], max_tokens: int) -> list[list[int]]:
    """Cut a minibatch into parts of at most `max_tokens` tokens (one response at least), similar lengths together."""
    parts: list[list[int]] = []
    room = 0
    for index in sorted(indices, key=lambda i: (batch.tokens(i), i)):
        if not parts or batch.tokens(index) > room:
            parts.append([])
            room = max_tokens
        parts[-1].append(index)
        room -= batch.tokens(index)
    return parts
