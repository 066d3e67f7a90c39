"""Attention for packed sequences, registered with transformers as the implementation "qarl".

The model's own attention modules compute q, k and v; this function writes k and v into pages and attends through
`qarl_kernels.attention`. The sampler passes its KV cache; the learner gets a fresh one per layer, so both run the
same function on the same pages. The learner's backward is that of exact attention recomputed with torch's SDPA.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from qarl_kernels.attention import PAGE, TILE, QueryTiles, paged_attention
from torch import Tensor, nn
from transformers import AttentionInterface

IMPLEMENTATION = "qarl"


@dataclass(frozen=True)
class Span:
    """Consecutive tokens of one sequence in a packed batch.

    row: first row in the batch; count: tokens; position: of the first token in its sequence; pages: the sequence's
    KV pages in order, enough for all tokens up to the last of the span.
    """

    row: int
    count: int
    position: int
    pages: list[int]


@dataclass(frozen=True)
class Backward:
    """How the learner's backward lays tokens out: one padded row of tokens per sequence, prompt first.

    rows: (S, W) int64, packed row of each token, 0 where padded; real: (S, W) bool; own: (S, W) bool, false where a
    shared prompt's token stands a second time (its query's gradient counts once).
    """

    rows: Tensor
    real: Tensor
    own: Tensor


@dataclass(frozen=True)
class AttentionContext:
    """What one forward needs to know, the same for every layer.

    slots: (L,) int64, page * PAGE + offset where k and v of the rows `sources` go; sources None means all T rows.
    tiles: cover every token once. caches: per layer (k, v), each (P, H_kv, PAGE, D); None for the learner, who gets
    `fresh_pages` zeroed pages and a `backward`.
    """

    slots: Tensor
    tiles: list[QueryTiles]
    caches: list[tuple[Tensor, Tensor]] | None = None
    sources: Tensor | None = None
    fresh_pages: int = 0
    backward: Backward | None = None

    @cached_property
    def places(self) -> tuple[Tensor, Tensor]:
        """Page and offset of each slot, (L,) int64 each; computed once for all layers."""
        return self.slots // PAGE, self.slots % PAGE


def sampler_context(spans: list[Span], device: torch.device, caches: list[tuple[Tensor, Tensor]]) -> AttentionContext:
    """Attention of a packed batch over the sampler's KV cache."""
    return AttentionContext(torch.tensor(_slots(spans), device=device), _tiles(spans, device), caches)


