"""Random packed batches with shared prompts, and their attention in float64 with a dense mask."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from products import random
from torch import Tensor

Groups = list[tuple[int, list[int]]]


def sequences(groups: Groups) -> list[tuple[list[int], int]]:
    """Yield per sequence its packed rows in order of position, and how many of them belong to the shared prompt."""
    found, row = [], 0
    for prompt, continuations in groups:
        shared = list(range(row, row + prompt))
        found.append((shared, 0))
        row += prompt
        for length in continuations:
            found.append((shared + list(range(row, row + length)), prompt))
            row += length
    return found


@dataclass
class Batch:
    """q (T, H, D), k and v (T, H_kv, D), k and v slices of wider rows."""

    groups: Groups
    q: Tensor
    k: Tensor
    v: Tensor
    scale: float

    @classmethod
    def random(
        cls, groups: Groups, heads: int, kv_heads: int, dim: int, device: torch.device, dtype=torch.bfloat16
    ) -> Batch:
        tokens = sum(prompt + sum(own) for prompt, own in groups)
        q = random(tokens, heads, dim, seed=1, device=device, dtype=dtype)
        both = random(tokens, 2 * kv_heads, dim, seed=2, device=device, dtype=dtype)
        return cls(groups, q, both[:, :kv_heads], both[:, kv_heads:], 1.3 * dim**-0.5)

    def exact(self, window: int | None, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return output (T, H, D) and log2-sum-exp (H, T), computed in float64."""
        tokens = q.shape[0]
        seen = torch.zeros(tokens, tokens, dtype=torch.bool)
        for rows, before in sequences(self.groups):
            for position in range(before, len(rows)):
                first = 0 if window is None else max(0, position + 1 - window)
                seen[rows[position], rows[first : position + 1]] = True
        rep = q.shape[1] // k.shape[1]
        scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(rep, 1)) * self.scale
        scores = scores.masked_fill(~seen.to(q.device), float("-inf"))
        out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.repeat_interleave(rep, 1))
        return out, scores.logsumexp(-1) / torch.log(torch.tensor(2.0, dtype=torch.float64, device=q.device))

    def doubles(self) -> tuple[Tensor, ...]:
        return tuple(t.double().requires_grad_() for t in (self.q, self.k, self.v))
