"""Mixture of experts in a training step: router losses, expert loads, and disagreement with the sampler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from qarl_kernels.moe.balance import choices
from torch import Tensor

from qarl.batch.batch import Part
from qarl.config import Config
from qarl.distributed.ranks import Ranks, total
from qarl.policy.policy import Policy
from qarl.policy.routes import Balance, Routes


def training_routes(
    config: Config, policy: Policy, part: Part, rows: int, slots: Tensor | None, loss_scale: float
) -> Routes:
    """Return the routing of a training forward, which measures loads and, if it has a backward, adds router losses.

    Args:
        config: Configuration of the run.
        policy: The learner's policy.
        part: A micro-batch.
        rows: Number of rows counted by all micro-batches of the minibatch that have a backward. Router losses are means
            over these rows, so each micro-batch is weighted by its fraction of them.
        slots: Mean slots per expert in the minibatch (`SlotCounts.mean`). None: computed in the forward.
        loss_scale: Factor of the losses, see `LossScale`.
    """
    if not policy.experts:
        return part.routes
    balance, section = None, config.objective
    if torch.is_grad_enabled() and part.counted_rows and (section.router_aux_coef or section.router_z_coef):
        scale = loss_scale * part.counted_rows / rows
        aux, z = section.router_aux_coef * scale, section.router_z_coef * scale
        assert isinstance(part.counted, slice), "with router losses all responses have a backward"
        balance = Balance(aux, z, part.counted, len(policy.experts), slots)
    loads: dict[int, Tensor] | None = {} if part.counted_rows else None
    return replace(part.routes, rows=part.rows, counted=part.counted, loads=loads, balance=balance)


class SlotCounts:
    """Counts the slots of each expert over a whole minibatch, for the load-balancing loss; see `Balance`."""

    def __init__(self, policy: Policy, ranks: Ranks) -> None:
        self._policy, self._ranks = policy, ranks
        self._counts = torch.zeros(len(policy.experts), policy.experts[0].count, dtype=torch.int64)  # (L, E)

    @classmethod
    def needed(cls, config: Config, policy: Policy, ranks: Ranks, parts: Sequence[Part]) -> SlotCounts | None:
        """Return zero counts; None without a load-balancing loss, or if there is only one micro-batch."""
        balanced = policy.experts and config.objective.router_aux_coef and len(parts) > 1
        return cls(policy, ranks) if balanced else None

    def add_recorded(self, part: Part) -> bool:
        """Count a part's recorded choices, and return True. Return False if not all are recorded and replayed."""
        routing = part.routing if part.batch.replays else None
        if routing is None or bool((routing < 0).any()):
            return False
        self._counts += choices(routing[part.counted], self._policy.experts[0].count).cpu()
        return True

    def routes(self, part: Part) -> Routes:
        """Return the routing of a forward that measures loads for `add`."""
        return replace(part.routes, rows=part.rows, counted=part.counted, loads={})

    def add(self, routes: Routes) -> None:
        """Count the choices of a forward that ran with `routes`."""
        self._counts += routes.measured()[:, 0, :-1].long().cpu()

    def mean(self) -> Tensor:
        """Return each expert's mean number of slots per token and layer, over all ranks: (E,) float32. A collective."""
        every = torch.tensor(total(self._ranks, self._counts.flatten().tolist()), dtype=torch.float64)
        every = every.view(self._counts.shape)
        slots = self._policy.experts[0].per_token * every.sum(0) / every.sum()
        return slots.to(self._policy.device, torch.float32)


