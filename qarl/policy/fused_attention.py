"""Attention of a packed batch on a GPU: the learner's, over its own keys, and the sampler's, over its paged KV cache.

All give a row the same bits, because keys are visited in blocks at fixed positions (`qarl_kernels.flash`). Their input
is the output of the packed q, k and v. The sampler's kernel that rotates queries and keys also fills the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from qarl_kernels.flash.backward import attention_backward
from qarl_kernels.flash.forward import attention_forward
from qarl_kernels.flash.layout import PackedLayout
from qarl_kernels.flash.paged import PagedLayout, decode_attention, paged_attention, paged_layout
from qarl_kernels.flash.pairs import from_cache
from qarl_kernels.rotary import Rotation, rotary_forward, rotary_into_pages
from torch import Tensor

from qarl.policy.pages import Caches, Span, positions_of, slots_of


@dataclass(frozen=True)
class PackedAttention:
    """Prompts, each followed by its continuations; see `PackedLayout`."""

    layout: PackedLayout

    @property
    def positions(self) -> Tensor:
        return self.layout.positions

    def forward(
        self, qkv: Tensor, rotation: Rotation, layer: int, scale: float, window: int | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return out (T, H, D) and its log-sum-exp (H, T). qkv: (T, (H + 2 H_kv) D), not rotated."""
        return attention_forward(*rotary_forward(qkv, rotation), self.layout, scale, window)

    def keys_and_values(self, qkv: Tensor, rotation: Rotation, layer: int) -> tuple[Tensor, Tensor]:
        """Return the rotated keys, and the values, that `forward` reads: (T, H_kv, D) each, for a trace."""
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
        """Return the gradients of the rotated queries and keys, and write that of the values to dv (T, H_kv, D).

        grad: (T, H, D), output gradient. The other arguments are those of `forward` and its results.
        """
        q, k, v = rotary_forward(qkv, rotation)
        return attention_backward(grad, q, k, v, out, lse, self.layout, scale, window, dv)


@dataclass(frozen=True)
class PagedAttention:
    """Spans of sequences over a KV cache: prefills, their chunks, and decodes.

    Attributes:
        layout: Layout of the kernel's launch.
        positions: (T,) int64, of each token in its sequence.
        slots: (T,) int64, page * PAGE + offset of each token's keys; negative: nowhere.
        caches: Per layer (k, v).
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
        """Return the attention of one span per sequence, in the batch's order. Does not wait for the device.

        Args:
            counts: (S,) integers on the host, tokens of each span.
            positions: (S,) integers on the host, position of each span's first token.
            page_table: (S, P) int32 on the device, pages of each sequence in order.
            caches: Per layer (k, v).
            slots: See the class. Default: computed from the page table.
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
        """Like `PackedAttention.forward`, over the layer's cache, after writing keys and values; no log-sum-exp."""
        keys, values = self.caches[layer]
        q = rotary_into_pages(qkv, rotation, keys, values, self.slots)
        return paged_attention(q, keys, values, self.layout, scale, window), None

    def keys_and_values(self, qkv: Tensor, rotation: Rotation, layer: int) -> tuple[Tensor, Tensor]:
        """Like `PackedAttention.keys_and_values`, read back from the cache after `forward`."""
        return _read(self.caches[layer], self.slots, qkv.dtype)


@dataclass(frozen=True)
class DecodeAttention:
    """One token per sequence over a KV cache.

    Launches depend on shapes and max_length alone, and everything else is on the device: a CUDA graph captures a
    forward, and replays it on the tensors' current contents.

    Attributes:
        positions: (S,) int64.
        slots: (S,) int64, page * PAGE + offset of each row's own key; negative: nowhere.
        page_table: (S, P) int32, pages of each row's sequence in order; entries past its end are not read.
        lengths: (S,) int32, keys that each row sees, including its own; a row of 0 gives zeros.
        max_length: Upper bound of the lengths.
        caches: Per layer (k, v), each (pages, H_kv, PAGE, D), any strides but the last.
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
        """Like `PagedAttention.forward`."""
        keys, values = self.caches[layer]
        q = rotary_into_pages(qkv, rotation, keys, values, self.slots)
        where = self.page_table, self.lengths
        return decode_attention(q, keys, values, *where, scale, window, self.max_length), None

    def keys_and_values(self, qkv: Tensor, rotation: Rotation, layer: int) -> tuple[Tensor, Tensor]:
        """Like `PagedAttention.keys_and_values`."""
        return _read(self.caches[layer], self.slots, qkv.dtype)


def _read(cache: tuple[Tensor, Tensor], slots: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Read keys and values from a layer's cache, converted to `dtype` without loss. Negative slots read garbage."""
    page, offset = slots // cache[0].shape[2], slots % cache[0].shape[2]
    keys, values = cache
    if keys.dtype == torch.float8_e4m3fn:
        # As bytes: torch does not index e4m3 everywhere.
        keys, values = (from_cache(part.view(torch.uint8)[page, :, offset].view(part.dtype)) for part in cache)
        return keys.to(dtype), values.to(dtype)
    return keys[page, :, offset], values[page, :, offset]


def sampler_attention(spans: Sequence[Span], device: torch.device, caches: Caches) -> PagedAttention:
    """See `qarl.policy.attention.paged`."""
    beside = np.array(positions_of(spans), np.int64), np.array(slots_of(spans), np.int64)
    columns = [s.row for s in spans], [s.count for s in spans], [s.position for s in spans]
    layout, (positions, slots) = paged_layout(*columns, [s.pages for s in spans], device, beside)
    return PagedAttention(layout, positions, slots, caches)
