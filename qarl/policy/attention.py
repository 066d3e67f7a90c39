"""Packed batches without padding, and their attention over KV pages in plain torch.

Learner and sampler share this attention: k and v go into pages, and `qarl_kernels.attention` attends through them. The
sampler passes its KV cache; the learner gets fresh pages in each layer, so a row has the same bits in both. The
learner's backward recomputes the attention with torch's SDPA. `qarl.policy.fused_attention` does the same on a GPU.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property
from itertools import compress
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from qarl_kernels.attention import PAGE, TILE, QueryTiles, paged_attention
from qarl_kernels.flash.layout import packed_layout
from torch import Tensor

from qarl.policy.fused_attention import DecodeAttention, PackedAttention, PagedAttention, sampler_attention
from qarl.policy.pages import Caches, Span, positions_of, slots_of
from qarl.policy.trace import Context


@dataclass
class Packing:
    """A learner batch: each prompt is followed by its responses.

    Attributes:
        groups: Argument of `packed`: per prompt its length, and the lengths of its continuations.
        ids: Ids of all tokens.
        rows: Per predicted response token, the row that predicts it.
        starts: Per response, the first row of its prompt and of its own tokens.
    """

    groups: list[tuple[int, list[int]]] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    starts: list[tuple[int, int]] = field(default_factory=list)

    def contexts(self, prompts: list[list[int]], responses: list[list[int]]) -> list[Context]:
        """Return the sequences that the rows belong to, for a trace. prompts, responses: as passed to `pack`."""
        found = {}
        for (of_prompt, own), prompt, response in zip(self.starts, prompts, responses, strict=True):
            found[of_prompt] = Context(of_prompt, 0, prompt)
            if len(response) > 1:
                found[own] = Context(own, len(prompt), prompt + response[:-1])
        return list(found.values())


def pack(prompts: list[list[int]], responses: list[list[int]], written: list[list[bool]] | None = None) -> Packing:
    """Pack prompts and responses. Consecutive equal prompts are stored once, and the last token of a response, which
    predicts nothing, is left out.

    Args:
        prompts: Token ids.
        responses: Token ids, one response per prompt.
        written: Per response, whether the policy wrote each token. Others are not predicted. None: all written.
    """
    found = Packing()
    before: list[int] | None = None
    start = 0
    for index, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        if prompt != before:
            start = len(found.ids)
            found.groups.append((len(prompt), []))
            found.ids += prompt
            before, last_of_prompt = prompt, len(found.ids) - 1
        found.groups[-1][1].append(len(response) - 1)
        rows = [last_of_prompt, *range(len(found.ids), len(found.ids) + len(response) - 1)]
        found.rows += rows if written is None else compress(rows, written[index])
        found.starts.append((start, len(found.ids)))
        found.ids += response[:-1]
    return found


@dataclass(frozen=True)
class BackwardLayout:
    """Layout of the learner's backward: one padded row of tokens per sequence, prompt first.

    Attributes:
        rows: (S, W) int64, packed row of each token, 0 if padded.
        real: (S, W) bool, false for padding.
        own: (S, W) bool, false for repeated tokens of a shared prompt (the gradient of its query counts once).
    """

    rows: Tensor
    real: Tensor
    own: Tensor


@dataclass(frozen=True)
class PlainAttention:
    """Attention in plain torch; the same object for every layer.

    Attributes:
        positions: (T,) int64, position of each row in its sequence.
        slots: (L,) int64, where keys and values are written: page * PAGE + offset.
        tiles: Query tiles that cover every token once.
        caches: The sampler's KV caches; None for the learner, which gets `fresh_pages` zeroed pages and a
            `backward_layout`.
        sources: (L,) int64, row whose key and value are written to each slot; None: L = T, one slot per row.
        fresh_pages: Number of pages that the learner's forward needs in each layer.
    """

    positions: Tensor
    slots: Tensor
    tiles: list[QueryTiles]
    caches: Caches | None = None
    sources: Tensor | None = None
    fresh_pages: int = 0
    backward_layout: BackwardLayout | None = None

    @cached_property
    def places(self) -> tuple[Tensor, Tensor]:
        """Return page and offset of each slot, (L,) int64 each; computed once for all layers."""
        return self.slots // PAGE, self.slots % PAGE

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layer: int, scale: float, window: int | None) -> Tensor:
        """Return the attention of one layer, (T, H, D). q: (T, H, D). k, v: (T, H_kv, D)."""
        if self.caches is None:
            return _LearnerAttention.apply(q, k, v, self, scale, window)
        return _write_and_attend(q, k, v, self, self.caches[layer], scale, window)


Attention: TypeAlias = PlainAttention | PackedAttention | PagedAttention | DecodeAttention


def packed(groups: list[tuple[int, list[int]]], device: torch.device, fused: bool) -> Attention:
    """Return attention for prompts, each followed by its continuations, over their own keys.

    Args:
        groups: Per prompt its length, and the lengths of its continuations. The batch is packed as prompt,
            continuation, continuation, next prompt. Every prompt has at least one continuation; length 0 stands for
            the prompt alone.
        device: Device of the batch.
        fused: Whether Triton kernels run it; otherwise plain torch.
    """
    if fused:
        return PackedAttention(packed_layout(groups, device))
    return _plain_packed(groups, device)


def paged(spans: list[Span], device: torch.device, caches: Caches, fused: bool) -> Attention:
    """Return attention for spans of sequences over the sampler's KV cache. It also writes their keys and values
    there.
    """
    if fused:
        return sampler_attention(spans, device, caches)
    return PlainAttention(
        torch.tensor(positions_of(spans), device=device),
        torch.tensor(slots_of(spans), device=device),
        _tiles(spans, device),
        caches,
    )


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


def _plain_packed(groups: list[tuple[int, list[int]]], device: torch.device) -> PlainAttention:
    """A continuation reads its prompt's full pages in place, and copies k and v of the last, partial page."""
    spans: list[Span] = []
    sources: list[int] = []
    slots: list[int] = []
    sequences: list[tuple[list[int], int]] = []  # packed rows of a whole sequence; how many an earlier one has too
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
    return PlainAttention(
        positions=torch.tensor(positions_of(spans), device=device),
        slots=torch.tensor(slots_of(spans) + slots, device=device),
        sources=torch.tensor(list(range(row)) + sources, device=device),
        tiles=_tiles(spans, device),
        fresh_pages=page,
        backward_layout=_backward(sequences, device),
    )


