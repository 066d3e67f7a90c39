"""A layer's router: trained to choose the experts that are right about a token, and all of them about equally often."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

LEARNING_RATE = 0.02  # of the first step; it falls to zero
BATCH = 512  # tokens a step


@dataclass(frozen=True)
class Fit:
    """weight: float32 (experts, hidden). before, after: the mixture's squared error in units of the variance of the
    dense output, with the first weight and with this one."""

    weight: Tensor
    before: float
    after: float


def mixture(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """As Mixtral mixes: softmax over all experts, the largest `top_k`, and their weights divided by their sum.

    logits: (tokens, experts). Returns probabilities, weights with zeros for experts not chosen, and which are chosen as
    ones and zeros, all of the shape of logits.
    """
    probabilities = logits.softmax(-1)
    values, chosen = probabilities.topk(top_k, -1)
    zeros = torch.zeros_like(probabilities)
    weights = zeros.scatter(1, chosen, values / values.sum(-1, keepdim=True))
    return probabilities, weights, zeros.scatter(1, chosen, 1.0)


def first_weight(x: Tensor, centers: Tensor) -> Tensor:
    """A weight whose logits are largest for the nearest center and have standard deviation one over x.

    x: (tokens, hidden); centers: (experts, hidden).
    """
    directions = functional.normalize(centers - centers.mean(0), dim=1)
    return directions / (x @ directions.T).std().clamp_min(torch.finfo(torch.float32).tiny)


def fit(
    x: Tensor,
    products: Tensor,
    first: Tensor,
    *,
    top_k: int,
    steps: int,
    balance: float,
    generator: torch.Generator,
) -> Fit:
    """`steps` of Adam on random tokens, from the weight `first`.

    x: (tokens, hidden). products: (tokens, experts, experts), see `Experts.error_products`. balance: of the
    load-balancing loss, experts * sum(share of tokens * mean probability) (Switch Transformers, equation 4), beside
    the mixture's error in units of a single expert's. generator: of the CPU.
    """
    experts = len(first)
    scale = x.square().mean().sqrt()  # so that Adam's steps are the same for states of any size
    states = x / scale
    weight = (first * scale).requires_grad_()
    single = products.diagonal(dim1=1, dim2=2).mean().clamp_min(torch.finfo(torch.float32).tiny)
    optimizer = torch.optim.Adam([weight], lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / max(1, steps))

    def error(states: Tensor, products: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        probabilities, weights, chosen = mixture(states @ weight.T, top_k)
        return (weights[:, :, None] * weights[:, None] * products).sum((1, 2)).mean(), probabilities, chosen

    with torch.no_grad():
        before = error(states, products)[0].item()
    for _ in range(steps):
        rows = torch.randint(len(x), (min(BATCH, len(x)),), generator=generator).to(x.device)
        value, probabilities, chosen = error(states[rows], products[rows])
        load = experts / top_k * (chosen.mean(0) * probabilities.mean(0)).sum()
        optimizer.zero_grad()
        (value / single + balance * load).backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        after = error(states, products)[0].item()
    return Fit(weight.detach() / scale, before, after)
