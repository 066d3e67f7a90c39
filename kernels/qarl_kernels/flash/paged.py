"""Causal attention over a paged KV cache: prefill, chunked prefill and decode, with the bits of the packed forward.

Spans of several tokens run the packed forward's kernel on gathered pages. A decode has one query token: a program takes
the query heads of one kv head and one CHUNK of keys, and a second kernel merges the chunks in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from qarl_kernels.flash import layout as tables
from qarl_kernels.flash.decode import decode
from qarl_kernels.flash.forward import check, run
from qarl_kernels.flash.layout import upload


@dataclass(frozen=True)
class PagedLayout:
    """Which queries a batch has and where their keys are, the same for every layer.

    tokens: T, rows of the batch.
    pages: (S, P) int32, pages of each sequence in order; entries past its end may be anything.
    queries: (n, 6) int32, per tile of query rows of spans of several tokens: first row, rows, position of the first
        row, sequence, 0, 0. Longest first.
    long_tiles: how many of the tiles, the first ones, see more than one CHUNK of keys.
    decodes: (d, 3) int32, per span of one token: row, sequence, keys it sees.
    longest: most keys that a decode sees.
    """

    tokens: int
    pages: Tensor
    queries: Tensor
    long_tiles: int
    decodes: Tensor
    longest: int


def paged_layout(
    rows: Sequence[int],
    counts: Sequence[int],
    positions: Sequence[int],
    pages: Sequence[Sequence[int]] | Tensor,
    device: torch.device,
) -> PagedLayout:
    """Layout of spans, one a sequence: first row in the batch, tokens, position of the first token, pages.

    pages: per sequence the pages of all tokens up to the span's last, or an (S, P) int32 table on the device.
    """
    row, count, position = (np.asarray(list(column), np.int64).reshape(-1) for column in (rows, counts, positions))
    sequence = np.arange(row.size)
    many = np.flatnonzero(count > 1)
    pieces = -(-count[many] // tables.TILE)
    span = np.repeat(many, pieces)
    start = (np.arange(span.size) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * tables.TILE
    queries = np.zeros((span.size, 6), np.int32)
    queries[:, 0] = row[span] + start
    queries[:, 1] = np.minimum(count[span] - start, tables.TILE)
    queries[:, 2] = position[span] + start
    queries[:, 3] = span
    end = queries[:, 2] + queries[:, 1]
    queries = queries[np.argsort(-end, kind="stable")]
    one = np.flatnonzero(count == 1)
    decodes = np.stack([row[one], sequence[one], position[one] + 1], axis=1).astype(np.int32)
    if isinstance(pages, Tensor):
        queries_there, decodes_there = upload(device, queries, decodes)
        pages_there = pages
    else:
        table = np.zeros((len(pages), max(map(len, pages), default=0)), np.int32)
        for line, listed in zip(table, pages, strict=True):
            line[: len(listed)] = listed
        queries_there, decodes_there, pages_there = upload(device, queries, decodes, table)
    return PagedLayout(
        tokens=int(count.sum()),
        pages=pages_there,
        queries=queries_there,
        long_tiles=int((end > tables.CHUNK).sum()),
        decodes=decodes_there,
        longest=int(decodes[:, 2].max(initial=0)),
    )


@triton.jit(do_not_specialize=["rows", "sequences", "lengths", "window", "stride_lengths", "stride_pages"])
def decode_kernel(
    q,  # (T, H, D) 16-bit
    k,  # cache
    v,
    out,  # (T, H, D) contiguous
    partial,  # (S, H, C, D) fp32, or None where one chunk is all
    state,  # (S, H, C, 2) fp32: top and total
    pages,  # (S, P) int32
    rows,  # (S,) int32 row of q, None: the sequence's number
    sequences,  # (S,) int32 line of pages, None: the sequence's number
    lengths,  # (S,) int32 keys of each sequence
    scale,
    rep,
    window,
    stride_lengths,
    stride_q,
    stride_k,
    stride_v,
    stride_k_head,
    stride_v_head,
    stride_k_page,
    stride_v_page,
    stride_pages,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    CHUNK: tl.constexpr,
    WINDOW: tl.constexpr,
):
    chunk = tl.program_id(0)
    chunks = tl.num_programs(0)
    groups = tl.cdiv(rep, HEADS)
    kv_head = tl.program_id(1) // groups
    number = tl.program_id(2)
    heads = tl.num_programs(1) // groups * rep
    length = tl.load(lengths + number * stride_lengths)
    first = chunk * CHUNK
    end = tl.minimum(length, first + CHUNK)
    lowest = 0
    if WINDOW:
        lowest = tl.maximum(length - window, 0)
    if chunks > 1:  # noqa: SIM102 (Triton has no `and` of a value and a tensor)
        if (first >= length) | (end <= lowest):
            return
    line = number
    row = number
    if rows is not None:
        row = tl.load(rows + number * stride_lengths)
        line = tl.load(sequences + number * stride_lengths)

    d = tl.arange(0, D_PAD)
    m = tl.arange(0, HEADS)
    n = tl.arange(0, BLOCK)
    in_group = tl.program_id(1) % groups * HEADS + m
    head = kv_head * rep + in_group
    k += kv_head.to(tl.int64) * stride_k_head
    v += kv_head.to(tl.int64) * stride_v_head
    pages += line.to(tl.int64) * stride_pages
    here = columns(in_group < rep, d, D)
    query = tl.load(q + row.to(tl.int64) * stride_q + head[:, None] * D + d[None, :], mask=here, other=0.0)

    top = tl.full((HEADS,), float("-inf"), tl.float32)
    total = tl.zeros((HEADS, 16), tl.float32)
    acc = tl.zeros((HEADS, D_PAD), tl.float32)
    for start in tl.range(tl.maximum(first, lowest // BLOCK * BLOCK), end, BLOCK):
        at = start + n
        page = page_of(pages, at, end, PAGE)
        seen = columns(at < end, d, D)
        k_at = page * stride_k_page + (at % PAGE).to(tl.int64) * stride_k
        v_at = page * stride_v_page + (at % PAGE).to(tl.int64) * stride_v
        keys = tl.load(k + k_at[:, None] + d[None, :], mask=seen, other=0.0)
        values = tl.load(v + v_at[:, None] + d[None, :], mask=seen, other=0.0)
        scores = dot(query, keys.T, tl.zeros((HEADS, BLOCK), tl.float32))
        scores = tl.where(((at < end) & (at >= lowest))[None, :], scores, float("-inf"))
        p, factor, top = probabilities(scores, top, scale)
        total, acc = accumulate(p, values, factor, total, acc)

    sums = row_total(total)
    if partial is None:
        at_out = out + row.to(tl.int64) * heads * D + head[:, None] * D + d[None, :]
        tl.store(at_out, narrow(normalised(acc, sums), out.dtype.element_ty), mask=here)
    else:
        slot = (number.to(tl.int64) * heads + head) * chunks + chunk
        tl.store(partial + slot[:, None] * D + d[None, :], acc, mask=here)
        tl.store(state + slot * 2, top, mask=in_group < rep)
        tl.store(state + slot * 2 + 1, sums, mask=in_group < rep)


@triton.jit(do_not_specialize=["rows", "lengths", "chunks", "window", "stride_lengths"])
def merge_kernel(
    partial,  # (S, H, C, D) fp32
    state,  # (S, H, C, 2) fp32
    out,  # (T, H, D) 16-bit
    rows,  # (S,) int32 row of out, None: the sequence's number
    lengths,  # (S,) int32
    chunks,
    window,
    stride_lengths,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    CHUNK: tl.constexpr,
    WINDOW: tl.constexpr,
):
    head = tl.program_id(0)
    number = tl.program_id(1)
    heads = tl.num_programs(0)
    length = tl.load(lengths + number * stride_lengths)
    first = 0
    if WINDOW:
        first = tl.maximum(length - window, 0) // CHUNK
    row = number
    if rows is not None:
        row = tl.load(rows + number * stride_lengths)
    d = tl.arange(0, D_PAD)
    top = tl.full((1,), float("-inf"), tl.float32)
    total = tl.zeros((1,), tl.float32)
    acc = tl.zeros((1, D_PAD), tl.float32)
    base = (number.to(tl.int64) * heads + head) * chunks
    one = tl.arange(0, 1)
    for chunk in tl.range(first, tl.cdiv(length, CHUNK)):
        slot = base + chunk + one
        chunk_acc = tl.load(partial + slot[:, None] * D + d[None, :], mask=(d < D)[None, :], other=0.0)
        chunk_top, chunk_total = tl.load(state + slot * 2), tl.load(state + slot * 2 + 1)
        top, total, acc = merge(top, total, acc, chunk_top, chunk_total, chunk_acc)
    at = out + (row.to(tl.int64) * heads + head) * D + one[:, None] + d[None, :]
    tl.store(at, narrow(normalised(acc, total), out.dtype.element_ty), mask=(d < D)[None, :])




def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    layout: PagedLayout,
    scale: float,
    window: int | None = None,
    token_axis: int = 2,
) -> Tensor:
    """softmax(q k^T * scale) v for every query over the keys of its sequence up to its own position.

    Args:
        q: (T, H, D) bf16 or fp16, rows any stride apart; every row belongs to one span of the layout.
        k_cache, v_cache: of q's dtype, (P, H_kv, PAGE, D) with token_axis 2 or (P, PAGE, H_kv, D) with 1; PAGE a
            multiple of 16. What stands past a sequence's end is not read.
        scale: multiplies the scores; positive.
        window: a query sees its last `window` tokens only; None means all.

    Returns:
        (T, H, D) of q's dtype.
    """
    _check_cache(q, k_cache, v_cache, scale, window, token_axis)
    if q.shape[0] != layout.tokens:
        raise ValueError(f"q has {q.shape[0]} rows and the layout {layout.tokens}; they must agree")
    out = torch.empty(*q.shape, dtype=q.dtype, device=q.device)
    long = layout.long_tiles
    for queries, chunks in ((layout.queries[:long], True), (layout.queries[long:], False)):
        run(q, k_cache, v_cache, out, None, queries, scale, window, chunks, layout.pages, token_axis)
    row, sequence, lengths = layout.decodes.unbind(1)
    spans = (layout.pages, row, sequence, lengths)
    decode(q, k_cache, v_cache, out, *spans, scale, window, layout.longest, token_axis)
    return out


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    scale: float,
    window: int | None,
    max_length: int,
    token_axis: int = 2,
) -> Tensor:
    """`paged_attention` of one query a sequence, the last of its `lengths` tokens; launches depend on shapes alone.

    Args:
        q: (S, H, D); caches and scale as in `paged_attention`.
        page_table: (S, P) int32, pages of each sequence in order.
        lengths: (S,) int32, at most max_length; a sequence of length 0 gives zeros.

    Returns:
        (S, H, D) of q's dtype.
    """
    _check_cache(q, k_cache, v_cache, scale, window, token_axis)
    out = torch.empty(*q.shape, dtype=q.dtype, device=q.device)
    decode(q, k_cache, v_cache, out, page_table, None, None, lengths, scale, window, max_length, token_axis)
    return out


def _check_cache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float, window: int | None, token_axis: int
) -> None:
    if token_axis not in (1, 2):
        raise ValueError(f"token_axis {token_axis} must be 1, (P, PAGE, H_kv, D), or 2, (P, H_kv, PAGE, D)")
    check(q, k_cache, v_cache, scale, window, head_axis=3 - token_axis)
    if k_cache.shape[token_axis] % 16:
        raise ValueError(f"pages of {k_cache.shape[token_axis]} tokens; they must hold a multiple of 16")
