"""Asynchronous copies to a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def upload(values: Tensor, device: torch.device) -> Tensor:
    """Copy values to the device; from the CPU to a GPU through pinned memory, without synchronizing."""
    if values.device.type == "cpu" and device.type == "cuda":
        return values.pin_memory().to(device, non_blocking=True)
    return values.to(device)
