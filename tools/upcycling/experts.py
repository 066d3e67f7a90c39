"""Experts out of one dense MLP: each is whole, and has noise on the features that its own tokens use least.

Noise on all features makes experts that are all equally wrong about every token, and no choice among them helps. So the
tokens are put into as many clusters as there are experts, and an expert is wrong only about the intermediate features
that its cluster uses least compared with the others: there is then something to be gained by routing, and to be lost.
The features stay whole, none is split off into finer experts: weights that sum to one then give the parent's own
function where there is no noise.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

ITERATIONS = 12  # of k-means
ROWS = 2048  # tokens whose errors are in memory together


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

    def at(self, features: Tensor) -> Mlp:
        """The MLP of these intermediate features alone. features: int64 (count)."""
        return Mlp(self.gate[features], self.up[features], self.down[:, features])


@dataclass(frozen=True)
class Experts:
    """A dense MLP and what each expert has in its place. changed: of each expert, the features (count) that have noise,
    and the MLP of those features with it."""

    dense: Mlp
    changed: list[tuple[Tensor, Mlp]]

    def expert(self, index: int) -> Mlp:
        """One expert as it is stored."""
        features, noisy = self.changed[index]
        gate, up, down = self.dense.gate.clone(), self.dense.up.clone(), self.dense.down.clone()
        gate[features], up[features], down[:, features] = noisy.gate, noisy.up, noisy.down
        return Mlp(gate, up, down)

    def error_products(self, x: Tensor, active: Tensor) -> Tensor:
        """(tokens, experts, experts) inner products of the experts' errors about each token.

        x: (tokens, hidden) that the MLP reads. active: (tokens, intermediate), its features for x. An error is what
        the expert puts out less what the dense MLP does. For weights w that sum to one, w' P w is the squared error of
        the mixture. In units of the variance of the dense output, over the first `ROWS` tokens.
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
    """k-means of directions: the centers (count, hidden), of unit length before they were averaged.

    x: (tokens, hidden). generator: of the CPU. A cluster that loses all its tokens starts anew from one of them.
    """
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
    dense: Mlp, x: Tensor, active: Tensor, centers: Tensor, noise: float, share: float, generator: torch.Generator
) -> Experts:
    """An expert for each center.

    x: (tokens, hidden) that the MLP reads. active: (tokens, intermediate), its features for x. centers: (experts,
    hidden), see `cluster`. noise: standard deviation of what is added to a matrix, in units of the matrix' own root
    mean square. share: of the features, which gets it. generator: of the CPU.
    """
    nearest = torch.cdist(functional.normalize(x, dim=1), centers).argmin(1)
    used = active.square() * dense.down.square().sum(0)
    by_cluster = torch.stack([used[nearest == i].mean(0) for i in range(len(centers))]).nan_to_num(0.0)
    relative = by_cluster / by_cluster.sum(0).clamp_min(torch.finfo(torch.float32).tiny)
    count = round(share * len(dense.gate))

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
