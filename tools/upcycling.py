"""Experts out of a dense MLP, and their router.

Each expert is the whole MLP with noise on the features that its own tokens use least. Noise on all features would make
experts that are equally wrong about every token, so that no choice among them helps. Tokens are therefore clustered,
and an expert is wrong only about the intermediate features that its cluster uses least compared with the others: then
there is something to gain by routing, and to lose. No feature is split off into finer experts: without noise, weights
that sum to one give the parent's own function.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

ITERATIONS = 12  # of k-means
ROWS = 2048  # tokens whose errors are in memory together
SHARE = 0.125  # of an expert's features, which get noise
LEARNING_RATE = 0.02  # of a router's first step; it falls to zero
BATCH = 512  # tokens per step of a router
BALANCE = 0.1  # weight of the load-balancing loss
SAMPLED = 192  # sequences that are sampled together
READ = 16  # sequences that are read together


@dataclass(frozen=True)
class Mlp:
    """gate, up: (intermediate, hidden); down: (hidden, intermediate); float32."""

    gate: Tensor
    up: Tensor
    down: Tensor

    def features(self, x: Tensor) -> Tensor:
        """silu(gate) * up of x (tokens, hidden): (tokens, intermediate)."""
        return functional.silu(x @ self.gate.T) * (x @ self.up.T)

    def __call__(self, x: Tensor) -> Tensor:
        """(tokens, hidden)."""
        return self.features(x) @ self.down.T

    def at(self, features: Tensor) -> "Mlp":
        """The MLP of these intermediate features alone. features: int64 (count)."""
        return Mlp(self.gate[features], self.up[features], self.down[:, features])


@dataclass(frozen=True)
class Experts:
    """A dense MLP and its experts. changed: Per expert, the features (count) with noise and the MLP of only those."""

    dense: Mlp
    changed: list[tuple[Tensor, Mlp]]

    def expert(self, index: int) -> Mlp:
        """An expert's whole MLP."""
        features, noisy = self.changed[index]
        gate, up, down = self.dense.gate.clone(), self.dense.up.clone(), self.dense.down.clone()
        gate[features], up[features], down[:, features] = noisy.gate, noisy.up, noisy.down
        return Mlp(gate, up, down)

    def error_products(self, x: Tensor, active: Tensor) -> Tensor:
        """(tokens, experts, experts) inner products of the experts' errors about each token.

        An error is the expert's output minus the dense MLP's. For weights w that sum to one, w' P w is the squared
        error of the mixture, in units of the variance of the dense output over the first `ROWS` tokens.

        Args:
            x: (tokens, hidden), the MLP's input.
            active: (tokens, intermediate), its features for x.
        """
        products = []
        for rows, on in zip(x.split(ROWS), active.split(ROWS), strict=True):
            errors = [
                noisy(rows) - on[:, features] @ self.dense.down[:, features].T for features, noisy in self.changed
            ]
            stacked = torch.stack(errors, 1)
            products.append(stacked @ stacked.mT)
        variance = (active[:ROWS] @ self.dense.down.T).var(0, correction=0).sum()
        return torch.cat(products) / variance


