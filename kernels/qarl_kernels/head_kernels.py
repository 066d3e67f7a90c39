"""Triton kernels of the output layer; `qarl_kernels.head` launches and documents them.

A tile of logits is computed by the chain of tensor-core products of `gemm.gemm_kernel`, so it has the bits of
`gemm.dense` with a float32 result. It is used in registers: reduced to a few numbers per row, or turned into its
gradient.

Batch invariance: the sums of a row run over the columns of one tile in the order of the tile's layout, and over tiles
from first to last. Both orders depend on the tile's shape and warps, which must not depend on the number of rows. So no
kernel is specialized on a row count, and row strides that are read in blocks are always multiples of 128.
"""

from __future__ import annotations

import triton
import triton.language as tl

from qarl_kernels.blocks import product_tile, split_columns, tile_of
from qarl_kernels.casts import narrow
from qarl_kernels.truncation import CUT_LOGIT_GAP

_GAP = tl.constexpr(CUT_LOGIT_GAP)
_FAR_BELOW = tl.constexpr(-1e30)


@triton.jit
def _cut(y, highest, log_min_p):
    """Return the mask of logits y (M, N) that min-p truncates. highest: (M,), the largest logit of each whole row."""
    return y < (highest + log_min_p)[:, None]


@triton.jit
def _store_quarters(out, y, m, n):
    """Store a tile (M, N) at [m, n] in quarters: the pipeline leaves no shared memory to stage more of it."""
    left, right = split_columns(y)
    first, second = split_columns(left)
    third, fourth = split_columns(right)
    width: tl.constexpr = y.shape[1] // 4
    out.store([m, n], first)
    out.store([m, n + width], second)
    out.store([m, n + 2 * width], third)
    out.store([m, n + 3 * width], fourth)


@triton.jit(do_not_specialize=["M", "programs"])
def statistics_kernel(
    x,  # (M, K) 16-bit or its descriptor
    w,  # (V, K) of x's dtype or its descriptor
    targets,  # (M,) i64 or None
    top,  # (M,) f32, largest logit of each row; None unless CUT
    partial,  # (3, tiles, padded) f32: maximum, sum of e = exp(z - maximum), sum of (z - maximum) e
    target_logit,  # (M,) f32; None without targets
    logits,  # (M, V) f32 or its descriptor, receives z; or None
    M,
    V,
    K,
    padded,
    stride_xm,
    stride_wn,
    stride_logits,
    scale,
    log_min_p,
    programs,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    RAGGED: tl.constexpr,  # V is not a multiple of BLOCK_N
    CUT: tl.constexpr,
    TMA: tl.constexpr,
    PERSISTENT: tl.constexpr,
):
    """Reduce each tile of z = scale * x @ w^T to a maximum and two sums per row.

    With CUT, logits under top + log_min_p become top - 50, except in target_logit.
    """
    num_m = tl.cdiv(M, BLOCK_M)
    num_n = tl.cdiv(V, BLOCK_N)
    steps = tl.cdiv(K, BLOCK_K)
    tl.assume(steps > 0)
    for pid in tl.range(tl.program_id(0), num_m * num_n, programs, flatten=PERSISTENT):
        pid_m, pid_n = tile_of(pid, num_m, num_n)
        m = pid_m * BLOCK_M
        n = pid_n * BLOCK_N
        y = product_tile(x, w, m, n, M, V, K, steps, stride_xm, stride_wn, BLOCK_M, BLOCK_N, BLOCK_K, TMA) * scale
        rm = m + tl.arange(0, BLOCK_M)
        column = tl.arange(0, BLOCK_N)
        if targets is not None:
            target = (tl.load(targets + rm, mask=rm < M, other=-1) - n).to(tl.int32)
            chosen = tl.sum(tl.where(column[None, :] == target[:, None], y, 0.0), axis=1)
            tl.store(target_logit + rm, chosen, mask=(rm < M) & (target >= 0) & (target < BLOCK_N))
        if CUT:
            highest = tl.load(top + rm, mask=rm < M, other=0.0)
            y = tl.where(_cut(y, highest, log_min_p), (highest - _GAP)[:, None], y)
        if logits is not None:
            if TMA:
                _store_quarters(logits, y, m, n)
            else:
                at = logits + rm.to(tl.int64)[:, None] * stride_logits + (n + column)[None, :]
                tl.store(at, y, mask=(rm < M)[:, None] & (n + column < V)[None, :])
        if RAGGED:  # finite, so that its product with exp(y) = 0 is 0
            y = tl.where((n + column < V)[None, :], y, _FAR_BELOW)
        maximum = tl.max(y, axis=1)
        below = y - maximum[:, None]
        e = tl.exp(below)
        # No mask: `partial` has room for the rows past M.
        at = partial + pid_n * padded + rm
        plane = num_n * padded
        tl.store(at, maximum)
        tl.store(at + plane, tl.sum(e, axis=1))
        tl.store(at + 2 * plane, tl.sum(below * e, axis=1))


