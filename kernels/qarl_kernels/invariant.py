"""Row-invariant FP32 matrix products on the CPU.

A BLAS may sum the K products of one output element in an order that depends on the number of rows M, so the same
row gives other bits in a larger batch. Sampler and learner see the same row in batches of different size, therefore
every product here runs in row tiles of a few fixed sizes, each of which is *proved* at first use, per (N, K), to give
the bits of the 32-row tile on this machine. A size that does not is not used; 32 itself always is.

Seen (torch 2.13, AVX2 and AVX-512): M = 1, 2, 3, 5 differ from the rest, multiples of 4 agree. Larger tiles are worth
it: 576 x 1536 runs at 81 GFLOP/s with 32 rows and 128 with 512 (2 cores, AVX2).
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

BASE_TILE = 32
CANDIDATES = (512, 128, 64, 8)  # besides the base tile
MAX_OUTPUT = 1 << 23  # elements: a tile whose product is larger than this (32 MiB) is not worth its cache misses


@cache
def row_tiles(n: int, k: int, threads: int) -> tuple[int, ...]:
    """Row counts, descending, whose products agree bit for bit with the base tile for a weight of shape [n, k].

    `threads` is part of the key because the BLAS may split the work by it.
    """
    del threads
    generator = torch.Generator().manual_seed(n * 1_000_003 + k)
    sizes = [t for t in CANDIDATES if t * n <= MAX_OUTPUT]
    rows = max([BASE_TILE, *sizes])
    weight = torch.randn(n, k, generator=generator)
    x = torch.randn(rows, k, generator=generator)
    base = _in_tiles(x, weight, BASE_TILE)
    good = [t for t in sizes if torch.equal(_in_tiles(x, weight, t), base[: rows // t * t])]
    return tuple(sorted([BASE_TILE, *good], reverse=True))


def _in_tiles(x: Tensor, weight: Tensor, tile: int) -> Tensor:
    """The product of all whole tiles of x."""
    out = x.new_empty(x.shape[0] // tile * tile, weight.shape[0])
    for start in range(0, out.shape[0], tile):
        torch.mm(x[start : start + tile], weight.t(), out=out[start : start + tile])
    return out


def matmul(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T in FP32, each row's bits independent of the other rows and of their number.

    x: (M, K) float32, weight: (N, K) float32, contiguous, both on the CPU. Returns (M, N) float32, without gradient.
    """
    m, k = x.shape
    n = weight.shape[0]
    tiles = row_tiles(n, k, torch.get_num_threads())
    smallest = tiles[-1]
    padded = -(-m // smallest) * smallest
    if padded != m:
        x = F.pad(x, (0, 0, 0, padded - m))
    x = x.contiguous()
    out = x.new_empty(padded, n)
    start = 0
    for tile in tiles:
        while padded - start >= tile:
            torch.mm(x[start : start + tile], weight.t(), out=out[start : start + tile])
            start += tile
    return out[:m]