@dataclass
class RoutingTotals:
    """Sums over forwards, kept on the learner's device until `metrics`. None before the first addition.

    Attributes:
        loads: (L, 2, E + 1) float64, sums over the training forwards (`Routes.measure`).
        rows: Number of tokens that `loads` covers.
        choices: (L + 2,) int64. Tokens whose experts differ from the sampler's in each layer, tokens that differ in any
            layer, and tokens compared.
    """

    loads: Tensor | None = None
    rows: int = 0
    choices: Tensor | None = None

    def add_loads(self, loads: Tensor, rows: int) -> None:
        """Add the loads (L, 2, E + 1) of a training forward over `rows` tokens."""
        self.loads = loads if self.loads is None else self.loads + loads
        self.rows += rows

    @torch.no_grad()
    def add_choices(self, sampler: Tensor, learner: Tensor) -> None:
        """Compare the experts of a forward at the rollout's weights with the sampler's.

        Args:
            sampler: (T, L, k) expert indices, ascending; negative: unknown.
            learner: (T, L, k) expert indices, ascending.
        """
        known = sampler[:, 0, 0] >= 0
        differs = (sampler != learner).any(-1) & known[:, None]
        counts = torch.cat((differs.sum(0), differs.any(-1).sum()[None], known.sum()[None]))
        self.choices = counts if self.choices is None else self.choices + counts

    def add_up(self, ranks: Ranks) -> None:
        """Replace the sums by those of all ranks, in rank order. A collective."""
        own = {
            "loads": None if self.loads is None else [self.loads.tolist(), self.rows],
            "choices": None if self.choices is None else self.choices.tolist(),
        }
        every = ranks.gather(own)
        if loads := [rank["loads"] for rank in every if rank["loads"] is not None]:
            self.loads = torch.tensor([row[0] for row in loads], dtype=torch.float64).cumsum(0)[-1]
            self.rows = sum(row[1] for row in loads)
        if choices := [rank["choices"] for rank in every if rank["choices"] is not None]:
            self.choices = torch.tensor(choices).sum(0)

    def metrics(self) -> dict[str, float]:
        """Return the metrics of a mixture of experts; mismatch/* only if the sampler recorded its choices.

        Returns:
            router/aux_loss                 load-balancing loss over all tokens, scaled like transformers'
                                            load_balancing_loss_func: experts per token if perfectly balanced
            router/z_loss                   mean squared log-sum-exp of the logits; the loss is its sum over the layers
            router/load_max                 largest fraction of a layer's choices for one expert, times E
            router/entropy                  mean entropy of a token's distribution over the experts, nats
            mismatch/routing_disagreement   fraction of (token, layer) pairs with different experts
            mismatch/routing_tokens         fraction of tokens with a difference in any layer
        """
        found: dict[str, float] = {}
        if self.loads is not None:
            slots, probability = (self.loads[:, :, :-1].mean(0) / self.rows).unbind()  # (E,) each
            entropy, z = (self.loads[:, :, -1].mean(0) / self.rows).tolist()
            found = {
                "router/aux_loss": float(len(slots) * (slots * probability).sum()),
                "router/z_loss": z,
                "router/load_max": max(self._load_max(self._share(self.loads))),
                "router/entropy": entropy,
            }
        if self.choices is not None and (compared := int(self.choices[-1])):
            *layers, anywhere = (self.choices[:-1].double() / compared).tolist()
            found["mismatch/routing_disagreement"] = sum(layers) / len(layers)
            found["mismatch/routing_tokens"] = anywhere
        return found

    def layers(self) -> dict[str, list[float]] | None:
        """Return load_max, load_min, entropy and, if known, disagreement, per MoE layer; None if nothing was added."""
        if self.loads is None:
            return None
        share = self._share(self.loads)
        load_min = (share.min(-1).values * share.shape[1]).tolist()
        entropy = (self.loads[:, 0, -1] / self.rows).tolist()
        found = {"load_max": self._load_max(share), "load_min": load_min, "entropy": entropy}
        if self.choices is not None and int(self.choices[-1]):
            found["disagreement"] = (self.choices[:-2].double() / self.choices[-1]).tolist()
        return found

    @staticmethod
    def _share(loads: Tensor) -> Tensor:
        """Return each expert's fraction of the choices per layer, (L, E)."""
        chosen = loads[:, 0, :-1]
        return chosen / chosen.sum(-1, keepdim=True)

    @staticmethod
    def _load_max(share: Tensor) -> list[float]:
        most: list[float] = (share.max(-1).values * share.shape[1]).tolist()
        return most
