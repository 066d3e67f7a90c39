"""Pieces that the product kernels share: which tile a program works on, how it reads an operand, the product."""

from __future__ import annotations

import triton
import triton.language as tl

from qarl_kernels.casts import widen
from qarl_kernels.launch import INTERPRETED

COMPILED = tl.constexpr(not INTERPRETED)


@triton.jit
def tile_of(pid, num_m, num_n):
    """Tile (m, n) of a program. Eight tiles of x share a stretch of the weight in the L2 cache."""
    per_group = 8 * num_n
    first = pid // per_group * 8
    size = min(num_m - first, 8)
    return first + (pid % per_group) % size, (pid % per_group) // size


@triton.jit
def operand(source, rows, limit, k, K, stride, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr):
    """Rows [rows, rows + BLOCK) and features [k, k + BLOCK_K) of a matrix (limit, K), zeros outside.

    source: a tensor descriptor (TMA) or a pointer whose rows are `stride` apart.
    """
    if TMA:
        tile = source.load([rows, k])
    else:
        r = rows + tl.arange(0, BLOCK)
        c = k + tl.arange(0, BLOCK_K)
        inside = (r < limit)[:, None] & (c < K)[None, :]
        tile = tl.load(source + r.to(tl.int64)[:, None] * stride + c[None, :], mask=inside, other=0.0)
    return tile


@triton.jit
def gathered(rows, k, K, BLOCK_K: tl.constexpr):
    """Features [k, k + BLOCK_K) of the rows that the pointers `rows` (BLOCK,) begin, zeros beyond K."""
    c = k + tl.arange(0, BLOCK_K)
    return tl.load(rows[:, None] + c[None, :], mask=(c < K)[None, :], other=0.0)


@triton.jit
def int4_rows(tiled, rn, K, meta_n):
    """Pointers to the first words of rows rn (BLOCK_N, 16) of a tiled int4 weight, and rn kept inside it.

    tiled: (N/16, K/128, 16, 16) int32; meta_n: rows it holds, a multiple of 16. The next block is 256 words on.
    """
    row = tl.minimum(rn, meta_n - 1)
    first = (row // 16).to(tl.int64) * tl.cdiv(K, 128) * 256 + (row % 16) * 16
    return tiled + first[:, None] + tl.arange(0, 16)[None, :], row


@triton.jit
def dot(a, b, acc):
    """acc + a @ b in acc's dtype. a (M, K), b (K, N): bf16, fp16, e4m3 with acc float32, or int8 with acc int32."""
    if COMPILED or acc.dtype == tl.int32:
        result = tl.dot(a, b, acc, out_dtype=acc.dtype)
    else:
        # Triton's interpreter (3.6, 3.9) multiplies the bit patterns of bf16, and numpy's float32 sums in an order that
        # depends on the number of rows and on the CPU. Of float64 ones nothing is left after the rounding.
        result = acc + tl.dot(widen(a).to(tl.float64), widen(b).to(tl.float64)).to(tl.float32)
    return result


@triton.jit
def dot_of_parts(a, b, acc):
    """acc + a[0] @ b[0]^T + a[1] @ b[1]^T ..., added as `dot` adds tiles of which these are the columns side by side.

    a, b: tuples of (M, K) and (N, K), bf16 or fp16, K a multiple of 16, that a tensor core takes at a time; acc fp32.
    """
    if COMPILED:
        for i in tl.static_range(len(a)):
            acc = dot(a[i], b[i].T, acc)
    else:
        total = tl.zeros(acc.shape, tl.float64)
        for i in tl.static_range(len(a)):
            total += tl.dot(widen(a[i]).to(tl.float64), widen(b[i].T).to(tl.float64))
        acc += total.to(tl.float32)
    return acc


@triton.jit
def dot_of_rows(a, b, acc, SWAP: tl.constexpr):
    """acc + a @ b^T, (BLOCK_M, BLOCK_N), or with SWAP acc + b @ a^T, its transpose. a (BLOCK_M, K), b (BLOCK_N, K)."""
    if SWAP:
        acc = dot(b, a.T, acc)
    else:
        acc = dot(a, b.T, acc)
    return acc


@triton.jit
def no_sum(BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SWAP: tl.constexpr, ACC: tl.constexpr):
    """Zeros, where `dot_of_rows` starts."""
    if SWAP:
        acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=ACC)
    else:
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=ACC)
    return acc


@triton.jit
def of_rows(acc, SWAP: tl.constexpr):
    """The sum of `dot_of_rows` as (BLOCK_M, BLOCK_N)."""
    if SWAP:
        acc = acc.T
    return acc
