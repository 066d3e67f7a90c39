"""Bitwise comparison of tensors: one pair, or many pairs with a single GPU synchronization."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

WORDS = (torch.int64, torch.int32, torch.int16, torch.int8)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same shape, dtype and bytes. Synchronizes with a GPU."""
    known = _known(a, b)
    return torch.equal(*_words(a, b)) if known is None else known


@dataclass(frozen=True)
class Proof:
    """Collects bitwise comparisons of tensors. `settle` checks them all with one GPU synchronization.

    place: Prefix of the error messages.
    """

    place: str = ""
    _same: list[tuple[str, bool | Tensor]] = field(default_factory=list)

    def of(self, place: str) -> Proof:
        """Return the same proof, sharing its comparisons, with another prefix."""
        return replace(self, place=place)

    def add(self, what: str, a: Tensor, b: Tensor) -> None:
        """Require that a and b are equal. what: The error message if they are not. Keeps no reference to them."""
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
    """Return the result if it is known without reading the bytes, else None."""
    if a is b or (a.shape, a.dtype) != (b.shape, b.dtype):
        return a is b
    return True if a.data_ptr() == b.data_ptr() and a.stride() == b.stride() else None


def _words(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """View both as integers of the widest possible dtype, because torch compares element by element."""
    one, other = a.contiguous().view(-1), b.contiguous().view(-1)
    sizes = [one.nbytes, *(tensor.storage_offset() * tensor.itemsize for tensor in (one, other))]
    kind = next(kind for kind in WORDS if all(size % kind.itemsize == 0 for size in sizes))
    return one.view(kind), other.view(kind)
