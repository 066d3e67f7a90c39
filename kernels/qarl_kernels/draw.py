"""Drawing tokens on the device: the inverse of each row's cumulative distribution, in the order of the vocabulary.

One kernel sums the probabilities of tiles of the vocabulary. A second finds, for each row, the tile that its point
falls into, and the token in it. Sums are float64 in an order that the tile's shape gives, so that a row's token depends
on its own logits and point alone. Nothing waits for the device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from qarl_kernels.integers import cdiv, next_power_of_2
from qarl_kernels.launch import launch

TILE = 2048  # tokens of the vocabulary that one program weighs
# What truncation cuts keeps exp(-50) = 1.9e-22 of the likeliest token's probability, and must never be drawn. Nothing
# below this is; half a million such tokens have less than the step of a uniform number.
LEAST = tl.constexpr(2.5e-22)


@triton.jit
def _weights(logits, lse, start, V, TILE: tl.constexpr):
    """Probabilities (TILE,) float64 of the tokens from `start` on, 0 of those that are never drawn."""
    column = start + tl.arange(0, TILE)
    z = tl.load(logits + column, mask=column < V, other=float("-inf"))
    p = tl.exp(z - lse)
    return tl.where(p > LEAST, p, 0.0).to(tl.float64)


@triton.jit
def _place(weights, target, SIZE: tl.constexpr):
    """The first of the weights (SIZE,) above whose sum so far `target` is not, or else the last; never one of 0.

    Returns its index, -1 where all are 0, and the sum before it.
    """
    index = tl.arange(0, SIZE)
    upto = tl.cumsum(weights, 0)
    first = tl.min(tl.where((weights > 0) & (upto > target), index, SIZE), 0)
    last = tl.max(tl.where(weights > 0, index, -1), 0)
    found = tl.where(first < SIZE, first, last)
    return found, tl.sum(tl.where(index == found, upto - weights, 0.0), 0)


@triton.jit(do_not_specialize=["stride"])
def weigh_kernel(
    logits,  # (R, V) f32
    lse,  # (R,) f32
    sums,  # (R, TILES) f64
    V,
    stride,
    TILE: tl.constexpr,
):
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    weights = _weights(logits + row * stride, tl.load(lse + row), tile * TILE, V, TILE)
    tl.store(sums + row * tl.num_programs(0) + tile, tl.sum(weights, 0))


@triton.jit(do_not_specialize=["stride"])
def draw_kernel(
    logits,  # (R, V) f32
    lse,  # (R,) f32
    sums,  # (R, tiles) f64
    points,  # (R,) f64
    tokens,  # (R,) i64
    V,
    stride,
    tiles,
    TILE: tl.constexpr,
    TILES: tl.constexpr,  # at least `tiles`, a power of two
):
    row = tl.program_id(0).to(tl.int64)
    number = tl.arange(0, TILES)
    weights = tl.load(sums + row * tiles + number, mask=number < tiles, other=0.0)
    target = tl.load(points + row) * tl.sum(weights, 0)
    tile, before = _place(weights, target, TILES)
    start = tl.maximum(tile, 0) * TILE
    weights = _weights(logits + row * stride, tl.load(lse + row), start, V, TILE)
    place, _ = _place(weights, target - before, TILE)
    tl.store(tokens + row, (start + tl.maximum(place, 0)).to(tl.int64))


def draw(logits: Tensor, lse: Tensor, points: Tensor) -> Tensor:
    """Token ids (R,) int64, the first whose probability and those before it exceed the row's point, of the whole.

    logits: (R, V) float32, rows contiguous, any distance apart; -inf and what truncation cuts is never drawn. lse: (R,)
    float32, their log-sum-exp. points: (R,) float64 in [0, 1]. A row that is no distribution (NaN) gives token 0.
    """
    rows, vocabulary = logits.shape
    assert logits.dtype == torch.float32 and logits.stride(1) == 1, (logits.dtype, logits.stride())
    assert lse.shape == points.shape == (rows,) and points.dtype == torch.float64, (lse.shape, points.dtype)
    tiles = cdiv(vocabulary, TILE)
    sums = torch.empty(rows, tiles, dtype=torch.float64, device=logits.device)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    shared = {"logits": logits, "lse": lse, "sums": sums, "V": vocabulary, "stride": logits.stride(0), "TILE": TILE}
    launch(weigh_kernel, (tiles, rows), **shared)
    launch(
        draw_kernel,
        (rows,),
        num_warps=8,
        points=points,
        tokens=tokens,
        tiles=tiles,
        TILES=next_power_of_2(tiles),
        **shared,
    )
    return tokens


def draw_reference(logits: Tensor, lse: Tensor, points: Tensor) -> Tensor:
    """What `draw` gives, in plain torch."""
    p = (logits - lse[:, None]).exp()
    weights = torch.where(p > LEAST.value, p, 0.0).double()
    upto = weights.cumsum(-1)
    kept = weights > 0
    hit = kept & (upto > (points * upto[:, -1])[:, None])
    order = torch.arange(logits.shape[1], device=logits.device)
    last = torch.where(kept, order, 0).amax(-1)
    return torch.where(hit.any(-1), hit.int().argmax(-1), last)
