"""Whether tensors have the same bytes: one pair, or many with one wait for the GPU."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

WORDS = (torch.int64, torch.int32, torch.int16, torch.int8)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same shape, dtype and bytes; waits for a GPU."""
    known = _known(a, b)
    return torch.equal(*_words(a, b)) if known is None else known


@dataclass(frozen=True)
class Proof:
    """Collects comparisons of tensors to the bit; `settle` waits for the GPU once for all. place: prefix of errors."""

    place: str = ""
    _same: list[tuple[str, bool | Tensor]] = field(default_factory=list)

    def of(self, place: str) -> Proof:
        """The same proof with another prefix."""
        return replace(self, place=place)

    def add(self, what: str, a: Tensor, b: Tensor) -> None:
        """a and b must be the same; what: the error otherwise. Keeps neither of them."""
        same: bool | Tensor | None = _known(a, b)
        if same is None:
            one, other = _words(a, b)
            same = (one == other).all() if one.is_cuda else torch.equal(one, other)
        self._same.append((f"{self.place}{what}", same))

    def settle(self) -> None:
        """Raise ValueError for the first comparison that failed."""
        waited = [same for _, same in self._same if isinstance(same, Tensor)]
        answers = iter(torch.stack(waited).tolist() if waited else ())
        found = [(what, next(answers) if isinstance(same, Tensor) else same) for what, same in self._same]
        self._same.clear()
        for what, same in found:
            if not same:
                raise ValueError(what)


def _known(a: Tensor, b: Tensor) -> bool | None:
    """The answer if it needs no look at the bytes."""
    if a is b or (a.shape, a.dtype) != (b.shape, b.dtype):
        return a is b
    return True if a.data_ptr() == b.data_ptr() and a.stride() == b.stride() else None


def _words(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Both as integers of the widest dtype that fits: torch compares element by element."""
    one, other = a.contiguous().view(-1), b.contiguous().view(-1)
    sizes = [one.nbytes, *(tensor.storage_offset() * tensor.itemsize for tensor in (one, other))]
    kind = next(kind for kind in WORDS if all(size % kind.itemsize == 0 for size in sizes))
    return one.view(kind), other.view(kind)
