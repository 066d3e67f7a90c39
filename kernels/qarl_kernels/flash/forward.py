"""Forward of causal attention over a packed batch or a paged KV cache, one kernel for both.

A program takes a tile of query rows of one head and iterates over the keys of its sequence in blocks of absolute
position. A single loop covers all blocks, so loads are prefetched across the boundary between prompt and continuation,
across chunks and into the diagonal: every block gathers its rows by pointers, and only blocks that hide a key are
masked. Tiles within the first chunk need no second accumulator and are launched separately.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from qarl_kernels.blocks import dot_of_parts
from qarl_kernels.casts import narrow
from qarl_kernels.flash import layout as tables
from qarl_kernels.flash.layout import PackedLayout, padded
from qarl_kernels.flash.pairs import in_pairs, load_features, paired
from qarl_kernels.flash.steps import (
    LOG2E,
    accumulate,
    causal,
    feature_mask,
    merge,
    normalized,
    page_of,
    probabilities,
    row_total,
    zero_parts,
)
from qarl_kernels.launch import capability_of, launch


@dataclass(frozen=True)
class Tile:
    """Shape of a program: query rows (or keys, in the key gradient), keys (or queries) per step, warps, stages."""

    rows: int
    block: int
    warps: int
    stages: int


# By padded head size: tiles for sequences within a chunk, and for longer ones. They do not change the bits. On Hopper
# tiles of 128 query rows load keys and values half as often as tiles of 64, which the L2 cache cannot feed.
TILES = {
    64: (Tile(128, 64, 8, 3), Tile(128, 64, 8, 3)),
    128: (Tile(128, 64, 8, 3), Tile(128, 64, 8, 3)),
    256: (Tile(128, 64, 8, 2), Tile(64, 64, 8, 2)),
}
BEFORE_HOPPER = {
    64: (Tile(64, 64, 4, 2), Tile(64, 64, 4, 2)),
    128: (Tile(64, 64, 8, 2), Tile(64, 64, 8, 2)),
    256: (Tile(32, 64, 4, 2), Tile(32, 64, 4, 2)),
}
# For e4m3 caches, whose keys and values pass through registers on their way to the tensor cores.
FP8_TILES = {**TILES, 128: (Tile(64, 64, 4, 3), Tile(64, 64, 4, 3))}
# For interleaved e4m3: more than one warp per 16 rows would compute products of half a head twice.
FP8_BEFORE_HOPPER = {**BEFORE_HOPPER, 128: (Tile(128, 64, 8, 2), Tile(128, 64, 8, 2))}


@triton.jit(do_not_specialize=["tiles", "T", "window", "stride_pages"])
def attention_kernel(
    q,  # (T, H, D) 16-bit
    k,  # (T, H_kv, D) or a cache, of q's dtype, e4m3, or int16 holding pairs of e4m3 (see pairs.py)
    v,
    out,  # (T, H, D) contiguous
    lse,  # (H, T) fp32, log2
    tiles,  # (n, 6) int32, see PackedLayout.queries and PagedLayout.queries
    pages,  # (S, P) int32, pages of a cache, or None
    scale,
    T,
    rep,
    window,
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
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    WINDOW: tl.constexpr,
    PAGE: tl.constexpr,  # tokens per page; 0: packed rows
    LSE: tl.constexpr,
):
    head = tl.program_id(0)
    entry = tiles + tl.program_id(1) // (TILE // BLOCK_M) * 6
    skip = tl.program_id(1) % (TILE // BLOCK_M) * BLOCK_M
    count = tl.load(entry + 1) - skip
    if count <= 0:
        return
    row = tl.load(entry) + skip
    position = tl.load(entry + 2) + skip
    place = tl.load(entry + 3)  # first row of the prompt, or the sequence's row of the page table
    shared = tl.load(entry + 4)
    own = tl.load(entry + 5) - shared
    count = tl.minimum(count, BLOCK_M)
    end = position + count

    PARTS: tl.constexpr = 2 if k.dtype.element_ty == tl.int16 else 1  # column blocks of a head
    WIDTH: tl.constexpr = D // PARTS
    d = tl.arange(0, D_PAD // PARTS)
    m = tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK)
    heads = tl.num_programs(0)
    k += (head // rep).to(tl.int64) * stride_k_head
    v += (head // rep).to(tl.int64) * stride_v_head
    here = feature_mask(m < count, d, WIDTH)
    q += row.to(tl.int64) * stride_q + head * D
    query = ()
    for i in tl.static_range(PARTS):
        at_query = q + m.to(tl.int64)[:, None] * stride_q + (i * WIDTH + d)[None, :]
        query += (tl.load(at_query, mask=here, other=0.0),)

    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M, 16), tl.float32)
    acc = zero_parts(BLOCK_M, D_PAD // PARTS, PARTS)
    all_top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    all_total = tl.zeros((BLOCK_M,), tl.float32)
    if CHUNKS:
        all_acc = zero_parts(BLOCK_M, D_PAD // PARTS, PARTS)

    begin = 0
    clear = 0  # blocks from here on are inside every row's window
    if WINDOW:
        begin = tl.maximum(position - window + 1, 0) // BLOCK * BLOCK
        clear = end - window
    for first in tl.range(begin, end, BLOCK):
        at = first + n
        if PAGE > 0:
            page = page_of(pages + place.to(tl.int64) * stride_pages, at, end, PAGE)
            k_at = page * stride_k_page + (at % PAGE).to(tl.int64) * stride_k
            v_at = page * stride_v_page + (at % PAGE).to(tl.int64) * stride_v
        else:
            key_row = (at + tl.where(at < shared, place, own)).to(tl.int64)
            k_at = key_row * stride_k
            v_at = key_row * stride_v
        seen = feature_mask(at < end, d, WIDTH)
        keys = load_features(k + k_at[:, None] + d[None, :], seen, query[0].dtype)
        values = load_features(v + v_at[:, None] + d[None, :], seen, query[0].dtype)

        scores = dot_of_parts(query, keys, tl.zeros((BLOCK_M, BLOCK), tl.float32))
        scores = causal(scores, first, position, at, m, clear, window, BLOCK, WINDOW)
        if CHUNKS:
            next_chunk = first % CHUNK == 0
            if next_chunk:  # the next step's factor is 0, which clears the chunk's sums
                all_top, all_total, all_acc = merge(all_top, all_total, all_acc, top, row_total(total), acc)
                top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        p, factor, top = probabilities(scores, top, scale)
        total, acc = accumulate(p, values, factor, total, acc)

    if CHUNKS:
        top, sums, acc = merge(all_top, all_total, all_acc, top, row_total(total), acc)
    else:
        sums = row_total(total)
    out += (row.to(tl.int64) * heads + head) * D
    for i in tl.static_range(PARTS):
        result = narrow(normalized(acc[i], sums), out.dtype.element_ty)
        tl.store(out + (m * heads).to(tl.int64)[:, None] * D + (i * WIDTH + d)[None, :], result, mask=here)
    if LSE:
        tl.store(lse + head.to(tl.int64) * T + row + m, top + tl.log2(tl.where(sums == 0.0, 1.0, sums)), mask=m < count)


def attention_forward(
    q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout, scale: float, window: int | None = None
) -> tuple[Tensor, Tensor]:
    """Compute softmax(q k^T * scale) v of every row over the keys that it sees.

    Args:
        q: (T, H, D) bf16 or fp16, arbitrary row stride.
        k, v: (T, H_kv, D) of q's dtype, H a multiple of H_kv, arbitrary row stride.
        layout: Positions of the rows.
        scale: Factor of the scores, positive.
        window: Number of last tokens that a query sees; None: all.

    Returns:
        out (T, H, D), contiguous, of q's dtype; lse (H, T) float32, log2(sum(exp(scores * scale))).
    """
    check(q, k, v, scale, window)
    tokens, heads, dim = q.shape
    if tokens != layout.tokens or k.shape[0] != tokens:
        raise ValueError(f"q has {tokens} rows, k {k.shape[0]} and the layout {layout.tokens}; they must agree")
    out = torch.empty(tokens, heads, dim, dtype=q.dtype, device=q.device)
    lse = torch.empty(heads, tokens, dtype=torch.float32, device=q.device)
    for queries, chunks in layout.stretches:
        run(q, k, v, out, lse, queries, scale, window, chunks)
    return out, lse


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor | None,
    queries: Tensor,
    scale: float,
    window: int | None,
    chunks: bool,
    pages: Tensor | None = None,
    tile: Tile | None = None,
) -> None:
    """Write out, and lse if given, for the query rows of some tiles.

    Args:
        queries: (n, 6) int32, tiles of `QueryTiles.queries`.
        chunks: Whether any tile sees more than one CHUNK.
        pages: (S, P) int32 page table, if k and v are caches.
        tile: Overrides the tile, for tuning.
    """
    heads, dim = q.shape[1:]
    token_axis = 0 if pages is None else 2
    tile = tile or tiles_of(q, k)[padded(dim)][chunks]
    k, v = in_pairs(k), in_pairs(v)
    launch(
        attention_kernel,
        (heads, queries.shape[0] * (tables.TILE // tile.rows)),
        num_warps=tile.warps,
        # The page lookup takes a pipeline stage.
        num_stages=tile.stages + (pages is not None and dim <= 128),
        q=q,
        k=k,
        v=v,
        out=out,
        lse=lse,
        tiles=queries,
        pages=pages,
        scale=scale * LOG2E,
        T=q.shape[0],
        rep=heads // k.shape[1],
        window=window or 0,
        stride_q=q.stride(0),
        stride_k=k.stride(token_axis),
        stride_v=v.stride(token_axis),
        stride_k_head=k.stride(1),
        stride_v_head=v.stride(1),
        stride_k_page=k.stride(0),
        stride_v_page=v.stride(0),
        stride_pages=0 if pages is None else pages.stride(0),
        D=dim,
        D_PAD=padded(dim),
        BLOCK=tables.BLOCK,
        BLOCK_M=tile.rows,
        TILE=tables.TILE,
        CHUNK=tables.CHUNK,
        CHUNKS=chunks,
        WINDOW=window is not None,
        PAGE=0 if pages is None else k.shape[token_axis],
        LSE=lse is not None,
    )


def tiles_of(q: Tensor, k: Tensor) -> dict[int, tuple[Tile, Tile]]:
    """Return the tiles by padded head size, for sequences within a chunk and for longer ones."""
    fp8 = k.dtype.itemsize == 1
    if capability_of(q) >= (9, 0):
        return FP8_TILES if fp8 else TILES
    return FP8_BEFORE_HOPPER if fp8 and paired(k.shape[-1]) else BEFORE_HOPPER


def check(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, fp8: bool = False) -> None:
    """Raise ValueError for operands that the kernels cannot read. fp8: k and v may be e4m3."""
    heads, dim = q.shape[1:]
    allowed = (q.dtype, torch.float8_e4m3fn) if fp8 else (q.dtype,)
    if q.dtype not in (torch.bfloat16, torch.float16) or k.dtype not in allowed or v.dtype != k.dtype:
        other = ", or k and v of e4m3" if fp8 else ""
        raise ValueError(
            f"q, k and v must share one dtype, bf16 or fp16{other}; they have {q.dtype}, {k.dtype}, {v.dtype}"
        )
    if k.shape != v.shape or k.shape[-1] != dim or heads % k.shape[1]:
        raise ValueError(f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} do not fit together")
    if dim > 256 or dim % 8:
        raise ValueError(f"attention takes head sizes up to 256 in steps of 8, not {dim}")
    if q.stride(2) != 1 or q.stride(1) != dim or k.stride(-1) != 1 or v.stride(-1) != 1:
        raise ValueError("heads must be contiguous within a row; call contiguous() first")
    if not scale > 0 or (window is not None and window < 1):
        raise ValueError(f"scale {scale} and window {window} must be positive")
