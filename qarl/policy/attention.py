"""Attention for packed sequences, registered with transformers as the implementation "qarl".

The model's own attention modules compute q, k and v; this function writes k and v into pages and attends through
`qarl_kernels.attention`. The sampler passes its KV cache; the learner gets a fresh one per layer, so both run the
same function on the same pages. The learner's backward is that of exact attention recomputed with torch's SDPA.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
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
class AttentionContext:
    """What one forward needs to know, the same for every layer.

    slots: (T,) int64, page * PAGE + offset where each token's k and v go. tiles: cover every token once.
    caches: per layer (k, v), each (P, H_kv, PAGE, D); None for the learner, who gets `fresh_pages` zeroed pages.
    lengths: tokens of each sequence (learner only, whole sequences from position 0).
    """

    slots: Tensor
    tiles: list[QueryTiles]
    caches: list[tuple[Tensor, Tensor]] | None = None
    fresh_pages: int = 0
    lengths: tuple[int, ...] = ()


def build_context(
    spans: list[Span], device: torch.device, caches: list[tuple[Tensor, Tensor]] | None = None
) -> AttentionContext:
    """Plan the attention of a packed batch: where k and v go, and which tile reads which pages."""
    slots: list[int] = []
    buckets: dict[tuple[int, int], list[tuple[list[int], list[int], list[int]]]] = defaultdict(list)
    for span in spans:
        slots += [span.pages[p // PAGE] * PAGE + p % PAGE for p in range(span.position, span.position + span.count)]
        size = 1 if span.count == 1 else TILE
        for start in range(0, span.count, size):
            real = min(size, span.count - start)
            pad = size - real
            rows = list(range(span.row + start, span.row + start + real)) + [-1] * pad
            positions = list(range(span.position + start, span.position + start + real)) + [0] * pad
            width = _round_pages((positions[real - 1]) // PAGE + 1)
            pages = (span.pages + [span.pages[0]] * width)[:width]
            buckets[(size, width)].append((rows, positions, pages))
    tiles = [
        QueryTiles(*(torch.tensor(column) for column in zip(*tiles, strict=True))).to(device)
        for _, tiles in sorted(buckets.items())
    ]
    fresh = 0 if caches is not None else 1 + max(page for span in spans for page in span.pages)
    lengths = () if caches is not None else tuple(span.count for span in spans)
    return AttentionContext(torch.tensor(slots, device=device), tiles, caches, fresh, lengths)


def _round_pages(pages: int) -> int:
    """Tiles are grouped by page count: powers of two up to 8, then multiples of 8. Extra pages add exact zeros."""
    return 1 << (pages - 1).bit_length() if pages <= 8 else -(-pages // 8) * 8


def learner_context(lengths: list[int], device: torch.device) -> tuple[AttentionContext, Tensor]:
    """Context and position ids (T,) for whole sequences packed one after the other."""
    spans, row, page = [], 0, 0
    for length in lengths:
        count = -(-length // PAGE)
        spans.append(Span(row, length, 0, list(range(page, page + count))))
        row, page = row + length, page + count
    positions = torch.cat([torch.arange(n) for n in lengths]).to(device)
    return build_context(spans, device), positions


def _write_and_attend(q: Tensor, k: Tensor, v: Tensor, context: AttentionContext, cache: tuple[Tensor, Tensor],
                      scale: float, window: int | None) -> Tensor:  # fmt: skip
    page, offset = context.slots // PAGE, context.slots % PAGE
    cache[0][page, :, offset] = k
    cache[1][page, :, offset] = v
    return paged_attention(q, *cache, context.tiles, scale, window)


class _LearnerAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, context, scale, window):
        ctx.save_for_backward(q, k, v)
        ctx.lengths, ctx.scale, ctx.window = context.lengths, scale, window
        shape = (context.fresh_pages, k.shape[1], PAGE, k.shape[2])
        cache = (k.new_zeros(shape), v.new_zeros(shape))
        return _write_and_attend(q, k, v, context, cache, scale, window)

    @staticmethod
    def backward(ctx, grad):
        q, k, v = ctx.saved_tensors
        lengths = torch.tensor(ctx.lengths, device=q.device)
        width = int(lengths.max())
        starts = lengths.cumsum(0) - lengths
        column = torch.arange(width, device=q.device)
        real = column[None] < lengths[:, None]  # (S, width)
        rows = (starts[:, None] + column[None]).where(real, 0)
        wide = torch.float32 if q.device.type == "cpu" else q.dtype
        with torch.enable_grad():
            # right-padded (S, H, width, D): a causal mask keeps real tokens from ever seeing padding
            padded = [t.detach()[rows].transpose(1, 2).to(wide).requires_grad_() for t in (q, k, v)]
            rep = q.shape[1] // k.shape[1]
            expanded = [padded[0], *(t.repeat_interleave(rep, dim=1) for t in padded[1:])]
            mask = None
            if ctx.window is not None:
                mask = (column[None] <= column[:, None]) & (column[None] > column[:, None] - ctx.window)
            out = F.scaled_dot_product_attention(*expanded, attn_mask=mask, is_causal=mask is None, scale=ctx.scale)
        grad_out = (grad[rows] * real[..., None, None]).transpose(1, 2).to(wide)
        grads = torch.autograd.grad(out, padded, grad_out)
        q_grad, k_grad, v_grad = (g.transpose(1, 2)[real].to(q.dtype) for g in grads)
        return q_grad, k_grad, v_grad, None, None, None


def _qarl_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, scaling: float,
    dropout: float = 0.0, sliding_window: int | None = None, qarl_context: AttentionContext | None = None, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
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
