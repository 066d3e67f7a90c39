"""The KV cache in pages, and a pool that lets samples of a prompt share its full pages."""

from __future__ import annotations

from collections.abc import Callable

import torch
from qarl_kernels.attention import PAGE
from torch import Tensor


class KVCache:
    """Keys and values of `count` pages in every layer.

    `layers` has (k, v) per layer, each (P, H_kv, PAGE, D). All are in one block of memory, so that a page is cleared or
    copied in all layers at once.
    """

    def __init__(
        self, count: int, layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.count = count
        self._block: Tensor = torch.empty(layers, 2, count, kv_heads, PAGE, head_dim, dtype=dtype, device=device)
        self.layers = [(layer[0], layer[1]) for layer in self._block]

    def clear(self, page: int) -> None:
        """Zero a page."""
        self._block[:, :, page].zero_()

    def copy(self, source: int, target: int, tokens: int) -> None:
        """Copy a page's first `tokens` tokens."""
        self._block[:, :, target, :, :tokens] = self._block[:, :, source, :, :tokens]


class PagePool:
    """`count` pages by number, with reference counts. `on_take` is called with every page that is taken."""

    def __init__(self, count: int, on_take: Callable[[int], None]) -> None:
        self.count = count
        self._on_take = on_take
        self._free = list(range(count - 1, -1, -1))
        self._holders = [0] * count

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """Take a free page. The caller has checked `free`."""
        page = self._free.pop()
        self._holders[page] = 1
        self._on_take(page)
        return page

    def share(self, page: int) -> int:
        assert self._holders[page] > 0, f"page {page} is shared but not taken"
        self._holders[page] += 1
        return page

    def release(self, pages: list[int]) -> None:
        for page in pages:
            self._holders[page] -= 1
            assert self._holders[page] >= 0, f"page {page} was released twice"
            if self._holders[page] == 0:
                self._free.append(page)
