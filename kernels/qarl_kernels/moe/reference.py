"""A mixture of experts in plain torch: the meaning of the kernels beside it, the CPU's path, and their oracle.

Nothing here waits for a GPU but `grouped_dense`, `grouped_input_grad` and `grouped_weight_grad`, which go through the
experts one after the other.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qarl_kernels.moe.groups import Groups


def groups_of(experts: Tensor, count: int) -> Groups:
    """`qarl_kernels.moe.dispatch.groups_of`: a stable sort."""
    ordered, order = torch.sort(experts.flatten().clamp(0, count - 1), stable=True)
    rows = torch.arange(order.shape[0], dtype=torch.int32, device=experts.device)
    place = torch.empty_like(rows).scatter_(0, order, rows)
    bounds = torch.arange(count + 1, dtype=ordered.dtype, device=experts.device)
    starts = torch.searchsorted(ordered, bounds, out_int32=True)
    return Groups(count, experts.shape[1], order.to(torch.int32), place, starts)
