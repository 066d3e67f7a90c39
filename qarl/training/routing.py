"""What routers do in a training step: their losses and loads, and where they choose other experts than the sampler."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qarl.distributed.ranks import Ranks


@dataclass
class RoutingTotals:
    """Sums over forwards, on the learner's device until `metrics`; None where there was none.

    loads: (L, 2, E + 1) float64 of the training forwards, as `Routes.measure` has it, over `rows` tokens. differing:
    (L + 1,) int64: tokens for which the learner's own choice at the rollout's snapshot is not the sampler's, in each
    layer, and in any. compared: of how many.
    """

    loads: Tensor | None = None
    rows: int = 0
    differing: Tensor | None = None
    compared: Tensor | None = None

    def add_loads(self, loads: Tensor, rows: int) -> None:
        """Of a training forward over so many rows: (L, 2, E + 1), as `Routes.measure` has it."""
        self.loads = loads if self.loads is None else self.loads + loads
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
            "loads": None if self.loads is None else [self.loads.tolist(), self.rows],
            "choices": None
            if self.differing is None or self.compared is None
            else [self.differing.tolist(), int(self.compared)],
        }
        every = ranks.gather(own)
        if loads := [rank["loads"] for rank in every if rank["loads"] is not None]:
            self.loads = torch.tensor([row[0] for row in loads], dtype=torch.float64).cumsum(0)[-1]
            self.rows = sum(row[1] for row in loads)
        if choices := [rank["choices"] for rank in every if rank["choices"] is not None]:
            self.differing = torch.tensor([row[0] for row in choices]).sum(0)
            self.compared = torch.tensor(sum(row[1] for row in choices))

    def metrics(self) -> dict[str, float]:
        """Nothing of a model without experts; mismatch/* where the sampler was asked for its choice.

        router/aux_loss     load-balancing loss of all these tokens on the scale of transformers'
                            load_balancing_loss_func: the number of experts per token if all are used equally often
        router/z_loss       mean of the squared log-sum-exp of the logits
        router/load_max     the largest share of a layer's choices that one expert has, times the number of experts
        router/entropy      mean entropy of a token's distribution over the experts, nats
        mismatch/routing_disagreement   share of the pairs of token and layer whose experts differ
        mismatch/routing_tokens         share of the tokens with a difference in any layer
        """
        found: dict[str, float] = {}
        if self.loads is not None:
            slots, probability = (self.loads[:, :, :-1].mean(0) / self.rows).unbind()  # (E,) each
            entropy, z = (self.loads[:, :, -1].mean(0) / self.rows).tolist()
            aux = float(len(slots) * (slots * probability).sum())
            load = max(self._load_max(self._share(self.loads)))
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
        if self.loads is None:
            return None
        share = self._share(self.loads)
        load_min = (share.min(-1).values * share.shape[1]).tolist()
        entropy = (self.loads[:, 0, -1] / self.rows).tolist()
        found = {"load_max": self._load_max(share), "load_min": load_min, "entropy": entropy}
        if self.differing is not None and self.compared is not None and int(self.compared):
            found["disagreement"] = (self.differing[:-1].double() / self.compared).tolist()
        return found

    @staticmethod
    def _share(loads: Tensor) -> Tensor:
        """(L, E) of a layer's choices."""
        chosen = loads[:, 0, :-1]
        return chosen / chosen.sum(-1, keepdim=True)

    @staticmethod
    def _load_max(share: Tensor) -> list[float]:
        most: list[float] = (share.max(-1).values * share.shape[1]).tolist()
        return most
