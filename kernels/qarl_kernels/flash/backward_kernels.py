"""Kernels of the attention backward; `backward.py` launches them."""

from __future__ import annotations

import triton
import triton.language as tl

from qarl_kernels.blocks import dot, operand
from qarl_kernels.casts import narrow, widen
from qarl_kernels.flash.steps import causal, feature_mask


@triton.jit(do_not_specialize=["T", "T_PAD"])
def stats_kernel(
    grad_out,  # (T, H, D) 16-bit
    out,  # (T, H, D) contiguous
    lse,  # (H, T) fp32
    stats,  # (4, 2, H, T_PAD) fp32
    T,
    T_PAD,
    stride_g,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    ROWS: tl.constexpr,
):
    """stats[c, 0, head, row + c] = lse[head, row]; stats[c, 1, head, row + c] = sum of the row of grad_out * out.

    Four copies, each shifted by one element: whichever row a block starts at, its address is a multiple of 16 bytes in
    one of them, as TMA requires.
    """
    head = tl.program_id(0)
    heads = tl.num_programs(0)
    row = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    d = tl.arange(0, D_PAD)
    mask = feature_mask(row < T, d, D)
    g = tl.load(grad_out + row[:, None] * stride_g + head * D + d[None, :], mask=mask, other=0.0)
    o = tl.load(out + (row * heads + head)[:, None] * D + d[None, :], mask=mask, other=0.0)
    delta = tl.sum(widen(g) * widen(o), 1)
    level = tl.load(lse + head.to(tl.int64) * T + row, mask=row < T, other=0.0)
    for copy in tl.static_range(4):
        at = stats + (copy * 2 * heads + head).to(tl.int64) * T_PAD + row + copy
        tl.store(at, level, mask=row < T)
        tl.store(at + heads.to(tl.int64) * T_PAD, delta, mask=row < T)


