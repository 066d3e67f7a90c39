"""Asynchronous copies to a GPU, and times that include its queued work."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def upload(values: Tensor, device: torch.device) -> Tensor:
    """Copy values to the device; from the CPU to a GPU through pinned memory, without synchronizing."""
    if values.device.type == "cpu" and device.type == "cuda":
        return values.pin_memory().to(device, non_blocking=True)
    return values.to(device)


def synchronized_s(device: torch.device) -> float:
    """Return `time.perf_counter()` after all queued work of the device. A "cuda" without index is the current GPU."""
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)
    return time.perf_counter()
