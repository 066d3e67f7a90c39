"""Attention of a packed batch on a GPU: of the learner, over its own keys; of the sampler, over its paged KV cache.

All give a row the same bits: keys are walked in blocks at fixed positions (`qarl_kernels.flash`). Each starts from the
layer's product of queries, keys and values; the sampler's write keys and values where the cache has them, in the kernel
that turns them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from qarl_kernels.flash.backward import attention_backward
from qarl_kernels.flash.forward import attention_forward
from qarl_kernels.flash.layout import PackedLayout, packed_layout
from qarl_kernels.flash.paged import PagedLayout, decode_attention, paged_attention, paged_layout
from qarl_kernels.flash.pairs import from_cache
from qarl_kernels.paged_rotary import rotary_into_pages
from qarl_kernels.rotary import Rotation, rotary_forward
from torch import Tensor

from qarl.policy.attention import Caches, Span, positions_of, slots_of


@dataclass(frozen=True)
class PackedAttention:
    """Of prompts, each followed by its continuations; see `PackedLayout`."""

    layout: PackedLayout

    @property
    def positions(self) -> Tensor:
        return self.layout.positions

    def forward(
        self, qkv: Tensor, rotation: Rotation, layer: int, scale: float, window: int | None
    ) -> tuple[Tensor, Tensor | None]:
        """qkv (T, (H + 2 H_kv) D), before the rotation -> out (T, H, D) and its log-sum-exp (H, T)."""
        return attention_forward(*rotary_forward(qkv, rotation), self.layout, scale, window)

    def keys_and_values(self, qkv: Tensor, rotation: Rotation, layer: int) -> tuple[Tensor, Tensor]:
        """What `forward` attends to of the batch's rows: (T, H_kv, D) each, for a trace."""
        return rotary_forward(qkv, rotation)[1:]

    def backward(
        self,
        grad: Tensor,
        qkv: Tensor,
        rotation: Rotation,
        out: Tensor,
        lse: Tensor,
        scale: float,
        window: int | None,
        dv: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Gradients of the turned queries and keys, of a forward's arguments and results; that of v goes into dv."""
        q, k, v = rotary_forward(qkv, rotation)
        dq, dk, _ = attention_backward(grad, q, k, v, out, lse, self.layout, scale, window, dv=dv)
        return dq, dk


@dataclass(frozen=True)
class PagedAttention:
    """Of spans of sequences over a KV cache: prefills, their chunks, and decodes.

    positions: (T,) int64. slots: (T,) int64, page * PAGE + offset where each token's keys go; negative: nowhere.
    """

    layout: PagedLayout
    positions: Tensor
    slots: Tensor
    caches: Caches

    @classmethod
    def of_tables(
        cls,
        counts: np.ndarray,
        positions: np.ndarray,
        page_table: Tensor,
        caches: Caches,
        slots: Tensor | None = None,
    ) -> PagedAttention:
        """Of one span a sequence, one after the other in the batch; one copy to the device and no wait for it.

        counts, positions: (S,) integers of the host, tokens of each span and the position of its first one.
        page_table: (S, P) int32 on the device, pages of each sequence in order. slots: as above, if they are there.
        """
        counts, positions = counts.astype(np.int64), positions.astype(np.int64)
        rows = np.cumsum(counts) - counts
        span = np.repeat(np.arange(counts.size), counts)
        each = np.arange(span.size) - rows[span] + positions[span]
        layout, (each_there, span_there) = paged_layout(
            rows, counts, positions, page_table, page_table.device, beside=(each, span)
        )
        if slots is None:
            page = caches[0][0].shape[2]
            slots = page_table[span_there, each_there // page].long() * page + each_there % page
        return cls(layout, each_there, slots, caches)

    def forward(
        self, qkv: Tensor, rotation: Rotation, layer: int, scale: float, window: int | None
    ) -> tuple[Tensor, Tensor | None]:
        """As of `PackedAttention`, over the layer's cache, which gets keys and values first; no log-sum-exp."""
        keys, values = self.caches[layer]
        q = rotary_into_pages(qkv, rotation, keys, values, self.slots)
        return paged_attention(q, keys, values, self.layout, scale, window), None

    def keys_and_values(self, qkv: Tensor, rotation: Rotation, layer: int) -> tuple[Tensor, Tensor]:
        """As of `PackedAttention`, read back from the cache after `forward`."""
        return _read(self.caches[layer], self.slots, qkv.dtype)


@dataclass(frozen=True)
class DecodeAttention:
    """Of one token a sequence over a KV cache. Launches depend on shapes and max_length alone, and everything else is
    on the device: a CUDA graph captures a forward, and replays it with what the tensors hold by then.

    positions: (S,) int64. slots: (S,) int64, page * PAGE + offset where each row's own key goes; negative: nowhere.
    page_table: (S, P) int32, pages of each row's sequence in order; past its end they may be anything.
    lengths: (S,) int32, keys that each row sees, its own among them; a row of 0 gives zeros.
    max_length: no length is greater. caches: per layer (k, v), each (pages, H_kv, PAGE, D), any strides but D's.
    """

    positions: Tensor
    slots: Tensor
    page_table: Tensor
    lengths: Tensor
    max_length: int
    caches: Caches

    def forward(
        self, qkv: Tensor, rotation: Rotation, layer: int, scale: float, window: int | None
    ) -> tuple[Tensor, Tensor | None]:
        """As of `PagedAttention`."""
        keys, values = self.caches[layer]
        q = rotary_into_pages(qkv, rotation, keys, values, self.slots)
        where = self.page_table, self.lengths
        return decode_attention(q, keys, values, *where, scale, window, self.max_length), None

    def keys_and_values(self, qkv: Tensor, rotation: Rotation, layer: int) -> tuple[Tensor, Tensor]:
        """As of `PackedAttention`, read back from the cache after `forward`."""
        return _read(self.caches[layer], self.slots, qkv.dtype)


def _read(cache: tuple[Tensor, Tensor], slots: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys and values in a layer's cache, which `dtype` holds exactly; those of a negative slot are no row's."""
    page, offset = slots // cache[0].shape[2], slots % cache[0].shape[2]
    keys, values = cache
    if keys.dtype == torch.float8_e4m3fn:
        # As bytes: torch does not index e4m3 everywhere.
        keys, values = (from_cache(part.view(torch.uint8)[page, :, offset].view(part.dtype)) for part in cache)
        return keys.to(dtype), values.to(dtype)
    return keys[page, :, offset], values[page, :, offset]


FusedAttention: TypeAlias = PackedAttention | PagedAttention | DecodeAttention


def packed_attention(groups: list[tuple[int, list[int]]], device: torch.device) -> PackedAttention:
    """See `qarl.policy.attention.packed`."""
    return PackedAttention(packed_layout(groups, device))


def sampler_attention(spans: Sequence[Span], device: torch.device, caches: Caches) -> PagedAttention:
    """See `qarl.policy.attention.paged`."""
    beside = np.array(positions_of(spans), np.int64), np.array(slots_of(spans), np.int64)
    columns = [s.row for s in spans], [s.count for s in spans], [s.position for s in spans]
    layout, (positions, slots) = paged_layout(*columns, [s.pages for s in spans], device, beside)
    return PagedAttention(layout, positions, slots, caches)
