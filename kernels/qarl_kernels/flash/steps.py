"""The arithmetic that every attention kernel shares, so that a row has the same bits in all of them.

A row's state is (top, total, acc): the largest score seen, in units of log2; the sum of its probabilities relative to
it; the weighted values. It starts as (-inf, 0, 0) and takes BLOCK keys a step. A step whose keys are all hidden leaves
it as it is. CHUNK keys are summed from zero; `merge` adds the chunks in order, so a program may compute one alone.

The sum of probabilities is a product with ones: the tensor core adds in one order whatever the tile's shape, threads
do not. Its columns, 16 or more, are the same number.
"""

from __future__ import annotations

import triton
import triton.language as tl

from qarl_kernels.blocks import dot
from qarl_kernels.casts import narrow

LOG2E = 1.4426950408889634


@triton.jit
def probabilities(scores, top, scale):
    """Unnormalised probabilities of one block and the new top. scores (M, N) fp32, hidden ones -inf; top (M,).

    scale: of the scores, log2(e) in it, positive. Returns p (M, N) fp32, the factor for older sums (M,), top (M,).
    """
    highest = tl.maximum(top, tl.max(scores, 1) * scale)
    finite = tl.where(highest == float("-inf"), 0.0, highest)  # -inf - -inf would be NaN
    p = tl.exp2(tl.fma(scores, scale, -finite[:, None]))
    return p, tl.exp2(top - finite), highest


@triton.jit
def accumulate(p, v, factor, total, acc):
    """The sums with one more block. p (M, N) fp32; total (M, 16 or more) fp32; v and acc tuples of tiles side by side,
    (N, D/n) 16-bit and (M, D/n) fp32."""
    p = narrow(p, v[0].dtype)
    ones = tl.full((p.shape[1], total.shape[1]), 1.0, v[0].dtype)
    sums = ()
    for i in tl.static_range(len(v)):
        sums += (dot(p, v[i], acc[i] * factor[:, None]),)
    total = dot(p, ones, total * factor[:, None])
    return total, sums


@triton.jit
def no_sums(ROWS: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr):
    """PARTS tiles (ROWS, WIDTH) of fp32 zeros, where sums over values start."""
    sums = ()
    for _ in tl.static_range(PARTS):
        sums += (tl.zeros((ROWS, WIDTH), tl.float32),)
    return sums


@triton.jit
def merge(top, total, acc, chunk_top, chunk_total, chunk_acc):
    """The state with one more chunk. top, total (M,); acc a tuple of tiles (M, D/n); all fp32."""
    highest = tl.maximum(top, chunk_top)
    finite = tl.where(highest == float("-inf"), 0.0, highest)
    old, new = tl.exp2(top - finite), tl.exp2(chunk_top - finite)
    sums = ()
    for i in tl.static_range(len(acc)):
        sums += (acc[i] * old[:, None] + chunk_acc[i] * new[:, None],)
    return highest, total * old + chunk_total * new, sums


@triton.jit
def row_total(total):
    """(M, N) fp32 of equal columns -> (M,)."""
    return tl.max(total, 1)


@triton.jit
def normalised(acc, total):
    """acc / total; a row that saw no key gives zeros."""
    return acc / tl.where(total == 0.0, 1.0, total)[:, None]


@triton.jit
def columns(rows, d, D: tl.constexpr):
    """Mask of a tile (rows, columns d) from that of its rows; columns from D on, which pad the head size, are out."""
    mask = rows[:, None]
    if d.shape[0] != D:
        mask = mask & (d < D)[None, :]
    return mask


@triton.jit
def page_of(pages, at, end, PAGE: tl.constexpr):
    """Page of each position, 0 past the end, int64. pages: a sequence's line of the table."""
    return tl.load(pages + at // PAGE, mask=at < end, other=0).to(tl.int64)