@triton.jit(do_not_specialize=["tiles", "T_PAD", "window"])
def query_grad_kernel(
    q,  # (T, H, D) 16-bit
    k,  # (T, H_kv, D)
    v,
    grad_out,  # (T, H, D)
    dq,  # (T, H, D)
    stats,  # (4, 2, H, T_PAD) fp32, see stats_kernel
    tiles,  # (n, 6) int32, see PackedLayout.queries
    scale,
    scale2,  # scale * log2(e)
    T_PAD,
    rep,
    window,
    stride_q,
    stride_k,
    stride_v,
    stride_g,
    stride_dq,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
):
    head = tl.program_id(0)
    entry = tiles + tl.program_id(1) // (TILE // BLOCK_M) * 6
    skip = tl.program_id(1) % (TILE // BLOCK_M) * BLOCK_M
    count = tl.load(entry + 1) - skip
    if count <= 0:
        return
    row = tl.load(entry) + skip
    position = tl.load(entry + 2) + skip
    prompt = tl.load(entry + 3)
    shared = tl.load(entry + 4)
    own = tl.load(entry + 5) - shared
    count = tl.minimum(count, BLOCK_M)
    end = position + count

    d = tl.arange(0, D_PAD)
    m = tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    k += head // rep * D
    v += head // rep * D
    here = feature_mask(m < count, d, D)
    rows = (row + m).to(tl.int64)
    query = tl.load(q + head * D + rows[:, None] * stride_q + d[None, :], mask=here, other=0.0)
    grad = tl.load(grad_out + head * D + rows[:, None] * stride_g + d[None, :], mask=here, other=0.0)
    level = tl.load(stats + head.to(tl.int64) * T_PAD + rows, mask=m < count, other=float("inf"))
    shift = tl.load(stats + (tl.num_programs(0) + head).to(tl.int64) * T_PAD + rows, mask=m < count, other=0.0)

    acc = tl.zeros((BLOCK_M, D_PAD), tl.float32)
    begin = 0
    clear = 0
    if WINDOW:
        begin = tl.maximum(position - window + 1, 0) // BLOCK_N * BLOCK_N
        clear = end - window
    for first in tl.range(begin, end, BLOCK_N):
        at = first + n
        key_row = (at + tl.where(at < shared, prompt, own)).to(tl.int64)
        seen = feature_mask(at < end, d, D)
        keys = tl.load(k + key_row[:, None] * stride_k + d[None, :], mask=seen, other=0.0)
        values = tl.load(v + key_row[:, None] * stride_v + d[None, :], mask=seen, other=0.0)
        scores = dot(query, keys.T, tl.zeros((BLOCK_M, BLOCK_N), tl.float32))
        dp = dot(grad, values.T, tl.zeros((BLOCK_M, BLOCK_N), tl.float32))
        scores = causal(scores, first, position, at, m, clear, window, BLOCK_N, WINDOW)
        p = tl.exp2(tl.fma(scores, scale2, -level[:, None]))
        ds = narrow(p * (dp - shift[:, None]), k.dtype.element_ty)
        acc = dot(ds, keys, acc)
    at_dq = dq + head * D + rows[:, None] * stride_dq + d[None, :]
    tl.store(at_dq, narrow(acc * scale, dq.dtype.element_ty), mask=here)


@triton.jit
def numbers(source, at, SIZE: tl.constexpr, TMA: tl.constexpr):
    """Load SIZE float32 from index `at`. No mask: the array is padded by SIZE values."""
    if TMA:
        values = source.load([at])
    else:
        values = tl.load(source + at + tl.arange(0, SIZE))
    return values


@triton.jit(do_not_specialize=["items", "T_PAD", "window"])
def key_grad_kernel(
    q,  # (T, H, D) 16-bit
    k,  # (T, H_kv, D)
    v,
    grad_out,  # (T, H, D)
    dk,  # (T, H_kv, D)
    dv,
    partial,  # (partials, 2, H_kv, TILE, D) fp32
    stats,  # (4, 2, H, T_PAD) fp32, see stats_kernel
    positions,  # (T,) int64
    items,  # (m, 7) int32, see PackedLayout.items
    scale,
    scale2,  # scale * log2(e)
    T_PAD,
    rep,
    window,
    stride_q,
    stride_k,
    stride_v,
    stride_g,
    stride_dk,
    stride_dv,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    TMA: tl.constexpr,
):
    """Scores are transposed, (keys, queries), so that both products that use them read them from registers."""
    kv_head = tl.program_id(0)
    entry = items + tl.program_id(1) // (TILE // BLOCK_N) * 7
    skip = tl.program_id(1) % (TILE // BLOCK_N) * BLOCK_N
    count = tl.load(entry + 1) - skip
    if count <= 0:
        return
    row = tl.load(entry) + skip
    position = tl.load(entry + 2) + skip
    begin = tl.maximum(tl.load(entry + 3), row)
    end = tl.load(entry + 4)
    slot = tl.load(entry + 5)
    count = tl.minimum(count, BLOCK_N)
    if WINDOW:
        limit = row + BLOCK_N - 1 + window
        if limit <= tl.load(entry + 6):  # the window ends before the continuations, which reuse positions
            end = tl.minimum(end, limit)

    d = tl.arange(0, D_PAD)
    m = tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    here = feature_mask(n < count, d, D)
    rows = (row + n).to(tl.int64)
    keys = tl.load(k + kv_head * D + rows[:, None] * stride_k + d[None, :], mask=here, other=0.0)
    values = tl.load(v + kv_head * D + rows[:, None] * stride_v + d[None, :], mask=here, other=0.0)
    key_acc = tl.zeros((BLOCK_N, D_PAD), tl.float32)
    value_acc = tl.zeros((BLOCK_N, D_PAD), tl.float32)
    copy = -begin & 3
    copy += copy * 2 * tl.num_programs(0) * rep * T_PAD
    blocks = tl.maximum(tl.cdiv(end - begin, BLOCK_M), 0)
    for step in tl.range(0, blocks * rep):
        head = kv_head * rep + step // blocks
        first = begin + step % blocks * BLOCK_M
        at = first + m
        query = operand(q, first, end, head * D, head * D + D, stride_q, BLOCK_M, D_PAD, TMA)
        grad = operand(grad_out, first, end, head * D, head * D + D, stride_g, BLOCK_M, D_PAD, TMA)
        scores = dot(keys, query.T, tl.zeros((BLOCK_N, BLOCK_M), tl.float32))
        dp = dot(values, grad.T, tl.zeros((BLOCK_N, BLOCK_M), tl.float32))
        # Loaded before the next product, and one at a time: saves registers, and no wait between running products.
        dp -= numbers(stats, (tl.num_programs(0) * rep + head) * T_PAD + copy + first, BLOCK_M, TMA)[None, :]
        level = numbers(stats, head * T_PAD + copy + first, BLOCK_M, TMA)
        if WINDOW:
            ahead = tl.load(positions + at, mask=at < end, other=0).to(tl.int32)[None, :] - (position + n)[:, None]
            seen = (at[None, :] >= (row + n)[:, None]) & (at < end)[None, :] & (ahead < window)
            scores = tl.where(seen, scores, float("-inf"))
        else:
            if (first < row + BLOCK_N) | (first + BLOCK_M > end):
                seen = (at[None, :] >= (row + n)[:, None]) & (at < end)[None, :]
                scores = tl.where(seen, scores, float("-inf"))
        p = tl.exp2(tl.fma(scores, scale2, -level[None, :]))
        value_acc = dot(narrow(p, k.dtype.element_ty), grad, value_acc)
        ds = narrow(p * dp, k.dtype.element_ty)
        key_acc = dot(ds, query, key_acc)
    key_acc *= scale
    if slot < 0:
        at_dk = dk + kv_head * D + rows[:, None] * stride_dk + d[None, :]
        at_dv = dv + kv_head * D + rows[:, None] * stride_dv + d[None, :]
        tl.store(at_dk, narrow(key_acc, dk.dtype.element_ty), mask=here)
        tl.store(at_dv, narrow(value_acc, dv.dtype.element_ty), mask=here)
    else:
        size = tl.num_programs(0) * TILE * D
        at_partial = partial + (slot * 2).to(tl.int64) * size + (kv_head * TILE + skip) * D
        at_partial += n[:, None] * D + d[None, :]
        tl.store(at_partial, key_acc, mask=here)
        tl.store(at_partial + size, value_acc, mask=here)


@triton.jit(do_not_specialize=["cuts"])
def key_sum_kernel(
    partial,  # (partials, 2, H_kv, TILE, D) fp32
    dk,  # (T, H_kv, D) 16-bit
    dv,
    cuts,  # (c, 4) int32, see PackedLayout.cuts
    stride_dk,
    stride_dv,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Add the partial sums of a key tile in order."""
    kv_head = tl.program_id(0)
    entry = cuts + tl.program_id(1) // (TILE // ROWS) * 4
    n = tl.program_id(1) % (TILE // ROWS) * ROWS + tl.arange(0, ROWS)
    count = tl.load(entry + 1)
    slot = tl.load(entry + 2)
    slots = tl.load(entry + 3)
    d = tl.arange(0, D_PAD)
    here = feature_mask(n < count, d, D)
    size = tl.num_programs(0) * TILE * D
    key_acc = tl.zeros((ROWS, D_PAD), tl.float32)
    value_acc = tl.zeros((ROWS, D_PAD), tl.float32)
    at = partial + (slot * 2).to(tl.int64) * size + (kv_head * TILE + n)[:, None] * D + d[None, :]
    for _ in tl.range(0, slots):
        key_acc += tl.load(at, mask=here, other=0.0)
        value_acc += tl.load(at + size, mask=here, other=0.0)
        at += 2 * size
    rows = (tl.load(entry) + n).to(tl.int64)[:, None]
    tl.store(dk + kv_head * D + rows * stride_dk + d[None, :], narrow(key_acc, dk.dtype.element_ty), mask=here)
    tl.store(dv + kv_head * D + rows * stride_dv + d[None, :], narrow(value_acc, dv.dtype.element_ty), mask=here)