def cluster(x: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """k-means of the directions of x (tokens, hidden): centers (count, hidden). A cluster without tokens starts again
    from a random token."""
    x = functional.normalize(x, dim=1)
    centers = x[torch.randperm(len(x), generator=generator)[:count].to(x.device)]
    for _ in range(ITERATIONS):
        nearest = torch.cdist(x, centers).argmin(1)
        spare = x[torch.randint(len(x), (count,), generator=generator).to(x.device)]
        members = functional.one_hot(nearest, count).to(x.dtype)
        sizes = members.sum(0)[:, None]
        centers = torch.where(sizes > 0, members.T @ x / sizes.clamp_min(1), spare)
    return centers


def perturb(
    dense: Mlp, x: Tensor, active: Tensor, centers: Tensor, noise: float, generator: torch.Generator
) -> Experts:
    """An expert per center.

    Args:
        dense: The parent's MLP.
        x: (tokens, hidden), the MLP's input.
        active: (tokens, intermediate), its features for x.
        centers: (experts, hidden), see `cluster`.
        noise: Standard deviation of the noise on a matrix, in units of its root mean square.
        generator: Of the CPU.
    """
    nearest = torch.cdist(functional.normalize(x, dim=1), centers).argmin(1)
    used = active.square() * dense.down.square().sum(0)
    by_cluster = torch.stack([used[nearest == i].mean(0) for i in range(len(centers))]).nan_to_num(0.0)
    relative = by_cluster / by_cluster.sum(0).clamp_min(torch.finfo(torch.float32).tiny)
    count = round(SHARE * len(dense.gate))

    def noisy(part: Tensor, whole: Tensor) -> Tensor:
        drawn = torch.randn(part.shape, generator=generator).to(part.device)
        return part + noise * whole.square().mean().sqrt() * drawn

    changed = []
    for of_expert in relative:
        features = of_expert.argsort(stable=True)[:count]
        part = dense.at(features)
        both = noisy(part.gate, dense.gate), noisy(part.up, dense.up), noisy(part.down, dense.down)
        changed.append((features, Mlp(*both)))
    return Experts(dense, changed)


@dataclass(frozen=True)
class Fit:
    """A router. weight: float32 (experts, hidden). before, after: The mixture's squared error in units of the variance
    of the dense output, with the first weight and with this one."""

    weight: Tensor
    before: float
    after: float


def mixture(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Mixtral's mixture: softmax over all experts, the largest `top_k`, and their weights divided by their sum.

    Args:
        logits: (tokens, experts).
        top_k: Experts per token.

    Returns:
        Probabilities, weights with zeros for experts not chosen, and 1 for chosen experts, all (tokens, experts).
    """
    probabilities = logits.softmax(-1)
    values, chosen = probabilities.topk(top_k, -1)
    zeros = torch.zeros_like(probabilities)
    weights = zeros.scatter(1, chosen, values / values.sum(-1, keepdim=True))
    return probabilities, weights, zeros.scatter(1, chosen, 1.0)


def first_weight(x: Tensor, centers: Tensor) -> Tensor:
    """A router (experts, hidden) whose logits are largest for the nearest center, with standard deviation 1 over x."""
    directions = functional.normalize(centers - centers.mean(0), dim=1)
    return directions / (x @ directions.T).std().clamp_min(torch.finfo(torch.float32).tiny)


def fit(x: Tensor, products: Tensor, first: Tensor, *, top_k: int, steps: int, generator: torch.Generator) -> Fit:
    """Train a router with `steps` of Adam on random tokens, from the weight `first`.

    The loss is the mixture's error in units of a single expert's, plus the load-balancing loss experts * sum(share of
    tokens * mean probability) (Switch Transformers, equation 4).

    Args:
        x: (tokens, hidden).
        products: (tokens, experts, experts), see `Experts.error_products`.
        first: (experts, hidden).
        top_k: Experts per token.
        steps: Optimizer steps.
        generator: Of the CPU.
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
        (value / single + BALANCE * load).backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        after = error(states, products)[0].item()
    return Fit(weight.detach() / scale, before, after)


@torch.no_grad()
def sample(
    model: PreTrainedModel, start: int, count: int, length: int, generator: torch.Generator, say: Callable[[str], None]
) -> Tensor:
    """Sample `count` sequences of `length` tokens at temperature 1: int64 (count, length) on the CPU.

    A sequence goes on after an end token, as the turns of a conversation do.

    Args:
        model: The parent.
        start: The first token of each sequence.
        count: Sequences.
        length: Tokens of each.
        generator: Of the CPU.
        say: Called with a line per batch.
    """
    batches = []
    for first in range(0, count, SAMPLED):
        ids = torch.full((min(SAMPLED, count - first), length), start)
        cache = None
        for position in range(1, length):
            new = ids[:, position - 1 : position].to(model.device)
            out = model(input_ids=new, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            probabilities = out.logits[:, -1].float().softmax(-1).cpu()
            ids[:, position] = torch.multinomial(probabilities, 1, generator=generator)[:, 0]
        batches.append(ids)
        say(f"sampled {first + len(ids):,} of {count:,} sequences")
    return torch.cat(batches)


@torch.no_grad()
def mlp_inputs(model: PreTrainedModel, ids: Tensor) -> list[Tensor]:
    """Per layer the normed states that its MLP reads, (tokens, hidden), on the model's device.

    The first token of a sequence of ids (sequences, length) is left out: its states are unlike those of all others, and
    the same for each sequence.
    """
    found: list[list[Tensor]] = [[] for _ in model.model.layers]

    def keep(layer: int) -> Callable[..., None]:
        def hook(_module: torch.nn.Module, inputs: tuple[Tensor, ...]) -> None:
            found[layer].append(inputs[0][:, 1:].flatten(0, 1))

        return hook

    hooks = [layer.mlp.register_forward_pre_hook(keep(i)) for i, layer in enumerate(model.model.layers)]
    try:
        for part in ids.split(READ):
            model.model(input_ids=part.to(model.device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return [torch.cat(parts) for parts in found]
