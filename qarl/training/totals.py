"""Statistics of a training step: sums over micro-batches, and the learner's metrics derived from them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from qarl.distributed.ranks import Ranks
from qarl.objectives.common import Stats, add_stats, finish_stats
from qarl.objectives.objective import OUTSIDE, OUTSIDE_RESPONSES, ZERO_WEIGHT_RESPONSES
from qarl.training.routing import RoutingTotals

PER_MINIBATCH = (OUTSIDE, OUTSIDE_RESPONSES, ZERO_WEIGHT_RESPONSES)
"""Statistics that are also kept per minibatch. In the first minibatch of a step, an aligned learner has no token
outside its truncated distribution, so a mean over the step would hide how many tokens later minibatches lose."""


@dataclass
class LearnerTotals:
    """Sums over one training step, kept on the learner's device until `metrics`."""

    forward_tokens: int = 0  # prompt and response tokens of the learner's forwards; see `Part.forward_tokens`
    entropy: Tensor | float = 0.0  # sum over tokens, at the rollout's weights; float64, nats
    entropy_tokens: int = 0
    # Retained mass (T,) of each forward at the rollout's weights, if sampling is truncated; see `_retained_mass`.
    retained: list[Tensor] = field(default_factory=list)
    loss: Tensor | float = 0.0  # float64
    stats: Stats = field(default_factory=dict)  # statistics of the objective
    # `PER_MINIBATCH` statistics, one entry per minibatch; the last entry is the current one.
    minibatch_stats: list[Stats] = field(default_factory=lambda: [{}])
    grad_norms: list[float] = field(default_factory=list)  # one per optimizer step that was not skipped
    skipped: int = 0  # optimizer steps skipped because the gradient was not finite
    routing: RoutingTotals = field(default_factory=RoutingTotals)

    def add_snapshot(self, entropy: Tensor) -> None:
        """Add the entropy (T,), in nats, of a forward at the rollout's weights."""
        self.entropy = self.entropy + entropy.detach().double().sum()
        self.entropy_tokens += entropy.numel()

    def add_loss(self, loss: Tensor, stats: Stats) -> None:
        """Add the loss and the statistics of one micro-batch."""
        self.loss = self.loss + loss.detach().double()
        self.stats = add_stats(self.stats, stats)
        watched = {name: stats[name] for name in PER_MINIBATCH if name in stats}
        self.minibatch_stats[-1] = add_stats(self.minibatch_stats[-1], watched)

    def end_minibatch(self) -> None:
        """Start the statistics of the next minibatch."""
        self.minibatch_stats.append({})

    def add_up(self, ranks: Ranks) -> None:
        """Replace the sums by those of all ranks, added in rank order. A collective.

        A rank without responses may lack statistics that others have.
        """
        if ranks.count == 1:
            return
        own = {
            "sums": [self.forward_tokens, float(self.entropy), self.entropy_tokens, float(self.loss)],
            "stats": [_numbers(stats) for stats in (self.stats, *self.minibatch_stats)],
        }
        every = ranks.gather(own)
        tokens, self.entropy, entropy_tokens, self.loss = map(sum, zip(*(rank["sums"] for rank in every), strict=True))
        self.forward_tokens, self.entropy_tokens = int(tokens), int(entropy_tokens)
        self.stats, *self.minibatch_stats = map(_added, zip(*(rank["stats"] for rank in every), strict=True))
        self.routing.add_up(ranks)
        retained = torch.cat(self.retained).cpu() if self.retained else torch.empty(0)
        self.retained = [mass for mass in ranks.gather_tensors(retained) if len(mass)]

    def metrics(self, minibatches: int) -> dict[str, float]:
        """Return policy/* of the step: statistics of the objective, loss, entropy, retained mass, gradient norm.

        `NAME_max` is the largest value over minibatches, for each name in `PER_MINIBATCH`.

        Args:
            minibatches: Number of minibatches in the step, including those that needed no update.
        """
        measured = minibatches - self.skipped
        return {
            **self._objective(),
            "policy/loss": float(self.loss) / minibatches,
            "policy/entropy": float(self.entropy) / self.entropy_tokens,
            **self._retained_mass(),
            "policy/grad_norm": sum(self.grad_norms) / measured if measured else math.nan,
            "policy/skipped_steps": float(self.skipped),
            **self.routing.metrics(),
        }

    def _objective(self) -> dict[str, float]:
        """Return the objective's statistics with a single transfer from the device."""
        each = {
            f"{name} {number}": pair
            for number, stats in enumerate(self.minibatch_stats)
            for name, pair in stats.items()
        }
        found = finish_stats({**self.stats, **each})
        shares = {name: found.pop(name) for name in each}
        for name in PER_MINIBATCH:
            if name in found:
                found[f"{name}_max"] = max(share for key, share in shares.items() if key.split()[0] == name)
        return found

    def _retained_mass(self) -> dict[str, float]:
        """Return policy/retained_mass_mean and _min if sampling is truncated.

        The retained mass is the probability of the learner's set before truncation, per response token, at the
        rollout's weights.
        """
        if not self.retained:
            return {}
        mass = torch.cat(self.retained).double()
        mean, least = torch.stack([mass.mean(), mass.min()]).tolist()
        return {"policy/retained_mass_mean": mean, "policy/retained_mass_min": least}


def _numbers(stats: Stats) -> dict[str, list[float]]:
    return {name: pair.tolist() for name, pair in stats.items()}


def _added(parts: tuple[dict[str, list[float]], ...]) -> Stats:
    """Add the statistics of several ranks, in rank order."""
    total: Stats = {}
    for part in parts:
        total = add_stats(total, {name: torch.tensor(pair, dtype=torch.float64) for name, pair in part.items()})
    return total
