"""Random ragged log-probs, for the tests of the objectives."""

from dataclasses import dataclass

import torch
from torch import Tensor

from qarl.objectives.common import Pruned, SurrogateInputs, TokenLogProbs
from qarl.objectives.segments import Segments


@dataclass
class Batch:
    """The log-probs of `TokenLogProbs`, and the other inputs of a loss."""

    logp: Tensor
    logp_old: Tensor
    logp_sampler: Tensor
    advantages: Tensor
    segments: Segments
    logp_shadow: Tensor | None = None
    logp_ref: Tensor | None = None
    entropy: Tensor | None = None

    @property
    def logps(self) -> TokenLogProbs:
        return TokenLogProbs(self.logp, self.logp_old, self.logp_sampler, self.logp_shadow, self.logp_ref, self.entropy)

    def responses(self) -> list[tuple[list[float], list[float], list[float], float]]:
        """Return (l, o, b, A) per response, as Python floats."""
        lengths = self.segments.lengths.tolist()
        columns = [x.detach().double().split(lengths) for x in (self.logp, self.logp_old, self.logp_sampler)]
        return [(*(column[i].tolist() for column in columns), float(self.advantages[i])) for i in range(len(lengths))]

    def part(self, first: int, last: int) -> "Batch":
        """Return the responses from `first` up to `last`, which share storage (and gradient) with this batch."""
        lengths = self.segments.lengths.tolist()
        start, stop = sum(lengths[:first]), sum(lengths[:last])
        cut = [
            None if x is None else x[start:stop]
            for x in (self.logp, self.logp_old, self.logp_sampler, self.logp_shadow, self.logp_ref, self.entropy)
        ]
        segments = Segments.from_lengths(lengths[first:last])
        return Batch(*cut[:3], self.advantages[first:last], segments, *cut[3:])


def random_batch(
    lengths: list[int], advantages: list[float], spread: float, seed: int = 0, dtype: torch.dtype = torch.float64
) -> "Batch":
    """Return log-probs in which l - o, o - b, q - l and ref - l are normal with standard deviation `spread`."""
    generator = torch.Generator().manual_seed(seed)
    tokens = sum(lengths)

    def noise() -> Tensor:
        return spread * torch.randn(tokens, generator=generator, dtype=torch.float64)

    sampler = -torch.rand(tokens, generator=generator, dtype=torch.float64) * 3 - 0.1
    old = sampler + noise()
    now = old + noise()
    shadow, reference = now + noise(), now + noise()
    entropy = torch.rand(tokens, generator=generator, dtype=torch.float64)
    return Batch(
        now.to(dtype).requires_grad_(),
        old.to(dtype),
        sampler.to(dtype),
        torch.tensor(advantages, dtype=dtype),
        Segments.from_lengths(lengths),
        shadow.to(dtype),
        reference.to(dtype),
        entropy.to(dtype).requires_grad_(),
    )


def nothing_pruned(segments: Segments) -> Pruned:
    tokens = torch.zeros_like(segments.index, dtype=torch.bool)
    return Pruned(tokens, torch.zeros_like(segments.lengths, dtype=torch.bool), tokens)


def surrogate_inputs(
    log_ratio: Tensor, logp: Tensor, advantages: Tensor, segments: Segments, center: float = 0.0
) -> SurrogateInputs:
    logps = TokenLogProbs(logp, logp, logp)
    return SurrogateInputs(logps, log_ratio, advantages, segments, nothing_pruned(segments), center)