@triton.jit(do_not_specialize=["M", "tiles"])
def merge_kernel(
    partial,  # (3, tiles, padded) f32, fewer than 2^31 values
    target_logit,  # (M,) f32, or None
    top,  # (M,) f32, None unless CUT
    log_sum,  # (M,) f32, log(sum(exp(z - largest))); or None
    logp,  # (M,) f32, not written without target_logit
    entropy,  # (M,) f32
    lse,  # (M,) f32, log(sum(exp(z)))
    largest,  # (M,) f32
    M,
    tiles,
    padded,
    log_min_p,
    CUT: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
):
    """Merge the tiles of each row, in vocabulary order."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tile = tl.arange(0, TILES)
    plane = tiles * padded
    first = partial + tile[:, None] * padded + row[None, :]
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    for start in range(0, tiles, TILES):
        inside = (start + tile < tiles)[:, None]
        maximum = tl.load(first + start * padded, mask=inside, other=float("-inf"))
        highest = tl.maximum(highest, tl.max(maximum, axis=0))
    total = tl.zeros([ROWS], tl.float32)
    product = tl.zeros([ROWS], tl.float32)
    for start in range(0, tiles, TILES):
        inside = (start + tile < tiles)[:, None]
        at = first + start * padded
        maximum = tl.load(at, mask=inside, other=0.0)
        below = tl.where(inside, maximum - highest[None, :], 0.0)
        weight = tl.exp(below)
        sums = tl.load(at + plane, mask=inside, other=0.0)
        products = tl.load(at + 2 * plane, mask=inside, other=0.0)
        total += tl.sum(weight * sums, axis=0)
        product += tl.sum(weight * (products + below * sums), axis=0)
    log_total = tl.log(total)
    if target_logit is not None:
        chosen = tl.load(target_logit + row, mask=row < M, other=0.0)
        result = (chosen - highest) - log_total
        if CUT:
            floor = tl.load(top + row, mask=row < M, other=0.0) + log_min_p
            result = tl.where(chosen < floor, float("-inf"), result)
        tl.store(logp + row, result, mask=row < M)
    if log_sum is not None:
        tl.store(log_sum + row, log_total, mask=row < M)
    tl.store(entropy + row, log_total - product / total, mask=row < M)
    tl.store(lse + row, highest + log_total, mask=row < M)
    tl.store(largest + row, highest, mask=row < M)


@triton.jit(do_not_specialize=["M", "first", "programs"])
def gradient_kernel(
    x,  # (M, K) 16-bit or its descriptor
    w,  # (N, K) of x's dtype or its descriptor: rows [first, first + N) of the weight
    out,  # (M, N) bf16 or f32 or its descriptor
    targets,  # (M,) i64
    lse,  # (M,) f32
    entropy,  # (M,) f32; None unless ENTROPY
    grad,  # (M,) f32, output gradient of logp / temperature; None unless SCORE
    grad_entropy,  # (M,) f32, output gradient of entropy / temperature; None unless ENTROPY
    logp,  # (M,) f32, None unless CUT
    top,  # (M,) f32, None unless CUT
    M,
    N,
    K,
    first,
    stride_xm,
    stride_wn,
    stride_om,
    scale,
    log_min_p,
    programs,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SCORE: tl.constexpr,
    ENTROPY: tl.constexpr,
    CUT: tl.constexpr,
    TMA: tl.constexpr,
    TMA_OUT: tl.constexpr,
    PERSISTENT: tl.constexpr,
    HALVES: tl.constexpr,
):
    """out = ([j = target] - p_j) grad - p_j (log p_j + H) grad_entropy; see `qarl_kernels.logprob._logit_grad`."""
    num_m = tl.cdiv(M, BLOCK_M)
    num_n = tl.cdiv(N, BLOCK_N)
    steps = tl.cdiv(K, BLOCK_K)
    tl.assume(steps > 0)
    for pid in tl.range(tl.program_id(0), num_m * num_n, programs, flatten=PERSISTENT):
        pid_m, pid_n = tile_of(pid, num_m, num_n)
        m = pid_m * BLOCK_M
        n = pid_n * BLOCK_N
        y = product_tile(x, w, m, n, M, N, K, steps, stride_xm, stride_wn, BLOCK_M, BLOCK_N, BLOCK_K, TMA) * scale
        rm = m + tl.arange(0, BLOCK_M)
        column = tl.arange(0, BLOCK_N)
        inside = rm < M
        log_p = y - tl.load(lse + rm, mask=inside, other=0.0)[:, None]
        p = tl.exp(log_p)
        if SCORE:
            target = (tl.load(targets + rm, mask=inside, other=-1) - first - n).to(tl.int32)
            hit = column[None, :] == target[:, None]
            g = tl.load(grad + rm, mask=inside, other=0.0)
            if CUT:  # a truncated target has no gradient
                kept = tl.load(logp + rm, mask=inside, other=0.0) != float("-inf")
                g = tl.where(kept, g, 0.0)
        if ENTROPY:
            weight = tl.load(grad_entropy + rm, mask=inside, other=0.0)
            shift = weight * tl.load(entropy + rm, mask=inside, other=0.0)
            if SCORE:
                shift += g
            result = -p * (log_p * weight[:, None] + shift[:, None])
            if SCORE:
                result += tl.where(hit, g[:, None], 0.0)
        else:
            result = (tl.where(hit, 1.0, 0.0) - p) * g[:, None]
        if CUT:
            highest = tl.load(top + rm, mask=inside, other=0.0)
            result = tl.where(_cut(y, highest, log_min_p), 0.0, result)
        if TMA_OUT:
            if HALVES:  # the smaller staging buffer leaves shared memory for a pipeline stage
                left, right = split_columns(result)
                out.store([m, n], narrow(left, out.dtype))
                out.store([m, n + BLOCK_N // 2], narrow(right, out.dtype))
            else:
                out.store([m, n], narrow(result, out.dtype))
        else:
            rn = n + column
            at = out + rm.to(tl.int64)[:, None] * stride_om + rn[None, :]
            tl.store(at, narrow(result, out.dtype.element_ty), mask=inside[:, None] & (rn < N)[None, :])
