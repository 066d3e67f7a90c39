"""What routers do in a training step: their losses and loads, and where they choose other experts than the sampler."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qarl.distributed.ranks import Ranks


@dataclass
class RoutingTotals:
    """Sums over forwards, on the learner's device until `metrics`; None where there was none.

    chosen: (L, E) float64, how often each expert ran in the training forwards. probability: (L, E) float64, of each
    expert. losses: (L, 2) float64, z-loss and entropy. rows: of so many tokens. differing: (L + 1,) int64: tokens for
    which the learner's own choice at the rollout's snapshot is not the sampler's, in each layer, and in any. compared:
    of how many.
    """

    chosen: Tensor | None = None
    probability: Tensor | None = None
    losses: Tensor | None = None
    rows: int = 0
    differing: Tensor | None = None
    compared: Tensor | None = None

    def add_loads(self, loads: Tensor, rows: int) -> None:
        """Of a training forward over so many rows: (L, 2, E + 1), as `Routes.measure` has it."""
        chosen, probability, losses = loads[:, 0, :-1], loads[:, 1, :-1], loads.flip(1)[:, :, -1]  # z-loss, entropy
        if (sums := self._sums()) is not None:
            chosen, probability, losses = sums[0] + chosen, sums[1] + probability, sums[2] + losses
        self.chosen, self.probability, self.losses = chosen, probability, losses
        self.rows += rows

    @torch.no_grad()
    def add_choices(self, sampler: Tensor, learner: Tensor) -> None:
        """Of a forward at the rollout's snapshot: experts (T, L, k), ascending; negative where the sampler's are not
        known."""
        known = sampler[:, 0, 0] >= 0
        differs = (sampler != learner).any(-1) & known[:, None]
        counts = torch.cat((differs.sum(0), differs.any(-1).sum()[None]))
        self.differing = counts if self.differing is None else self.differing + counts
        self.compared = known.sum() if self.compared is None else self.compared + known.sum()

    def add_up(self, ranks: Ranks) -> None:
        """Of all ranks, in their order; a rank without responses has nothing to add."""
        own = {
            "loads": None if (sums := self._sums()) is None else [*(one.tolist() for one in sums), self.rows],
            "choices": None
            if self.differing is None or self.compared is None
            else [self.differing.tolist(), int(self.compared)],
        }
        every = ranks.gather(own)
        if loads := [rank["loads"] for rank in every if rank["loads"] is not None]:
            self.chosen, self.probability, self.losses = (
                torch.tensor([row[i] for row in loads], dtype=torch.float64).cumsum(0)[-1] for i in range(3)
            )
            self.rows = sum(row[3] for row in loads)
        if choices := [rank["choices"] for rank in every if rank["choices"] is not None]:
            self.differing = torch.tensor([row[0] for row in choices]).sum(0)
            self.compared = torch.tensor(sum(row[1] for row in choices))

    def metrics(self) -> dict[str, float]:
        """Nothing of a model without experts; mismatch/* where the sampler was asked for its choice.

        router/aux_loss     mean over layers of the load-balancing loss of all these tokens; 1 is balanced
        router/z_loss       mean of the squared log-sum-exp of the logits
        router/load_max     the largest share of a layer's choices that one expert has, times the number of experts
        router/entropy      mean entropy of a token's distribution over the experts, nats
        mismatch/routing_disagreement   share of the pairs of token and layer whose experts differ
        mismatch/routing_tokens         share of the tokens with a difference in any layer
        """
        found: dict[str, float] = {}
        if self.probability is not None and self.losses is not None:
            z, entropy = (self.losses.mean(0) / self.rows).tolist()
            share = self._share()
            aux = float(share.shape[1] * (share * self.probability).sum(-1).mean() / self.rows)
            load = max(self._loads())
            found = {
                "router/aux_loss": aux,
                "router/z_loss": z,
                "router/load_max": load,
                "router/entropy": entropy,
            }
        if self.differing is not None and self.compared is not None and (compared := int(self.compared)):
            *layers, anywhere = (self.differing.double() / compared).tolist()
            found["mismatch/routing_disagreement"] = sum(layers) / len(layers)
            found["mismatch/routing_tokens"] = anywhere
        return found

    def layers(self) -> dict[str, list[float]] | None:
        """For each layer with experts, in their order: load_max, load_min and entropy as above, and disagreement
        where it is known. None where no training forward went through experts."""
        if self.chosen is None or self.losses is None:
            return None
        load_min = (self._share().min(-1).values * self.chosen.shape[1]).tolist()
        entropy = (self.losses[:, 1] / self.rows).tolist()
        found = {"load_max": self._loads(), "load_min": load_min, "entropy": entropy}
        if self.differing is not None and self.compared is not None and int(self.compared):
            found["disagreement"] = (self.differing[:-1].double() / self.compared).tolist()
        return found

    def _sums(self) -> tuple[Tensor, Tensor, Tensor] | None:
        if self.chosen is None or self.probability is None or self.losses is None:
            return None
        return self.chosen, self.probability, self.losses

    def _share(self) -> Tensor:
        assert self.chosen is not None, "no training forward went through experts"
        return self.chosen / self.chosen.sum(-1, keepdim=True)

    def _loads(self) -> list[float]:
        share = self._share()
        loads: list[float] = (share.max(-1).values * share.shape[1]).tolist()
        return loads
