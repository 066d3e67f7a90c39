"""Attention of a packed batch on a GPU: of the learner, over its own keys; of the sampler, over its paged KV cache.

Both give a row the same bits: keys are walked in blocks at fixed positions (`qarl_kernels.flash`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from qarl_kernels.attention import PAGE
from qarl_kernels.flash.backward import attention_backward
from qarl_kernels.flash.forward import attention_forward
from qarl_kernels.flash.layout import PackedLayout, packed_layout, upload
from qarl_kernels.flash.paged import PagedLayout, paged_attention, paged_layout
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
        self, q: Tensor, k: Tensor, v: Tensor, layer: int, scale: float, window: int | None
    ) -> tuple[Tensor, Tensor | None]:
        """q (T, H, D), k and v (T, H_kv, D) -> out (T, H, D) and its log-sum-exp (H, T)."""
        return attention_forward(q, k, v, self.layout, scale, window)

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        scale: float,
        window: int | None,
        dv: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """dq and dk, of a forward's arguments and results; the gradient of v goes into dv."""
        dq, dk, _ = attention_backward(grad, q, k, v, out, lse, self.layout, scale, window, dv=dv)
        return dq, dk


@dataclass(frozen=True)
class PagedAttention:
    """Of spans of sequences over the sampler's KV cache. pages, offsets: (T,) int64, where each token's keys go."""

    layout: PagedLayout
    positions: Tensor
    pages: Tensor
    offsets: Tensor
    caches: Caches

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, layer: int, scale: float, window: int | None
    ) -> tuple[Tensor, Tensor | None]:
        """As of `PackedAttention`, over the layer's cache, which gets k and v first; no log-sum-exp."""
        keys, values = self.caches[layer]
        keys[self.pages, :, self.offsets] = k
        values[self.pages, :, self.offsets] = v
        return paged_attention(q, keys, values, self.layout, scale, window), None


def packed_attention(groups: list[tuple[int, list[int]]], device: torch.device) -> PackedAttention:
    """See `qarl.policy.attention.packed`."""
    return PackedAttention(packed_layout(groups, device))


def sampler_attention(spans: Sequence[Span], device: torch.device, caches: Caches) -> PagedAttention:
    """See `qarl.policy.attention.paged`."""
    slots = np.array(slots_of(spans), np.int64)
    positions, pages, offsets = upload(device, np.array(positions_of(spans), np.int64), slots // PAGE, slots % PAGE)
    layout = paged_layout(
        [s.row for s in spans], [s.count for s in spans], [s.position for s in spans], [s.pages for s in spans], device
    )
    return PagedAttention(layout, positions, pages, offsets, caches)
