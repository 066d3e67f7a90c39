"""Arithmetic shared by all attention kernels, so that a row has the same bits in all of them.

A row's state is (top, total, acc): the largest score so far, in units of log2; the sum of probabilities relative to it;
the weighted values. It starts as (-inf, 0, 0) and takes BLOCK keys per step. A step whose keys are all masked does not
change it. CHUNK keys are summed from zero; `merge` adds the chunks in order, so a program may compute a chunk alone.

The sum of probabilities is a matrix product with ones: tensor cores add in the same order whatever the tile's shape,
threads do not. Its columns, 16 or more, are equal.
"""

from __future__ import annotations

import triton
import triton.language as tl

from qarl_kernels.blocks import dot
from qarl_kernels.casts import narrow

LOG2E = 1.4426950408889634


@triton.jit
def causal(scores, first, position, at, m, clear, window, BLOCK: tl.constexpr, WINDOW: tl.constexpr):
    """Set scores (M, BLOCK) of keys that a row must not see to -inf; most blocks have none and are not masked.

    first: position of the block's first key; position: of the first row; at: (BLOCK,) positions of the keys; m: (M,)
    0, 1, ...; clear: position from which on keys are inside every row's window.
    """
    if WINDOW:
        if (first + BLOCK - 1 > position) | (first < clear):
            ahead = (position + m)[:, None] - at[None, :]
            scores = tl.where((ahead >= 0) & (ahead < window), scores, float("-inf"))
    else:
        if first + BLOCK - 1 > position:
            scores = tl.where((position + m)[:, None] >= at[None, :], scores, float("-inf"))
    return scores


@triton.jit
def probabilities(scores, top, scale):
    """Return unnormalized probabilities p (M, N) of one block, the factor (M,) for earlier sums, and the new top (M,).

    scores: (M, N) fp32, -inf if masked; top: (M,); scale: positive factor of the scores, including log2(e).
    """
    highest = tl.maximum(top, tl.max(scores, 1) * scale)
    finite = tl.where(highest == float("-inf"), 0.0, highest)  # -inf - -inf would be NaN
    p = tl.exp2(tl.fma(scores, scale, -finite[:, None]))
    return p, tl.exp2(top - finite), highest


@triton.jit
def accumulate(p, v, factor, total, acc):
    """Add one block to the sums. p: (M, N) fp32; total: (M, 16 or more) fp32; v, acc: tuples of column blocks, (N, D/n)
    16-bit and (M, D/n) fp32."""
    p = narrow(p, v[0].dtype)
    ones = tl.full((p.shape[1], total.shape[1]), 1.0, v[0].dtype)
    sums = ()
    for i in tl.static_range(len(v)):
        sums += (dot(p, v[i], acc[i] * factor[:, None]),)
    total = dot(p, ones, total * factor[:, None])
    return total, sums


@triton.jit
def zero_parts(ROWS: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr):
    """Return PARTS fp32 tiles (ROWS, WIDTH) of zeros."""
    sums = ()
    for _ in tl.static_range(PARTS):
        sums += (tl.zeros((ROWS, WIDTH), tl.float32),)
    return sums


@triton.jit
def merge(top, total, acc, chunk_top, chunk_total, chunk_acc):
    """Add one chunk to the state. top, total: (M,); acc: tuple of tiles (M, D/n); all fp32."""
    highest = tl.maximum(top, chunk_top)
    finite = tl.where(highest == float("-inf"), 0.0, highest)
    old, new = tl.exp2(top - finite), tl.exp2(chunk_top - finite)
    sums = ()
    for i in tl.static_range(len(acc)):
        sums += (acc[i] * old[:, None] + chunk_acc[i] * new[:, None],)
    return highest, total * old + chunk_total * new, sums


@triton.jit
def row_total(total):
    """Return one column (M,) of (M, N) fp32 with equal columns."""
    return tl.max(total, 1)


@triton.jit
def normalized(acc, total):
    """Return acc / total; zeros for a row without keys."""
    return acc / tl.where(total == 0.0, 1.0, total)[:, None]


@triton.jit
def feature_mask(rows, d, D: tl.constexpr):
    """Extend a row mask to a tile (rows, columns d); columns from D on are padding and masked."""
    mask = rows[:, None]
    if d.shape[0] != D:
        mask = mask & (d < D)[None, :]
    return mask


@triton.jit
def page_of(pages, at, end, PAGE: tl.constexpr):
    """Return the page of each position, int64, 0 past the end. pages: the sequence's row of the page table."""
    return tl.load(pages + at // PAGE, mask=at < end, other=0).to(tl.int64)