def _backward(sequences: list[tuple[list[int], int]], device: torch.device) -> BackwardLayout:
    width = max(len(rows) for rows, _ in sequences)
    rows = torch.tensor([r + [0] * (width - len(r)) for r, _ in sequences])
    column = torch.arange(width)
    real = column[None] < torch.tensor([[len(r)] for r, _ in sequences])
    own = real & (column[None] >= torch.tensor([[repeated] for _, repeated in sequences]))
    return BackwardLayout(rows.to(device), real.to(device), own.to(device))


def _write_and_attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    context: PlainAttention,
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
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, context: PlainAttention, scale: float, window: int | None
    ) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.layout, ctx.scale, ctx.window = context.backward_layout, scale, window
        shape = (context.fresh_pages, k.shape[1], PAGE, k.shape[2])
        # A page is read by many tiles, and the CPU's products are float32: convert once, here.
        dtype = torch.float32 if k.device.type == "cpu" else k.dtype
        cache = (k.new_zeros(shape, dtype=dtype), v.new_zeros(shape, dtype=dtype))
        return _write_and_attend(q, k, v, context, cache, scale, window)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v = ctx.saved_tensors
        layout = ctx.layout
        wide = torch.float32 if q.device.type == "cpu" else q.dtype
        with torch.enable_grad():
            # right-padded (S, H, W, D): the causal mask hides the padding from real tokens
            padded = [t.detach()[layout.rows].transpose(1, 2).to(wide).requires_grad_() for t in (q, k, v)]
            rep = q.shape[1] // k.shape[1]
            query, key, value = padded[0], *(t.repeat_interleave(rep, dim=1) for t in padded[1:])
            mask = None
            if ctx.window is not None:
                column = torch.arange(layout.rows.shape[1], device=q.device)
                mask = (column[None] <= column[:, None]) & (column[None] > column[:, None] - ctx.window)
            out = F.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, is_causal=mask is None, scale=ctx.scale
            )
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
