"""Random routing of tokens to experts, and grouped products in float64."""

from collections.abc import Callable, Iterator

import torch
from qarl_kernels.groups import Groups
from qarl_kernels.moe import reference
from torch import Tensor


def chosen(tokens: int, slots: int, count: int, seed: int = 0) -> Tensor:
    """Return (tokens, slots) int32: distinct experts per token, ascending. Few are popular, some get no token."""
    weights = torch.rand(count, generator=torch.Generator().manual_seed(seed + 1)) ** 3 + 1e-3
    noise = torch.rand(tokens, count, generator=torch.Generator().manual_seed(seed))
    return (noise.log() / weights).topk(slots).indices.sort().values.int().contiguous()


def grouped(tokens: int, slots: int, count: int, device: torch.device) -> Groups:
    return reference.groups_of(chosen(tokens, slots, count).to(device), count)


def all_to(expert: int, tokens: int, count: int, device: torch.device) -> Groups:
    """Return a routing with one slot, in which every token goes to `expert`."""
    return reference.groups_of(torch.full((tokens, 1), expert, device=device), count)


def parts(groups: Groups) -> Iterator[tuple[int, slice, Tensor]]:
    """Yield (expert, its sorted rows, their tokens) of every expert, including those without rows."""
    starts = groups.starts.tolist()
    for expert in range(groups.experts):
        rows = slice(starts[expert], starts[expert + 1])
        yield expert, rows, groups.order[rows].long() // groups.slots


def input_grad(groups: Groups, dy: Tensor, weight: Tensor) -> Tensor:
    """Return each row of dy (R, N) times its expert's part of the weight (E * N, K), in float64: (R, K)."""
    own = weight.double().chunk(groups.experts)
    return torch.cat([dy[rows].double() @ own[expert] for expert, rows, _ in parts(groups)])


def weight_grad(groups: Groups, gathered: bool, dy: Tensor, x: Tensor) -> Tensor:
    """Return dy^T @ x of each expert's rows, in float64: (E * N, K)."""
    own = [(dy[rows].double(), x[tokens if gathered else rows].double()) for _, rows, tokens in parts(groups)]
    return torch.cat([mine.t() @ its for mine, its in own])


def by_expert(groups: Groups, gathered: bool, x: Tensor, product: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Apply `product(rows of x, expert)` to the rows of each expert alone. Returns the results in sorted order."""
    own = [(x[tokens] if gathered else x[rows], expert) for expert, rows, tokens in parts(groups)]
    return torch.cat([product(mine, expert) for mine, expert in own if len(mine)])
