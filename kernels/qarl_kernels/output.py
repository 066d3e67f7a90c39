"""Where a product goes: into a matrix that the caller gives, or a new one."""

from __future__ import annotations

import torch
from torch import Tensor


def output(out: Tensor | None, m: int, n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`out`, after a look at it, or a new matrix (m, n).

    Args:
        out: (m, n) of `dtype` on `device`, rows any stride apart; or None.

    Raises:
        ValueError: `out` is something else.
    """
    if out is None:
        return torch.empty(m, n, dtype=dtype, device=device)
    if out.shape != (m, n) or out.dtype != dtype or out.device != device or (out.numel() and out.stride(1) != 1):
        raise ValueError(
            f"out must be {dtype} [{m}, {n}] on {device} with adjacent elements in a row, not {out.dtype} "
            f"{list(out.shape)} on {out.device} with strides {list(out.stride())}"
        )
    return out
