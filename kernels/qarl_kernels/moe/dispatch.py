"""Sort the (token, slot) pairs of a batch by expert, on the device and without synchronizing, also in a CUDA graph."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from qarl_kernels.groups import Groups
from qarl_kernels.launch import launch
from qarl_kernels.moe import reference

# (maximum rows, pairs that a program reads at once, warps). For the few pairs of a decode, one warp needs no barrier.
SORTS = ((128, 128, 1), (16_384, 2048, 8), (math.inf, 8192, 16))


@triton.jit(do_not_specialize=["rows"])
def _sort_kernel(
    experts,  # (rows,) i32 or i64
    order,  # (rows,) i32
    place,  # (rows,) i32
    starts,  # (count + 1,) i32
    rows,
    count,
    PAIRS: tl.constexpr,
):
    """One program per expert: count the pairs of the experts before it, then place its own behind them in order."""
    mine = tl.program_id(0)
    lane = tl.arange(0, PAIRS)
    before = tl.zeros([PAIRS], tl.int32)
    for first in range(0, rows, PAIRS):
        expert = _experts(experts, first + lane, rows, count)
        before += (expert < mine).to(tl.int32)
    at = tl.sum(before, axis=0)
    tl.store(starts + mine, at)
    tl.store(starts + count, rows, mask=mine == count - 1)
    for first in range(0, rows, PAIRS):
        pair = first + lane
        own = _experts(experts, pair, rows, count) == mine
        row = at + tl.cumsum(own.to(tl.int32), axis=0) - 1
        tl.store(place + pair, row, mask=own)
        tl.store(order + row, pair, mask=own)
        at += tl.sum(own.to(tl.int32), axis=0)


@triton.jit
def _experts(experts, pair, rows, count):
    """The experts of pairs, clamped to the valid range; `count` beyond the last pair."""
    expert = tl.load(experts + pair, mask=pair < rows, other=0).to(tl.int32)
    return tl.where(pair < rows, tl.minimum(tl.maximum(expert, 0), count - 1), count)


def groups_of(experts: Tensor, count: int, kernels: bool = False) -> Groups:
    """Sort the pairs by expert; pairs of one expert keep their order.

    Args:
        experts: (T, k) int32 or int64, contiguous, the experts of each token. Ids outside [0, count) are clamped, so
            that nothing reads beyond a weight.
        count: Number of experts, E.
        kernels: Use one Triton kernel instead of plain torch. The result is the same.

    Raises:
        ValueError: experts is not such a matrix, or there is no expert.
    """
    if experts.ndim != 2 or experts.dtype not in (torch.int32, torch.int64) or not experts.is_contiguous() or count < 1:
        raise ValueError(
            f"experts must be a contiguous int32 or int64 matrix (tokens, slots) of {count} > 0 experts, not "
            f"{experts.dtype} {tuple(experts.shape)}"
        )
    if not kernels:
        return reference.groups_of(experts, count)
    rows = experts.numel()
    _, pairs, warps = next(sort for sort in SORTS if rows <= sort[0])
    order, place = (torch.empty(rows, dtype=torch.int32, device=experts.device) for _ in range(2))
    starts = torch.empty(count + 1, dtype=torch.int32, device=experts.device)
    launch(
        _sort_kernel,
        (count,),
        num_warps=warps,
        experts=experts,
        order=order,
        place=place,
        starts=starts,
        rows=rows,
        count=count,
        PAIRS=pairs,
    )
    return Groups(count, experts.shape[1], order, place, starts)
