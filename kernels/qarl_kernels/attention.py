"""Causal attention over a paged KV cache in plain torch; a token's bits depend on its own context only.

One function serves prefill, chunked prefill, decode and the learner's full-sequence forward. A row has the same bits in
all of them because: pages hold a fixed number of tokens; scores and weighted values of one page are products of a fixed
shape; the maximum is exact in any order; sums run over one page and then over pages in order; a page entirely after the
query adds exact zeros.

All slots of listed pages must hold finite values, written or not: a masked value has weight 0, and 0 * NaN is NaN.
Masked keys may be anything. Pages that are not listed are never read.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

PAGE = 64  # tokens per KV page
TILE = 16  # query tokens per prefill tile
MAX_ELEMENTS = 1 << 24  # scores, keys and values in memory at once (64 MiB in float32)


@dataclass(frozen=True)
class QueryTiles:
    """Tiles of queries, all with the same bound on the pages they see.

    Attributes:
        rows: (n, t) int64, row of each query in the packed batch; negative for padding.
        positions: (n, t) int64, position of each query in its sequence; 0 for padding.
        pages: (n, p) int64, pages of the sequence in order; entries past its end may be any valid page.
        real: (m,) int64, indices of the n * t queries that are not padding. None: computed when needed, which
            synchronizes with a GPU.
    """

    rows: Tensor
    positions: Tensor
    pages: Tensor
    real: Tensor | None = None

    def to(self, device: torch.device) -> QueryTiles:
        real = _real(self.rows) if self.real is None else self.real
        return QueryTiles(self.rows.to(device), self.positions.to(device), self.pages.to(device), real.to(device))


@cache
def decode_rows(rep: int, head_dim: int, threads: int) -> int:
    """Return the fewest rows at which a decode tile (one token, `rep` query heads) has a prefill tile's bits.

    Measured on this machine, because it depends on the BLAS. threads: Part of the cache key.
    """
    del threads
    generator = torch.Generator().manual_seed(rep * 1009 + head_dim)
    full = TILE * rep
    query = torch.randn(24, full, head_dim, generator=generator)
    keys = torch.randn(24, PAGE, head_dim, generator=generator)
    weights = torch.randn(24, full, PAGE, generator=generator)
    scores, values = query @ keys.transpose(1, 2), weights @ keys
    for rows in range(-(-rep // 8) * 8, full, 8):
        same_scores = torch.equal(query[:, :rows].contiguous() @ keys.transpose(1, 2), scores[:, :rows])
        same_values = torch.equal(weights[:, :rows].contiguous() @ keys, values[:, :rows])
        if same_scores and same_values:
            return rows
    return full


def paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, tiles: list[QueryTiles], scale: float, window: int | None = None
) -> Tensor:
    """Compute softmax(q k^T * scale) v for every query over the keys of its sequence up to its own position.

    Args:
        q: (T, H, D) bf16, fp16 or float32.
        k_cache, v_cache: (P, H_kv, PAGE, D), H a multiple of H_kv; of q's dtype, or its values in float32.
        tiles: Tiles that together contain each of the T rows once.
        scale: Factor of the scores.
        window: Number of last tokens that a query sees; None: all.

    Returns:
        (T, H, D), rounded once to q's dtype; products, softmax and sums are float32.
    """
    out = torch.empty_like(q)
    heads, dim = q.shape[1:]
    kv_heads = k_cache.shape[1]
    rep = heads // kv_heads
    for group in tiles:
        n, t = group.rows.shape
        rows = t * rep
        if t == 1 and q.device.type == "cpu":
            rows = decode_rows(rep, dim, torch.get_num_threads())
        step = max(1, MAX_ELEMENTS // (kv_heads * PAGE * (group.pages.shape[1] * rows + 2 * dim)))
        for start in range(0, n, step):
            part = slice(start, start + step)
            real = group.real if step >= n else None
            tile = QueryTiles(group.rows[part], group.positions[part], group.pages[part], real)
            _attend(out, q, k_cache, v_cache, tile, rows, scale, window)
    return out


def _attend(
    out: Tensor,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    tiles: QueryTiles,
    rows: int,
    scale: float,
    window: int | None,
) -> None:
    """Write some tiles of one shape into out. rows: t * rep query rows, padded for a decode."""
    index, positions, pages = tiles.rows, tiles.positions, tiles.pages
    n, t = index.shape
    p = pages.shape[1]
    heads, dim = q.shape[1:]
    kv_heads = k_cache.shape[1]
    rep = heads // kv_heads
    batch = n * kv_heads
    # (n, t, H, D) -> (n * H_kv, t * rep, D): the query heads that share keys become rows of one product
    query = q[index.clamp(min=0)].view(n, t, kv_heads, rep, dim).permute(0, 2, 1, 3, 4)
    query = query.reshape(batch, t * rep, dim).float() * scale
    row_position = positions.repeat_interleave(rep, dim=1)  # (n, t * rep)
    if rows != t * rep:
        query = torch.nn.functional.pad(query, (0, 0, 0, rows - t * rep))
        row_position = torch.nn.functional.pad(row_position, (0, rows - t * rep))

    # Page by page: keys and values of one page stay in the CPU cache, and queries need no copy per page.
    scores = query.new_empty(p, batch, rows, PAGE)
    for page in range(p):
        torch.bmm(query, _page_of(k_cache, pages[:, page]).transpose(1, 2), out=scores[page])
    key_position = torch.arange(p * PAGE, device=q.device).view(p, 1, 1, 1, PAGE)
    row_position = row_position.view(1, n, 1, rows, 1)
    hidden = key_position > row_position
    if window is not None:
        hidden |= key_position <= row_position - window
    scores.view(p, n, kv_heads, rows, PAGE).masked_fill_(hidden, float("-inf"))
    top = scores.amax(-1, keepdim=True).amax(0)
    weights = scores.sub_(top).exp_()
    totals = weights.sum(-1)  # (p, n * H_kv, rows)
    total = totals[0]
    value = torch.bmm(weights[0], _page_of(v_cache, pages[:, 0]))
    for page in range(1, p):  # fixed summation order; later pages add exact zeros
        total = total + totals[page]
        value += torch.bmm(weights[page], _page_of(v_cache, pages[:, page]))

    result = (value / total[..., None])[:, : t * rep]
    result = result.view(n, kv_heads, t, rep, dim).permute(0, 2, 1, 3, 4).reshape(n * t, heads, dim).to(q.dtype)
    real = _real(index) if tiles.real is None else tiles.real
    out[index.reshape(-1)[real]] = result[real]


def _real(rows: Tensor) -> Tensor:
    return (rows.reshape(-1) >= 0).nonzero()[:, 0]


def _page_of(cache: Tensor, page: Tensor) -> Tensor:
    """Return one page of each tile, float32 (n * H_kv, PAGE, D). page: (n,) int64."""
    return cache[page].float().flatten(0, 1)
