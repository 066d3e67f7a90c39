"""Tensors beside parameters and buffers that the CUDA graphs of a started vLLM know by address.

A reload of weights copies into the parameters and buffers that were there, and everything else that a layer's kernel
reads it makes anew (`process_weights_after_loading`, read in vLLM 0.24): the lock words of Marlin, the global scales of
NVFP4 experts. A CUDA graph that was captured before goes on with the old address, whose memory other tensors have by
then. Seen on an H200 with `cudagraph_mode: FULL_DECODE_ONLY` and no sleep: Marlin's blocks waited for each other for
ever in the first rollout after the first publish; with the old lock words held, runs of 100 steps went through.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


def workspaces(modules: Iterable[nn.Module]) -> list[Tensor]:
    """The workspaces that the modules' kernels have now. Who holds them keeps their memory from being used again.

    A Marlin kernel object has counters with which its blocks wait for each other, all 0 between launches. They hang on
    the layer itself (FP8), or on the kernel of its scheme or quantization method (packed int4).
    """
    found: list[Tensor] = []
    for module in modules:
        methods = [module, *(getattr(module, name, None) for name in ("scheme", "quant_method"))]
        for holder in (*methods, *(getattr(method, "kernel", None) for method in methods)):
            workspace = getattr(holder, "workspace", None)
            if isinstance(workspace, Tensor) and not any(workspace is other for other in found):
                found.append(workspace)
    return found


class Attributes:
    """The tensors that modules have as plain attributes now: held, and kept up with those that replace them."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._first = [
            (module, name, value) for module in modules for name, value in vars(module).items() if type(value) is Tensor
        ]

    def follow(self) -> None:
        """Put into the first ones what the modules have in their place now, where it is of the same kind."""
        for module, name, first in self._first:
            now = vars(module).get(name)
            if type(now) is Tensor and now is not first and (now.shape, now.dtype) == (first.shape, first.dtype):
                first.copy_(now)


Orders = tuple[Tensor, ...]


def scale_orders(device: torch.device) -> Orders:
    """The orders in which Marlin's repacking takes its scales, on a device; none of a vLLM that has no such lists.

    To be made before a CUDA graph is recorded: it copies them from the host.
    """
    from vllm.model_executor.layers.quantization.utils import marlin_utils

    lists = getattr(marlin_utils, "get_scale_perms", tuple)()
    return tuple(torch.tensor(order, device=device) for order in lists)


@contextmanager
def in_place_of_lists(orders: Orders) -> Iterator[None]:
    """Inside, Marlin's repacking has these `scale_orders`. vLLM's are lists, which each use copies to the device:
    hundreds of waits in a mixture of experts, and nothing that a CUDA graph can hold."""
    if not orders:
        yield
        return
    from vllm.model_executor.layers.quantization.utils import marlin_utils

    lists: Any = marlin_utils.get_scale_perms
    marlin_utils.get_scale_perms = lambda: orders
    try:
        yield
    finally:
        marlin_utils.get_scale_perms = lists
