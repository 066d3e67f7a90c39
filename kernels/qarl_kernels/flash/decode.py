"""Decode attention, one query token per sequence over a paged KV cache: kernels and their launches; see `paged.py`.

A program takes the query heads of one kv head of one sequence. If that makes few programs for a GPU, several programs
share the chunks of a sequence, and a second kernel merges their results; else each iterates over all chunks in one
loop, so loads are prefetched from chunk to chunk. The number of programs depends on shapes, and lengths are read on the
device: programs of short sequences finish early, but a launch has as many programs for a longest sequence of 40,000
tokens as for one of 2,000.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from qarl_kernels.blocks import dot_of_parts
from qarl_kernels.casts import narrow
from qarl_kernels.flash import layout as tables
from qarl_kernels.flash.layout import padded
from qarl_kernels.flash.pairs import in_pairs, load_features, paired
from qarl_kernels.flash.steps import (
    LOG2E,
    accumulate,
    feature_mask,
    merge,
    normalized,
    page_of,
    probabilities,
    row_total,
    zero_parts,
)
from qarl_kernels.integers import cdiv, next_power_of_2
from qarl_kernels.launch import capability_of, launch

# By padded head size: warps and stages of a decode program. They do not change the bits. The page lookup takes one
# stage per block in flight, so 7 stages keep three blocks of keys and values in flight.
DECODE = {64: (4, 7), 128: (4, 7), 256: (8, 3)}
# e4m3 caches have half the bytes to load and more instructions. 256 sequences of 2,560 tokens, 8 heads of 128: 0.32 ms
# with (2, 5), 0.34 with (4, 5); 0.61 with a 16-bit cache.
FP8_DECODE = {64: (4, 7), 128: (2, 5), 256: (4, 5)}
# Padded heads are not interleaved, and are converted through shared memory.
FP8_PADDED = {**DECODE, 128: (2, 3)}
BEFORE_HOPPER = {64: (4, 5), 128: (4, 5), 256: (8, 2)}
PROGRAMS = 528  # maximum number of programs over which chunks are split: four per multiprocessor of an H100


@triton.jit(do_not_specialize=["rows", "sequences", "lengths", "chunks", "window", "stride_lengths", "stride_pages"])
def decode_kernel(
    q,  # (T, H, D) 16-bit
    k,  # cache, of q's dtype, e4m3, or int16 holding pairs of e4m3 (see pairs.py)
    v,
    out,  # (T, H, D) contiguous
    partial,  # (S, H, C, D) fp32, or None if a program iterates over all chunks
    state,  # (S, H, C, 2) fp32, top and total, or None
    pages,  # (S, P) int32
    rows,  # (S,) int32, row of q; None: the sequence's index
    sequences,  # (S,) int32, row of pages; None: the sequence's index
    lengths,  # (S,) int32, keys of each sequence
    chunks,
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
    groups = tl.cdiv(rep, HEADS)
    kv_head = tl.program_id(1) // groups
    number = tl.program_id(2)
    heads = tl.num_programs(1) // groups * rep
    length = tl.load(lengths + number * stride_lengths)
    lowest = 0
    if WINDOW:
        lowest = tl.maximum(length - window, 0)
    line = number
    row = number
    if rows is not None:
        row = tl.load(rows + number * stride_lengths)
        line = tl.load(sequences + number * stride_lengths)

    PARTS: tl.constexpr = 2 if k.dtype.element_ty == tl.int16 else 1  # column blocks of a head
    WIDTH: tl.constexpr = D // PARTS
    d = tl.arange(0, D_PAD // PARTS)
    m = tl.arange(0, HEADS)
    n = tl.arange(0, BLOCK)
    in_group = tl.program_id(1) % groups * HEADS + m
    head = kv_head * rep + in_group
    k += kv_head.to(tl.int64) * stride_k_head
    v += kv_head.to(tl.int64) * stride_v_head
    pages += line.to(tl.int64) * stride_pages
    here = feature_mask(in_group < rep, d, WIDTH)
    query = ()
    for i in tl.static_range(PARTS):
        at_query = q + row.to(tl.int64) * stride_q + head[:, None] * D + (i * WIDTH + d)[None, :]
        query += (tl.load(at_query, mask=here, other=0.0),)

    all_top = tl.full((HEADS,), float("-inf"), tl.float32)
    all_total = tl.zeros((HEADS,), tl.float32)
    all_acc = zero_parts(HEADS, D_PAD // PARTS, PARTS)
    first = lowest // CHUNK + tl.program_id(0)
    last = tl.cdiv(length, CHUNK)
    if partial is None:  # the inner loop covers all chunks
        last = tl.minimum(last, first + 1)
    for chunk in tl.range(first, last, tl.num_programs(0)):
        end = length
        if partial is not None:
            end = tl.minimum(length, (chunk + 1) * CHUNK)
        top = tl.full((HEADS,), float("-inf"), tl.float32)
        # More columns than rows, else every warp would compute all products: Triton assigns warps to rows first.
        total = tl.zeros((HEADS, 2 * HEADS), tl.float32)
        acc = zero_parts(HEADS, D_PAD // PARTS, PARTS)
        for start in tl.range(tl.maximum(chunk * CHUNK, lowest // BLOCK * BLOCK), end, BLOCK):
            at = start + n
            seen = feature_mask(at < end, d, WIDTH)
            if PAGE % BLOCK == 0:  # a block lies in one page
                page = tl.load(pages + start // PAGE).to(tl.int64)
                k_at = k + (page * stride_k_page + start % PAGE * stride_k) + n * stride_k
                v_at = v + (page * stride_v_page + start % PAGE * stride_v) + n * stride_v
            else:
                page = page_of(pages, at, end, PAGE)
                row_in_page = (at % PAGE).to(tl.int64)
                k_at = k + (page * stride_k_page + row_in_page * stride_k)
                v_at = v + (page * stride_v_page + row_in_page * stride_v)
            keys = load_features(k_at[:, None] + d[None, :], seen, query[0].dtype)
            values = load_features(v_at[:, None] + d[None, :], seen, query[0].dtype)
            scores = dot_of_parts(query, keys, tl.zeros((HEADS, BLOCK), tl.float32))
            scores = tl.where(((at < end) & (at >= lowest))[None, :], scores, float("-inf"))
            if partial is None:
                next_chunk = start % CHUNK == 0
                if next_chunk:  # the next step's factor is 0, which clears the chunk's sums
                    all_top, all_total, all_acc = merge(all_top, all_total, all_acc, top, row_total(total), acc)
                    top = tl.full((HEADS,), float("-inf"), tl.float32)
            p, factor, top = probabilities(scores, top, scale)
            total, acc = accumulate(p, values, factor, total, acc)
        sums = row_total(total)
        if partial is None:
            all_top, all_total, all_acc = merge(all_top, all_total, all_acc, top, sums, acc)
        else:
            slot = (number.to(tl.int64) * heads + head) * chunks + chunk
            for i in tl.static_range(PARTS):
                tl.store(partial + slot[:, None] * D + (i * WIDTH + d)[None, :], acc[i], mask=here)
            tl.store(state + slot * 2, top, mask=in_group < rep)
            tl.store(state + slot * 2 + 1, sums, mask=in_group < rep)
    if partial is None:
        for i in tl.static_range(PARTS):
            at_out = out + row.to(tl.int64) * heads * D + head[:, None] * D + (i * WIDTH + d)[None, :]
            tl.store(at_out, narrow(normalized(all_acc[i], all_total), out.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=["rows", "lengths", "chunks", "window", "stride_lengths"])
def merge_kernel(
    partial,  # (S, H, C, D) fp32
    state,  # (S, H, C, 2) fp32
    out,  # (T, H, D) 16-bit
    rows,  # (S,) int32, row of out; None: the sequence's index
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
    acc = (tl.zeros((1, D_PAD), tl.float32),)
    base = (number.to(tl.int64) * heads + head) * chunks
    one = tl.arange(0, 1)
    for chunk in tl.range(first, tl.cdiv(length, CHUNK)):
        slot = base + chunk + one
        chunk_acc = tl.load(partial + slot[:, None] * D + d[None, :], mask=(d < D)[None, :], other=0.0)
        chunk_top, chunk_total = tl.load(state + slot * 2), tl.load(state + slot * 2 + 1)
        top, total, acc = merge(top, total, acc, chunk_top, chunk_total, (chunk_acc,))
    at = out + (row.to(tl.int64) * heads + head) * D + one[:, None] + d[None, :]
    tl.store(at, narrow(normalized(acc[0], total), out.dtype.element_ty), mask=(d < D)[None, :])


def tiles_of(q: Tensor, k: Tensor) -> dict[int, tuple[int, int]]:
    """Return warps and stages by padded head size, for queries q over a cache k."""
    if capability_of(q) < (9, 0):
        return BEFORE_HOPPER
    if k.dtype.itemsize > 1:
        return DECODE
    return FP8_DECODE if paired(k.shape[-1]) else FP8_PADDED


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    pages: Tensor,
    rows: Tensor | None,
    sequences: Tensor | None,
    lengths: Tensor,
    scale: float,
    window: int | None,
    max_length: int,
) -> None:
    """Write out for one query per sequence; see `paged.paged_attention` and `decode_kernel` for the arguments."""
    heads, dim = q.shape[1:]
    rep = heads // k.shape[1]
    together = min(64, max(16, next_power_of_2(rep)))
    sequences_count, chunks = lengths.shape[0], max(1, cdiv(max_length, tables.CHUNK))
    programs = k.shape[1] * cdiv(rep, together)
    shared = min(chunks, PROGRAMS // max(1, programs * sequences_count))
    partial = state = None
    if shared > 1:
        partial = torch.empty(sequences_count, heads, chunks, dim, dtype=torch.float32, device=q.device)
        state = torch.empty(sequences_count, heads, chunks, 2, dtype=torch.float32, device=q.device)
    warps, stages = tiles_of(q, k)[padded(dim)]
    k, v = in_pairs(k), in_pairs(v)
    launch(
        decode_kernel,
        (max(1, shared), programs, sequences_count),
        num_warps=warps,
        num_stages=stages,
        q=q,
        k=k,
        v=v,
        out=out,
        partial=partial,
        state=state,
        pages=pages,
        rows=rows,
        sequences=sequences,
        lengths=lengths,
        chunks=chunks,
        scale=scale * LOG2E,
        rep=rep,
        window=window or 0,
        stride_lengths=lengths.stride(0),
        stride_q=q.stride(0),
        stride_k=k.stride(2),
        stride_v=v.stride(2),
        stride_k_head=k.stride(1),
        stride_v_head=v.stride(1),
        stride_k_page=k.stride(0),
        stride_v_page=v.stride(0),
        stride_pages=pages.stride(0),
        D=dim,
        D_PAD=padded(dim),
        BLOCK=tables.BLOCK,
        HEADS=together,
        PAGE=k.shape[2],
        CHUNK=tables.CHUNK,
        WINDOW=window is not None,
    )
    if shared > 1:
        launch(
            merge_kernel,
            (heads, sequences_count),
            num_warps=1,
            partial=partial,
            state=state,
            out=out,
            rows=rows,
            lengths=lengths,
            chunks=chunks,
            window=window or 0,
            stride_lengths=lengths.stride(0),
            D=dim,
            D_PAD=padded(dim),
            CHUNK=tables.CHUNK,
            WINDOW=window is not None,
        )
