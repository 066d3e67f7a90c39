"""Which expert each row of a grouped product belongs to."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Groups:
    """The (token, slot) pairs of a batch, sorted by expert; pairs of one expert keep their order.

    T tokens have k experts each, R = T * k pairs; pair p = token * k + slot. Made by `qarl_kernels.moe.dispatch`, and
    nothing of it is known to the host but its shapes.

    experts: how many there are, E. slots: k. order: (R,) int32, the pair that sorted row r is. place: (R,) int32, the
    sorted row of pair p. starts: (E + 1,) int32, the first sorted row of each expert, and R.
    """

    experts: int
    slots: int
    order: Tensor
    place: Tensor
    starts: Tensor

    @property
    def rows(self) -> int:
        """R."""
        return self.order.shape[0]