def _slots(spans: list[Span]) -> list[int]:
    return [s.pages[p // PAGE] * PAGE + p % PAGE for s in spans for p in range(s.position, s.position + s.count)]


def _tiles(spans: list[Span], device: torch.device) -> list[QueryTiles]:
    """Cut spans into query tiles: one token for a decode, TILE tokens otherwise, grouped by pages to look at."""
    buckets: dict[tuple[int, int], list[tuple[list[int], list[int], list[int]]]] = defaultdict(list)
    for span in spans:
        size = 1 if span.count == 1 else TILE
        for start in range(0, span.count, size):
            real = min(size, span.count - start)
            pad = size - real
            rows = list(range(span.row + start, span.row + start + real)) + [-1] * pad
            positions = list(range(span.position + start, span.position + start + real)) + [0] * pad
            width = _round_pages(positions[real - 1] // PAGE + 1)
            pages = (span.pages + [span.pages[0]] * width)[:width]
            buckets[(size, width)].append((rows, positions, pages))
    return [
        QueryTiles(*(torch.tensor(column) for column in zip(*tiles, strict=True))).to(device)
        for _, tiles in sorted(buckets.items())
    ]


def _round_pages(pages: int) -> int:
    """Tiles are grouped by page count: powers of two up to 8, then multiples of 8. Extra pages add exact zeros."""
    return 1 << (pages - 1).bit_length() if pages <= 8 else -(-pages // 8) * 8


def learner_context(groups: list[tuple[int, list[int]]], device: torch.device) -> tuple[AttentionContext, Tensor]:
    """Context and position ids (T,) for prompts, each run once and followed by its continuations.

    groups: (prompt tokens, tokens of each continuation), packed as prompt, continuation, continuation, next prompt.
    A continuation attends to its prompt's full pages where they are, and to copies of k and v in the last, partial
    page. An empty continuation stands for the prompt alone; every group has at least one continuation.
    """
    spans: list[Span] = []
    sources: list[int] = []
    slots: list[int] = []
    sequences: list[tuple[list[int], int]] = []  # packed rows of a whole sequence; how many of them repeat
    row = page = 0
    for prompt, continuations in groups:
        count = -(-prompt // PAGE)
        pages = list(range(page, page + count))
        page += count
        start, first = row, True
        spans.append(Span(row, prompt, 0, pages))
        row += prompt
        for length in continuations:
            prompt_rows = list(range(start, start + prompt))
            sequences.append((prompt_rows + list(range(row, row + length)), 0 if first else prompt))
            first = False
            if length == 0:
                continue
            full = prompt // PAGE
            own = -(-(prompt + length) // PAGE) - full
            span = Span(row, length, prompt, pages[:full] + list(range(page, page + own)))
            page += own
            spans.append(span)
            copied = range(full * PAGE, prompt)
            sources += [start + position for position in copied]
            slots += [span.pages[full] * PAGE + position % PAGE for position in copied]
            row += length
    positions = torch.tensor([p for s in spans for p in range(s.position, s.position + s.count)], device=device)
    context = AttentionContext(
        slots=torch.tensor(_slots(spans) + slots, device=device),
        sources=torch.tensor(list(range(row)) + sources, device=device),
        tiles=_tiles(spans, device),
        fresh_pages=page,
        backward=_backward(sequences, device),
    )
    return context, positions


def _backward(sequences: list[tuple[list[int], int]], device: torch.device) -> Backward:
    width = max(len(rows) for rows, _ in sequences)
    rows = torch.tensor([r + [0] * (width - len(r)) for r, _ in sequences])
    column = torch.arange(width)
    real = column[None] < torch.tensor([[len(r)] for r, _ in sequences])
    own = real & (column[None] >= torch.tensor([[repeated] for _, repeated in sequences]))
    return Backward(rows.to(device), real.to(device), own.to(device))


def _write_and_attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    context: AttentionContext,
    cache: tuple[Tensor, Tensor],
    scale: float,
    window: int | None,
) -> Tensor:
    page, offset = context.places
    for pages, rows in zip(cache, (k, v), strict=True):
        pages[page, :, offset] = (rows if context.sources is None else rows[context.sources]).to(pages.dtype)
    return paged_attention(q, *cache, context.tiles, scale, window)


class _LearnerAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, context, scale, window):
        ctx.save_for_backward(q, k, v)
        ctx.layout, ctx.scale, ctx.window = context.backward, scale, window
        shape = (context.fresh_pages, k.shape[1], PAGE, k.shape[2])
        # A page is read by many tiles, and the CPU's products are float32: convert once, here.
        held = torch.float32 if k.device.type == "cpu" else k.dtype
        cache = (k.new_zeros(shape, dtype=held), v.new_zeros(shape, dtype=held))
        return _write_and_attend(q, k, v, context, cache, scale, window)

    @staticmethod
    def backward(ctx, grad):
        q, k, v = ctx.saved_tensors
        layout = ctx.layout
        wide = torch.float32 if q.device.type == "cpu" else q.dtype
        with torch.enable_grad():
            # right-padded (S, H, W, D): a causal mask keeps real tokens from ever seeing padding
            padded = [t.detach()[layout.rows].transpose(1, 2).to(wide).requires_grad_() for t in (q, k, v)]
            rep = q.shape[1] // k.shape[1]
            expanded = [padded[0], *(t.repeat_interleave(rep, dim=1) for t in padded[1:])]
            mask = None
            if ctx.window is not None:
                column = torch.arange(layout.rows.shape[1], device=q.device)
                mask = (column[None] <= column[:, None]) & (column[None] > column[:, None] - ctx.window)
            out = F.scaled_dot_product_attention(*expanded, attn_mask=mask, is_causal=mask is None, scale=ctx.scale)
        grad_out = (grad[layout.rows] * layout.own[..., None, None]).transpose(1, 2).to(wide)
        grads = torch.autograd.grad(out, padded, grad_out)
        rows = layout.rows[layout.real]
        summed = (
            torch.zeros(t.shape, dtype=torch.float32, device=q.device)
            .index_add_(0, rows, g.transpose(1, 2)[layout.real].float())
            .to(q.dtype)
            for t, g in zip((q, k, v), grads, strict=True)
        )
        return *summed, None, None, None


def _qarl_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    qarl_context: AttentionContext | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """query: (1, H, T, D); key, value: (1, H_kv, T, D). Returns (1, T, H, D)."""
    assert qarl_context is not None, "the qarl attention needs an AttentionContext"
    q, k, v = (t[0].transpose(0, 1).contiguous() for t in (query, key, value))
    if qarl_context.caches is None:
        out = _LearnerAttention.apply(q, k, v, qarl_context, scaling, sliding_window)
    else:
        cache = qarl_context.caches[module.layer_idx]
        out = _write_and_attend(q, k, v, qarl_context, cache, scaling, sliding_window)
    return out[None], None


AttentionInterface.register(IMPLEMENTATION, _qarl_attention)
