"""Which expert each row of a grouped product belongs to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from qarl_kernels.integers import cdiv, next_power_of_2


@dataclass(frozen=True)
class Groups:
    """The (token, slot) pairs of a batch, sorted by expert; pairs of one expert keep their order.

    T tokens with k experts each make R = T * k pairs; pair p is token * k + slot. Made by `qarl_kernels.moe.dispatch`.
    The host knows the shapes only.

    Attributes:
        experts: Number of experts, E.
        slots: Experts per token, k.
        order: (R,) int32, the pair of each sorted row.
        place: (R,) int32, the sorted row of each pair.
        starts: (E + 1,) int32, the first sorted row of each expert, and R.
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


def row_tiles(m: int, block_m: int, groups: Groups | None) -> int:
    """Tiles of block_m rows in m rows; with groups, the most that any distribution over the experts could need."""
    if groups is None:
        return cdiv(m, block_m)
    return (m + min(groups.experts, m) * (block_m - 1)) // block_m


def output_rows(x: Tensor, groups: Groups | None, gathered: bool, bias: Tensor | None = None) -> int:
    """M of a product of x. Raises ValueError if x does not have the rows that the groups need, or a bias is given."""
    if groups is None:
        return x.shape[0]
    needed = groups.rows // groups.slots if gathered else groups.rows
    if x.shape[0] != needed:
        raise ValueError(
            f"x has {x.shape[0]} rows, but these groups need {needed}, one per {'token' if gathered else 'sorted pair'}"
        )
    if bias is not None:
        raise ValueError("grouped products take no bias")
    return groups.rows


def output_features(rows: int, groups: Groups | None) -> int:
    """N of a weight with N rows per expert. Raises ValueError if its rows are not a multiple of the experts."""
    if groups is None:
        return rows
    if rows % groups.experts:
        raise ValueError(f"a weight of {rows} rows is not that of {groups.experts} experts; concatenate all of theirs")
    return rows // groups.experts


def kernel_arguments(groups: Groups | None, gathered: bool) -> dict[str, Any]:
    """What `blocks.program_tile` and `blocks.source_rows` need; None and 0 compile a dense product."""
    if groups is None:
        return {"order": None, "starts": None, "EXPERTS": 0, "LANES": 0, "SLOTS": 0}
    return {
        "order": groups.order if gathered else None,
        "starts": groups.starts,
        "EXPERTS": groups.experts,
        "LANES": next_power_of_2(groups.experts),
        "SLOTS": groups.slots,
    }
