"""The paged KV cache, and a page pool with reference counts: samples of one prompt share its full pages."""

from __future__ import annotations

from collections.abc import Callable

import torch
from qarl_kernels.attention import PAGE
from torch import Tensor


class KVCache:
    """Keys and values of `count` pages in every layer, in one tensor, so that one operation clears or copies a page.

    Attributes:
        count: Number of pages P.
        layers: (keys, values) per layer, views of (P, H_kv, PAGE, D) each.
    """

    def __init__(
        self, count: int, layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.count = count
        self._block: Tensor = torch.empty(layers, 2, count, kv_heads, PAGE, head_dim, dtype=dtype, device=device)
        self.layers = [(layer[0], layer[1]) for layer in self._block]

    def clear(self, page: int) -> None:
        """Zero a page in all layers."""
        self._block[:, :, page].zero_()

    def copy(self, source: int, target: int, tokens: int) -> None:
        """Copy the first `tokens` tokens of a page in all layers."""
        self._block[:, :, target, :, :tokens] = self._block[:, :, source, :, :tokens]


class PagePool:
    """Reference counts of the pages 0 to `count` - 1.

    Args:
        count: Number of pages.
        on_take: Called with each page that is taken.
    """

    def __init__(self, count: int, on_take: Callable[[int], None]) -> None:
        self.count = count
        self._on_take = on_take
        self._free = list(range(count - 1, -1, -1))
        self._holders = [0] * count

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """Take a free page; `free` must not be 0."""
        page = self._free.pop()
        self._holders[page] = 1
        self._on_take(page)
        return page

    def share(self, page: int) -> int:
        """Add a reference to a taken page. Returns the page."""
        assert self._holders[page] > 0, f"page {page} is shared but not taken"
        self._holders[page] += 1
        return page

    def release(self, pages: list[int]) -> None:
        """Drop one reference to each page; a page without references is free."""
        for page in pages:
            self._holders[page] -= 1
            assert self._holders[page] >= 0, f"page {page} was released twice"
            if self._holders[page] == 0:
                self._free.append(page)
