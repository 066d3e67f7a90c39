"""Row-invariant float32 matrix products on the CPU.

A BLAS may sum the K products of an output element in an order that depends on the number of rows M, so the same row
gets other bits in a larger batch. Sampler and learner see the same row in batches of different sizes. So every product
here runs in row tiles of a few fixed sizes. At first use, per (N, K), each size is checked to give the bits of the
32-row tile on this machine. Sizes that fail are not used; 32 always is.

Measured (torch 2.13, AVX2 and AVX-512): M = 1, 2, 3, 5 differ from the rest, multiples of 4 agree. Larger tiles pay
off: 576 x 1536 runs at 81 GFLOP/s with 32 rows and at 128 with 512 (2 cores, AVX2).
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

BASE_TILE = 32
CANDIDATES = (512, 128, 64, 8)  # besides the base tile
MAX_OUTPUT = 1 << 23  # elements (32 MiB): tiles with a larger product lose by cache misses


@cache
def row_tiles(n: int, k: int, threads: int) -> tuple[int, ...]:
    """Return the row counts, descending, whose products have the base tile's bits for a weight (n, k).

    threads: Part of the cache key, because the BLAS may split the work by it.
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
    """Return the product of all whole tiles of x."""
    out = x.new_empty(x.shape[0] // tile * tile, weight.shape[0])
    for start in range(0, out.shape[0], tile):
        torch.mm(x[start : start + tile], weight.t(), out=out[start : start + tile])
    return out


def matmul(x: Tensor, weight: Tensor) -> Tensor:
    """Compute x @ weight.T; the bits of a row do not depend on the other rows or their number.

    Args:
        x: (M, K) float32 on the CPU.
        weight: (N, K) float32 on the CPU, contiguous.

    Returns:
        (M, N) float32, without gradient.
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
