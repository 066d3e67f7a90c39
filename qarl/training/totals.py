"""What a step's forwards and optimizer steps add up to."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from qarl.distributed.ranks import Ranks
from qarl.objectives import Stats, add_stats, finish_stats
from qarl.training.routing import RoutingTotals


@dataclass
class LearnerTotals:
    """The running totals of one training step. Sums stay on the learner's device until `metrics`.

    forward_tokens: run by the learner, prompts and responses, see `Part.forward_tokens`. entropy, loss: float64 sums.
    retained: (T,) of each forward at the snapshot, under truncation. skipped: optimizer steps whose gradient was not
    finite. routing: of a mixture of experts.
    """

    forward_tokens: int = 0
    entropy: Tensor | float = 0.0
    entropy_tokens: int = 0
    retained: list[Tensor] = field(default_factory=list)
    loss: Tensor | float = 0.0
    stats: Stats = field(default_factory=dict)
    grad_norms: list[float] = field(default_factory=list)
    skipped: int = 0
    routing: RoutingTotals = field(default_factory=RoutingTotals)

    def add_snapshot(self, entropy: Tensor) -> None:
        """A forward at the rollout's snapshot. entropy: (T,) nats."""
        self.entropy = self.entropy + entropy.detach().double().sum()
        self.entropy_tokens += entropy.numel()

    def add_loss(self, loss: Tensor, stats: Stats) -> None:
        """Of one micro-batch, as an objective gives them."""
        self.loss = self.loss + loss.detach().double()
        self.stats = add_stats(self.stats, stats)

    def add_up(self, ranks: Ranks) -> None:
        """From here on the totals are those of all ranks, added in their order: every rank has the same.

        Gradients are everybody's already. A rank without responses may lack names that others have.
        """
        if ranks.count == 1:
            return
        own = {
            "sums": [self.forward_tokens, float(self.entropy), self.entropy_tokens, float(self.loss)],
            "stats": {name: pair.tolist() for name, pair in self.stats.items()},
        }
        every = ranks.gather(own)
        tokens, self.entropy, entropy_tokens, self.loss = map(sum, zip(*(rank["sums"] for rank in every), strict=True))
        self.forward_tokens, self.entropy_tokens = int(tokens), int(entropy_tokens)
        self.stats = {}
        for rank in every:
            part = {name: torch.tensor(pair, dtype=torch.float64) for name, pair in rank["stats"].items()}
            self.stats = add_stats(self.stats, part)
        self.routing.add_up(ranks)
        retained = torch.cat(self.retained).cpu() if self.retained else torch.empty(0)
        self.retained = [mass for mass in ranks.gather_tensors(retained) if len(mass)]

    def metrics(self, minibatches: int) -> dict[str, float]:
        """policy/* of the step: the objective's statistics, loss, entropy, retained mass, gradient, skipped steps.

        minibatches: of the step, those that needed no update included.
        """
        measured = minibatches - self.skipped
        return {
            **finish_stats(self.stats),
            "policy/loss": float(self.loss) / minibatches,
            "policy/entropy": float(self.entropy) / self.entropy_tokens,
            **self._retained_mass(),
            "policy/grad_norm": sum(self.grad_norms) / measured if measured else math.nan,
            "policy/skipped_steps": float(self.skipped),
            **self.routing.metrics(),
        }

    def _retained_mass(self) -> dict[str, float]:
        """policy/retained_mass_mean and _min: the probability that the learner's set keeps at the places of the
        response tokens, of the distribution before truncation, at the snapshot. Nothing without truncation."""
        if not self.retained:
            return {}
        mass = torch.cat(self.retained).double()
        mean, least = torch.stack([mass.mean(), mass.min()]).tolist()
        return {"policy/retained_mass_mean": mean, "policy/retained_mass_min": least}
