"""Random ragged log-probs, and float64 loops over them, for the tests of the objectives."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from qarl.objectives.segments import Segments


@dataclass
class Batch:
    logp: Tensor
    logp_old: Tensor
    logp_sampler: Tensor
    advantages: Tensor
    segments: Segments

    def responses(self) -> list[tuple[list[float], list[float], list[float], float]]:
        """(l, o, b, A) of each response, as Python floats."""
        lengths = self.segments.lengths.tolist()
        columns = [x.detach().double().split(lengths) for x in (self.logp, self.logp_old, self.logp_sampler)]
        return [(*(column[i].tolist() for column in columns), float(self.advantages[i])) for i in range(len(lengths))]


def random_batch(
    lengths: list[int], advantages: list[float], spread: float, seed: int = 0, dtype: torch.dtype = torch.float64
) -> Batch:
    """Log-probs in which l - o and o - b are normal with standard deviation `spread`."""
    generator = torch.Generator().manual_seed(seed)
    tokens = sum(lengths)
    sampler = -torch.rand(tokens, generator=generator, dtype=torch.float64) * 3 - 0.1
    old = sampler + spread * torch.randn(tokens, generator=generator, dtype=torch.float64)
    now = old + spread * torch.randn(tokens, generator=generator, dtype=torch.float64)
    return Batch(
        now.to(dtype).requires_grad_(),
        old.to(dtype),
        sampler.to(dtype),
        torch.tensor(advantages, dtype=dtype),
        Segments.from_lengths(lengths),
    )


def geometric_mean(numerator: list[float], denominator: list[float]) -> float:
    differences = [a - b for a, b in zip(numerator, denominator, strict=True)]
    return math.exp(math.fsum(differences) / len(differences)) if differences else 1.0


def clip(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)
