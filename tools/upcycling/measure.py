"""How well two models predict the same text, and how a mixture routes it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from upcycling.router import mixture

TOGETHER = 8  # sequences


@dataclass(frozen=True)
class Agreement:
    """parent, child: perplexities. kl: mean KL(parent || child) a token, in nats. tokens: predicted ones."""

    parent: float
    child: float
    kl: float
    tokens: int

    def record(self) -> dict[str, float | int]:
        return {
            "perplexity_parent": self.parent,
            "perplexity_child": self.child,
            "ratio": self.child / self.parent,
            "kl_mean": self.kl,
            "tokens": self.tokens,
        }


@torch.no_grad()
def log_probs(model: PreTrainedModel, ids: Tensor) -> list[Tensor]:
    """Log-probs over the vocabulary after every token but a sequence's last, in parts of at most `TOGETHER` sequences:
    float32 (sequences, length - 1, vocabulary) on the CPU. ids: (sequences, length)."""
    return [
        model(input_ids=part.to(model.device), use_cache=False).logits[:, :-1].float().log_softmax(-1).cpu()
        for part in ids.split(TOGETHER)
    ]


@torch.no_grad()
def compare(parent: list[Tensor], child: PreTrainedModel, ids: Tensor) -> tuple[Agreement, dict[str, Any]]:
    """A Mixtral child against what `log_probs` found of its parent for the same ids; and how it routes them.

    The second: `share`, of each layer the share of (token, choice) pairs that each expert gets; `entropy`, of a layer's
    shares over that of equal ones; `first_weight_mean`, the mean of a token's largest weight.
    """
    losses = torch.zeros(3, dtype=torch.float64)
    counts = torch.zeros(child.config.num_hidden_layers, child.config.num_local_experts)
    largest = 0.0
    for theirs, part in zip(parent, ids.split(TOGETHER), strict=True):
        out = child(input_ids=part.to(child.device), use_cache=False, output_router_logits=True)
        ours = out.logits[:, :-1].float().log_softmax(-1).cpu()
        right = part[:, 1:].flatten()
        both = theirs.flatten(0, 1), ours.flatten(0, 1)
        sums = [functional.nll_loss(one, right, reduction="sum") for one in both]
        kl = functional.kl_div(both[1], both[0], log_target=True, reduction="sum")
        losses += torch.stack([*sums, kl]).double()
        for layer, logits in enumerate(out.router_logits):
            _, weights, chosen = mixture(logits.float(), child.config.num_experts_per_tok)
            counts[layer] += chosen.sum(0).cpu()
            largest += weights.amax(-1).sum().item()
    tokens = ids[:, 1:].numel()
    of_parent, of_child, kl_mean = (losses / tokens).tolist()
    found = Agreement(math.exp(of_parent), math.exp(of_child), kl_mean, tokens)
    return found, _routing(counts / counts.sum(1, keepdim=True), largest / (len(counts) * ids.numel()))


def _routing(shares: Tensor, largest: float) -> dict[str, Any]:
    entropy = -torch.special.xlogy(shares, shares).sum(1) / math.log(max(2, shares.shape[1]))
    return {
        "share_min": shares.min().item(),
        "share_max": shares.max().item(),
        "entropy_min": entropy.min().item(),
        "entropy_mean": entropy.mean().item(),
        "first_weight_mean": largest,
        "share": [[round(value, 4) for value in row] for row in shares.tolist()],
    }
