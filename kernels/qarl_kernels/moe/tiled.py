"""How a grouped kernel starts that reads the tiled 4-bit weight (E * N, K) of all experts, see `qarl_kernels.tile`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qarl_kernels.direct import Descriptor
from qarl_kernels.integers import cdiv
from qarl_kernels.launch import launch, supports_tma
from qarl_kernels.moe.dispatch import rows_in_order
from qarl_kernels.moe.groups import Groups
from qarl_kernels.moe.starting import adjacent, check, empty, rows_of_programs
from qarl_kernels.planes import BLOCK
from qarl_kernels.tuning import Tile


def run_tiled(
    kernel: Any,
    x: Tensor,
    tiled: Tensor,
    n: int,
    groups: Groups,
    gathered: bool,
    out_dtype: torch.dtype,
    tile: Tile,
    wide: bool,
    **own: Any,
) -> Tensor:
    """Launch a kernel that multiplies rows of x with the tiled weights of their experts, n output features each.

    wide: the kernel is a 16-bit `wide` one, and takes x as its tile says: the tensor memory accelerator reads rows that
    lie one after the other, so rows of tokens are put in order first. own: arguments that only this kernel has.
    Returns (R, n) of out_dtype, in sorted order.
    """
    k = x.shape[1]
    if tiled.shape[:2] != (cdiv(groups.experts * n, 16), cdiv(k, BLOCK)):
        raise ValueError(
            f"x has {k} features, which a tiled weight {list(tiled.shape)} of {groups.experts} x {n} has not"
        )
    check("the experts' product", x, groups, gathered, (groups.experts * n, k), n)
    x, out = adjacent(x), empty(x, groups, n, out_dtype)
    tma = False
    if wide:
        tma = tile.tma and supports_tma(x)
        if tma and gathered:
            x, gathered = rows_in_order(x, groups), False
        own |= {"TMA": tma, "SPLIT": tile.split}
    rows = rows_of_programs(groups, gathered, tile.block_m)
    launch(
        kernel,
        (rows["tiles"] * cdiv(n, tile.block_n),),
        num_warps=tile.warps,
        num_stages=tile.stages,
        x=Descriptor(x, (tile.block_m, BLOCK // 2 if tile.split else BLOCK)) if tma else x,
        tiled=tiled,
        out=out,
        N=n,
        K=k,
        stride_xm=x.stride(0),
        stride_om=n,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        EVEN=k % BLOCK == 0 and x.stride(0) * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0,
        **own,
        **rows,
    )
    return out
