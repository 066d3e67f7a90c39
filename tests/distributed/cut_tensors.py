"""Cut tensors into pieces for ranks, between rows or at any element."""

import random
from itertools import pairwise

import torch
from torch import Tensor

from qarl.distributed.rows import cut
from qarl.storage.pieces import Piece


def some_tensors(seed: int) -> dict[str, dict[str, Tensor]]:
    """Return master weights of odd shapes, and their optimizer state."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"embed.weight": (5, 24), "layers.0.weight": (7, 3), "norm.weight": (11,), "tiny": (1,), "none": (0, 4)}
    masters = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    optimizer = {f"{name}/exp_avg": torch.randn(value.shape, generator=generator) for name, value in masters.items()}
    optimizer |= {f"{name}/step": torch.tensor(float(seed)) for name in masters}
    return {"masters": masters, "optimizer": optimizer}


def cut_rows(tensors: dict[str, dict[str, Tensor]], rank: int, count: int) -> list[Piece]:
    """Give each rank whole rows of each tensor; scalars are on the first rank."""
    pieces = []
    for group, members in tensors.items():
        for name, tensor in members.items():
            rows = cut(tensor.shape[0], 1, count)[rank] if tensor.ndim else range(int(rank == 0))
            width = tensor[0].numel() if tensor.ndim and tensor.shape[0] else 1
            flat = tensor.reshape(-1)[rows.start * width : rows.stop * width]
            pieces.append(Piece(group, name, tuple(tensor.shape), rows.start * width, flat))
    return pieces


def cut_anywhere(tensors: dict[str, dict[str, Tensor]], rank: int, count: int, seed: int) -> list[Piece]:
    """Give random ranks ranges of the flattened tensors; a rank may get none or several ranges of a tensor."""
    rng, pieces = random.Random(seed), []
    for group, members in tensors.items():
        for name, tensor in members.items():
            size = tensor.numel()
            ends = sorted({0, size, *(rng.randint(0, size) for _ in range(rng.randrange(2 * count)))})
            owners = [(rng.randrange(count), span) for span in pairwise(ends)]
            mine = [span for owner, span in owners if owner == rank] or [(0, 0)]
            pieces += [
                Piece(group, name, tuple(tensor.shape), start, tensor.reshape(-1)[start:stop]) for start, stop in mine
            ]
    return pieces
