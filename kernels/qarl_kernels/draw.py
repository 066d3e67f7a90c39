"""Sample random tokens on the device, from a separate random stream per row.

`draw` inverts a row's cumulative distribution in vocabulary order (native engine). `exponential_` fills rows with
exponential noise, and argmax(p / noise) then draws from p (vLLM's sampler). Nothing here synchronizes with the device.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from qarl_kernels.integers import cdiv, next_power_of_2
from qarl_kernels.launch import launch

TILE = 2048  # vocabulary entries per program
# Truncated tokens keep exp(-50) = 1.9e-22 of the top token's probability and must never be drawn. Other tokens below
# this threshold are not drawn either, which is no loss: half a million of them weigh less than one step of a uniform
# float64.
LEAST = tl.constexpr(2.5e-22)

BLOCK = 1024  # Philox calls of four values each, per program
# Uniforms from 32 random bits, strictly inside (0, 1), so that the noise is neither infinite nor 0.
STEP = tl.constexpr(2.0**-32)
SMALLEST = tl.constexpr(2.0**-33)
LARGEST = tl.constexpr(1.0 - 2.0**-24)


@triton.jit
def _weights(logits, lse, start, V, TILE: tl.constexpr):
    """Return the probabilities (TILE,) float64 of the tokens from `start` on, 0 for tokens that are never drawn."""
    column = start + tl.arange(0, TILE)
    z = tl.load(logits + column, mask=column < V, other=float("-inf"))
    p = tl.exp(z - lse)
    return tl.where(p > LEAST, p, 0.0).to(tl.float64)


@triton.jit
def _place(weights, target, SIZE: tl.constexpr):
    """Find the first of the weights (SIZE,) whose running sum exceeds `target`, or else the last nonzero one.

    Returns its index (-1 if all weights are 0) and the sum of the weights before it.
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
    sums,  # (R, tiles) f64, sum of the probabilities of each tile
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
    """Find the tile that a row's point falls into, then the token inside that tile."""
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
    """Draw one token per row: the first whose cumulative probability exceeds the row's point.

    Sums are float64, in an order that the tile's shape fixes, so a row's token depends on its own logits and point.

    Args:
        logits: (R, V) float32, last dimension contiguous, arbitrary row stride. Logits of -inf and truncated tokens
            are never drawn.
        lse: (R,) float32, log-sum-exp of each row.
        points: (R,) float64 in [0, 1].

    Returns:
        Token ids (R,) int64; 0 for a row with NaN.
    """
    rows, vocabulary = logits.shape
    assert logits.dtype == torch.float32 and logits.stride(1) == 1, (logits.dtype, logits.stride())
    assert lse.shape == points.shape == (rows,) and points.dtype == torch.float64, (lse.shape, points.dtype)
    tiles = cdiv(vocabulary, TILE)
    sums = torch.empty(rows, tiles, dtype=torch.float64, device=logits.device)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    shared: dict[str, Any] = {
        "logits": logits,
        "lse": lse,
        "sums": sums,
        "V": vocabulary,
        "stride": logits.stride(0),
        "TILE": TILE,
    }
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


@triton.jit
def _noise(bits):
    uniform = bits.to(tl.uint32, bitcast=True).to(tl.float32) * STEP + SMALLEST
    return -tl.log(tl.minimum(uniform, LARGEST))


# seeds and counters may be rows of one tensor; then the alignment of the second depends on the number of rows.
@triton.jit(do_not_specialize=["seeds", "counters"])
def _exponential(
    out,  # (R, columns) f32
    seeds,  # (R,) i64
    counters,  # (R,) i64
    columns,
    stride,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    draw = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    counter = tl.load(counters + row).to(tl.uint32)
    zero = draw * 0
    first, second, third, fourth = tl.philox(tl.load(seeds + row), draw, zero + counter, zero, zero)
    column = draw * 4
    start = out + row * stride
    tl.store(start + column, _noise(first), column < columns)
    tl.store(start + column + 1, _noise(second), column + 1 < columns)
    tl.store(start + column + 2, _noise(third), column + 2 < columns)
    tl.store(start + column + 3, _noise(fourth), column + 3 < columns)


def exponential_(out: Tensor, seeds: Tensor, counters: Tensor) -> Tensor:
    """Fill `out` with exponential noise of rate 1, positive and finite, by Philox 4x32-10 (Salmon et al. 2011).

    One launch serves all rows; a torch generator per row would take one launch per row.

    Args:
        out: (R, C) float32, last dimension contiguous.
        seeds: (R,) int64, seed of each row.
        counters: (R,) int64 below 2^32, number of earlier draws with the row's seed.

    Returns:
        out
    """
    rows, columns = out.shape
    assert out.dtype == torch.float32 and out.stride(1) == 1, (out.dtype, out.stride())
    assert seeds.shape == counters.shape == (rows,), (seeds.shape, counters.shape)
    grid = (rows, cdiv(columns, 4 * BLOCK))
    launch(
        _exponential, grid, out=out, seeds=seeds, counters=counters, columns=columns, stride=out.stride(0), BLOCK=BLOCK
    )
    return out
