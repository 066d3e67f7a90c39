"""The pool of KV pages: who holds which, counted, so that samples of one prompt share its full pages."""

from __future__ import annotations


class PagePool:
    """`count` pages, handed out by number. A page shared by several sequences returns when the last lets go."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(range(count - 1, -1, -1))
        self._holders = [0] * count

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """A page of one's own. The caller has checked `free`."""
        page = self._free.pop()
        self._holders[page] = 1
        return page

    def share(self, page: int) -> int:
        assert self._holders[page] > 0, f"page {page} is shared but nobody holds it"
        self._holders[page] += 1
        return page

    def release(self, pages: list[int]) -> None:
        for page in pages:
            self._holders[page] -= 1
            assert self._holders[page] >= 0, f"page {page} was released twice"
            if self._holders[page] == 0:
                self._free.append(page)
