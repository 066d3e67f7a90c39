"""Shapes of dense and grouped products: checks, rows and features, number of tiles, kernel arguments."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qarl_kernels.groups import Groups
from qarl_kernels.integers import cdiv, next_power_of_2


def check_tensor(name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...], shape: tuple[int, ...], fix: str) -> None:
    """Raise ValueError, ending with `fix`, unless a tensor is contiguous and has this shape and one of the dtypes."""
    if tensor.dtype not in dtypes or tuple(tensor.shape) != shape or not tensor.is_contiguous():
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        found = f"{tensor.dtype} {list(tensor.shape)}"
        raise ValueError(f"{name} must be contiguous {wanted} {list(shape)}, not {found}; {fix}")


def check_16_bit(name: str, x: Tensor, other: Tensor) -> None:
    """Raise ValueError unless both are bf16 or both are fp16. name: The function, for the message."""
    if x.dtype not in (torch.bfloat16, torch.float16) or other.dtype != x.dtype:
        raise ValueError(f"{name} needs bf16 or fp16 operands of one dtype, not {x.dtype} and {other.dtype}; cast them")


def row_tiles(m: int, block_m: int, groups: Groups | None) -> int:
    """Number of tiles of block_m rows in m rows; with groups, the most that any split over the experts could need."""
    if groups is None:
        return cdiv(m, block_m)
    return (m + min(groups.experts, m) * (block_m - 1)) // block_m


def output_rows(x: Tensor, groups: Groups | None, gathered: bool, bias: Tensor | None = None) -> int:
    """Return the output rows M of a product of x.

    Raises ValueError if x does not have the rows that the groups need, or if groups have a bias.
    """
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
    """Return the output features N of a weight of `rows`: those of one expert.

    Raises ValueError if `rows` is not a multiple of the number of experts.
    """
    if groups is None:
        return rows
    if rows % groups.experts:
        raise ValueError(f"a weight of {rows} rows is not that of {groups.experts} experts; concatenate all of theirs")
    return rows // groups.experts


def kernel_arguments(groups: Groups | None, gathered: bool) -> dict[str, Any]:
    """Arguments of `blocks.program_tile` and `blocks.source_rows`; None and 0 compile a dense product."""
    if groups is None:
        return {"order": None, "starts": None, "EXPERTS": 0, "LANES": 0, "SLOTS": 0}
    return {
        "order": groups.order if gathered else None,
        "starts": groups.starts,
        "EXPERTS": groups.experts,
        "LANES": next_power_of_2(groups.experts),
        "SLOTS": groups.slots,
    }
