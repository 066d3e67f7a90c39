"""Causal attention over a paged KV cache: prefill, chunked prefill and decode, with the bits of the packed forward.

Spans of several tokens run the packed forward's kernel on gathered pages. Decodes, spans of one token, have a kernel of
their own, whose programs take all query heads of a kv head.
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
class PagedLayout(tables.QueryTiles):
    """The queries of a batch and where their keys are, shared by all layers.

    `queries` has only spans of several tokens. Its last three columns are: sequence, 0, 0.

    Attributes:
        pages: (S, P) int32, pages of each sequence in order; entries past its end may be anything.
        decodes: (d, 3) int32, for each span of one token: row, sequence, number of keys that it sees.
        longest: Maximum number of keys that a decode sees.
    """

    pages: Tensor
    decodes: Tensor
    longest: int


def paged_layout(
    rows: Sequence[int] | np.ndarray,
    counts: Sequence[int] | np.ndarray,
    positions: Sequence[int] | np.ndarray,
    pages: Sequence[Sequence[int]] | Tensor,
    device: torch.device,
    beside: Sequence[np.ndarray] = (),
) -> tuple[PagedLayout, list[Tensor]]:
    """Lay out spans, one per sequence.

    Args:
        rows: First row of each span in the batch.
        counts: Tokens of each span.
        positions: Position of each span's first token.
        pages: For each sequence the pages of all tokens up to the span's last, or an (S, P) int32 table on the device.
        device: Device of the tables, which are copied at once.
        beside: More int64 tables for the same copy.

    Returns:
        The layout, and the tables of `beside` on the device.
    """
    row, count, position = (np.asarray(column, np.int64).reshape(-1) for column in (rows, counts, positions))
    sequence = np.arange(row.size)
    many = np.flatnonzero(count > 1)
    whole, start = tables.split(count[many], tables.TILE)
    span = many[whole]
    queries = np.zeros((span.size, 6), np.int32)
    queries[:, 0] = row[span] + start
    queries[:, 1] = np.minimum(count[span] - start, tables.TILE)
    queries[:, 2] = position[span] + start
    queries[:, 3] = span
    end = queries[:, 2] + queries[:, 1]
    queries = queries[np.argsort(-end, kind="stable")]
    one = np.flatnonzero(count == 1)
    decodes = np.stack([row[one], sequence[one], position[one] + 1], axis=1).astype(np.int32)
    own = [queries, decodes]
    if not isinstance(pages, Tensor):
        table = np.zeros((len(pages), max(map(len, pages), default=0)), np.int32)
        for line, listed in zip(table, pages, strict=True):
            line[: len(listed)] = listed
        own.append(table)
    there = upload(device, *own, *beside)
    layout = PagedLayout(
        tokens=int(count.sum()),
        pages=pages if isinstance(pages, Tensor) else there[2],
        queries=there[0],
        long_tiles=int((end > tables.CHUNK).sum()),
        decodes=there[1],
        longest=int(decodes[:, 2].max(initial=0)),
    )
    return layout, there[len(own) :]


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    layout: PagedLayout,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Compute softmax(q k^T * scale) v for every query over the keys of its sequence up to its own position.

    Args:
        q: (T, H, D) bf16 or fp16, arbitrary row stride; every row belongs to one span of the layout.
        k_cache, v_cache: (P, H_kv, PAGE, D), any strides but the last, PAGE a multiple of 16; of q's dtype or
            float8_e4m3fn, with features in the order of `pairs.py`. Slots past a sequence's end are not read.
        layout: Queries and pages.
        scale: Factor of the scores, positive.
        window: Number of last tokens that a query sees; None: all.

    Returns:
        (T, H, D) of q's dtype.
    """
    _check_cache(q, k_cache, v_cache, scale, window)
    if q.shape[0] != layout.tokens:
        raise ValueError(f"q has {q.shape[0]} rows and the layout {layout.tokens}; they must agree")
    out = torch.empty(*q.shape, dtype=q.dtype, device=q.device)
    for queries, chunks in layout.stretches:
        run(q, k_cache, v_cache, out, None, queries, scale, window, chunks, layout.pages)
    row, sequence, lengths = layout.decodes.unbind(1)
    spans = (layout.pages, row, sequence, lengths)
    decode(q, k_cache, v_cache, out, *spans, scale, window, layout.longest)
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
) -> Tensor:
    """Compute `paged_attention` of one query per sequence, its last token; launches depend on shapes alone.

    Args:
        q: (S, H, D).
        k_cache, v_cache, scale, window: As for `paged_attention`.
        page_table: (S, P) int32, pages of each sequence in order.
        lengths: (S,) int32, tokens of each sequence; length 0 gives zeros.
        max_length: Upper bound of the lengths.

    Returns:
        (S, H, D) of q's dtype.
    """
    _check_cache(q, k_cache, v_cache, scale, window)
    out = torch.empty(*q.shape, dtype=q.dtype, device=q.device)
    decode(q, k_cache, v_cache, out, page_table, None, None, lengths, scale, window, max_length)
    return out


def _check_cache(q: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float, window: int | None) -> None:
    check(q, k_cache, v_cache, scale, window, fp8=True)
    page = k_cache.shape[2]
    if page % 16:
        raise ValueError(f"pages of {page} tokens; they must hold a multiple of 16")
    apart = max(k_cache.stride(2), v_cache.stride(2))
    if page * apart >= 2**31:
        raise ValueError(f"tokens of a page are {apart} values apart; {page} of them must lie within 2^31")
