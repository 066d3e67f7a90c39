"""How the low-bit grouped products start: which rows a program has, and what is refused."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from qarl_kernels.blocks import tile_of
from qarl_kernels.moe.groups import Groups
from qarl_kernels.moe.tiles import lanes_of, most_tiles, source_rows, tile_rows


@triton.jit
def rows_of_program(
    order,
    starts,
    experts,
    slots,
    tiles,
    N,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LANES: tl.constexpr,
    GATHERED: tl.constexpr,
):
    """(expert, first, end, n, source) of this program.

    Its sorted rows are [first, end), BLOCK_M at most, none where first == end; its output features are [n, n + BLOCK_N)
    of the expert's. source (BLOCK_M,) int64: the rows of x that they read, row 0 for those beyond.
    """
    pid_m, pid_n = tile_of(tl.program_id(0), tiles, tl.cdiv(N, BLOCK_N))
    expert, first, end = tile_rows(starts, pid_m, experts, LANES, BLOCK_M)
    source = source_rows(order, first + tl.arange(0, BLOCK_M), end, slots, GATHERED)
    return expert, first, end, pid_n * BLOCK_N, source.to(tl.int64)


def rows_of_programs(groups: Groups, gathered: bool, block_m: int) -> dict[str, Any]:
    """The arguments of `rows_of_program` but N and the tile."""
    return {
        "order": groups.order,
        "starts": groups.starts,
        "experts": groups.experts,
        "slots": groups.slots,
        "tiles": most_tiles(groups, block_m),
        "LANES": lanes_of(groups.experts),
        "GATHERED": gathered,
    }


def check(name: str, x: Tensor, groups: Groups, gathered: bool, weight: tuple[int, int], n: int) -> None:
    """Raise ValueError unless x and a weight (E * n, K) fit the groups."""
    rows = groups.rows // groups.slots if gathered else groups.rows
    if x.shape != (rows, weight[1]) or weight[0] != groups.experts * n:
        raise ValueError(
            f"{name}: x {list(x.shape)} and the weight {list(weight)} of {groups.experts} experts of {n} features "
            f"do not belong together; x must be [{rows}, {weight[1]}]"
        )


def adjacent(x: Tensor) -> Tensor:
    """x with the features of a row next to each other."""
    return x if x.stride(1) == 1 else x.contiguous()


def empty(x: Tensor, groups: Groups, n: int, dtype: torch.dtype) -> Tensor:
    """Where the product of all rows goes, (R, n)."""
    return torch.empty(groups.rows, n, dtype=dtype, device=x.device)
