"""Building blocks of the product kernels: the tile a program computes, how it loads operands, the product itself."""

from __future__ import annotations

import triton
import triton.language as tl

from qarl_kernels.casts import widen
from qarl_kernels.launch import INTERPRETED

COMPILED = tl.constexpr(not INTERPRETED)


@triton.jit
def tile_of(pid, num_m, num_n):
    """Return (m, n), the indices of program pid's tile. Groups of eight tiles along M share weight columns in the
    L2 cache.
    """
    per_group = 8 * num_n
    first = pid // per_group * 8
    size = min(num_m - first, 8)
    return first + (pid % per_group) % size, (pid % per_group) // size


@triton.jit
def expert_rows(starts, tile, EXPERTS: tl.constexpr, LANES: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return (expert, first, end): the tile has rows [first, end), at most BLOCK_M, all of one expert.

    starts: (EXPERTS + 1,) i32, see `Groups`. LANES: EXPERTS rounded up to a power of two. A tile beyond the last one
    has first == end.
    """
    lane = tl.arange(0, LANES)
    exists = lane < EXPERTS
    start = tl.load(starts + lane, mask=exists, other=0)
    count = tl.load(starts + lane + 1, mask=exists, other=0) - start
    tiles = (count + BLOCK_M - 1) // BLOCK_M
    after = tl.cumsum(tiles, axis=0)
    mine = (after > tile) & (after - tiles <= tile)  # at most one lane: experts without rows have no tiles
    before = (tile - (after - tiles)) * BLOCK_M
    # Every program waits for this before it loads a weight, so three numbers share one reduction, which is a barrier.
    number = (lane.to(tl.int64) << 48) | (tl.minimum(count - before, BLOCK_M).to(tl.int64) << 32) | (start + before)
    found = tl.sum(tl.where(mine, number, 0), axis=0)
    first = found.to(tl.int32)
    return (found >> 48).to(tl.int32), first, first + ((found >> 32) & 0xFFFF).to(tl.int32)


@triton.jit
def program_tile(
    starts, M, N, EXPERTS: tl.constexpr, LANES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Return (expert, m, end, n): this program computes rows [m, end), at most BLOCK_M, and columns [n, n + BLOCK_N) of
    out.

    In a dense product (EXPERTS == 0) the expert is 0 and end is M. A grouped product launches enough programs for any
    distribution of rows over the experts; unneeded programs have m == end.
    """
    if EXPERTS:
        num_n = tl.cdiv(N, BLOCK_N)
        pid_m, pid_n = tile_of(tl.program_id(0), tl.num_programs(0) // num_n, num_n)
        expert, m, end = expert_rows(starts, pid_m, EXPERTS, LANES, BLOCK_M)
    else:
        pid_m, pid_n = tile_of(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N))
        expert, m, end = 0, pid_m * BLOCK_M, M
    return expert, m, end, pid_n * BLOCK_N


@triton.jit
def source_rows(order, rows, end, SLOTS: tl.constexpr):
    """Return the row of x that each output row reads: its token's row, or the same row if order is None. Rows from
    `end` on read row 0.

    order: (R,) i32, the (token, slot) pair of each sorted row, SLOTS per token.
    """
    if order is None:
        source = tl.where(rows < end, rows, 0)
    else:
        source = tl.load(order + rows, mask=rows < end, other=0) // SLOTS
    return source


@triton.jit
def operand(source, rows, limit, k, K, stride, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr):
    """Load rows [rows, rows + BLOCK) and features [k, k + BLOCK_K) of a matrix (limit, K), with zeros outside.

    source: a tensor descriptor (TMA), or a pointer and `stride` between rows.
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
def gathered_rows(rows, k, K, BLOCK_K: tl.constexpr):
    """Load features [k, k + BLOCK_K) of the rows that start at the pointers `rows` (BLOCK,), with zeros beyond K."""
    c = k + tl.arange(0, BLOCK_K)
    return tl.load(rows[:, None] + c[None, :], mask=(c < K)[None, :], other=0.0)


@triton.jit
def int4_rows(tiled, rn, K, meta_n):
    """Return pointers (BLOCK_N, 16) to the first words of rows rn of a tiled int4 weight, and rn clamped to its rows.

    tiled: (N / 16, K / 128, 16, 16) i32; meta_n: its rows, a multiple of 16. The next block of a row is 256 words on.
    """
    row = tl.minimum(rn, meta_n - 1)
    first = (row // 16).to(tl.int64) * tl.cdiv(K, 128) * 256 + (row % 16) * 16
    return tiled + first[:, None] + tl.arange(0, 16)[None, :], row


@triton.jit
def dot(a, b, acc):
    """Return acc + a @ b in acc's dtype. a (M, K), b (K, N): bf16, fp16 or e4m3 with a float32 acc, int8 with an
    int32 acc.
    """
    if COMPILED or acc.dtype == tl.int32:
        result = tl.dot(a, b, acc, out_dtype=acc.dtype)
    else:
        # Triton's interpreter (3.6, 3.9) multiplies the bit patterns of bf16, and numpy's float32 sums in an order that
        # depends on the number of rows and on the CPU. A float64 sum is the same in any order after the rounding.
        result = acc + tl.dot(widen(a).to(tl.float64), widen(b).to(tl.float64)).to(tl.float32)
    return result


@triton.jit
def product_tile(
    a,
    b,
    m,
    n,
    M,
    N,
    K,
    steps,
    stride_a,
    stride_b,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TMA: tl.constexpr,
):
    """Return the tile of a @ b^T at [m, n], float32 (BLOCK_M, BLOCK_N): one chain of products along K.

    a: (M, K), b: (N, K), as for `operand`. steps: K / BLOCK_K, rounded up.
    """
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for step in range(steps):
        left = operand(a, m, M, step * BLOCK_K, K, stride_a, BLOCK_M, BLOCK_K, TMA)
        right = operand(b, n, N, step * BLOCK_K, K, stride_b, BLOCK_N, BLOCK_K, TMA)
        acc = dot(left, right.T, acc)
    return acc


@triton.jit
def dot_of_parts(a, b, acc):
    """Return acc + a[0] @ b[0]^T + a[1] @ b[1]^T ..., in the order in which `dot` sums the parts concatenated along K.

    a, b: tuples of (M, K) and (N, K), bf16 or fp16, K a multiple of the tensor core's 16; acc fp32.
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
    """Return acc + a @ b^T (BLOCK_M, BLOCK_N); with SWAP, acc + b @ a^T (BLOCK_N, BLOCK_M).

    a: (BLOCK_M, K); b: (BLOCK_N, K).
    """
    if SWAP:
        acc = dot(b, a.T, acc)
    else:
        acc = dot(a, b.T, acc)
    return acc


@triton.jit
def no_sum(BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SWAP: tl.constexpr, ACC: tl.constexpr):
    """Return the zero accumulator of `dot_of_rows`."""
    if SWAP:
        acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=ACC)
    else:
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=ACC)
    return acc


@triton.jit
def of_rows(acc, SWAP: tl.constexpr):
    """Return the accumulator of `dot_of_rows` as (BLOCK_M, BLOCK_N)."""
    if SWAP:
        acc = acc.T
    return acc


@triton.jit
def split_columns(y):
    """Split (M, N) into left and right columns. Every value stays in its thread."""
    return tl.split(y.reshape(y.shape[0], 2, y.shape[1] // 2).permute(0, 2, 1))
