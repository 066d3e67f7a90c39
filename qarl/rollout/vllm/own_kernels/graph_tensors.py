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

SMALL = 1 << 20  # bytes of what a kernel has beside weights


class KernelTensors:
    """The small tensors that vLLM's kernels have beside the parameters and buffers of modules.

    modules: layers that were just loaded. Such are the lock words of Marlin, all 0 between launches, and the strides of
    CUTLASS's experts. They hang on the layer, or on objects of vLLM's below it (method, scheme, kernel, its experts).
    They are held, so that their memory is not used again; and saved for a sleep of level 2, which gives back the memory
    of all that was made while the model was loaded, and of that restores the buffers alone.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        modules = list(modules)
        known = {
            _bytes(tensor).data_ptr() for module in modules for tensor in (*module.parameters(), *module.buffers())
        }
        own = (_bytes(tensor) for module in modules for tensor in _hanging(module) if not tensor.is_meta)
        found = {t.data_ptr(): t for t in own if 0 < t.nbytes <= SMALL and t.data_ptr() not in known}
        self._held = list(found.values())
        self._saved: list[Tensor] = []

    def save(self) -> None:
        self._saved = [tensor.clone() for tensor in self._held]

    def restore(self) -> None:
        """Put back what was saved, once."""
        if self._saved:
            torch._foreach_copy_(self._held, self._saved)
        self._saved = []


def _bytes(tensor: Tensor) -> Tensor:
    """The memory that a tensor is a view of."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _hanging(module: nn.Module) -> Iterator[Tensor]:
    """Tensors that are attributes of a module, or of objects of vLLM's classes that it has and that those have."""
    seen: set[int] = set()
    holders: list[Any] = [module]
    while holders:
        for value in getattr(holders.pop(), "__dict__", {}).values():
            if isinstance(value, Tensor):
                yield value
            elif id(value) not in seen and _of_vllm(value):
                seen.add(id(value))
                holders.append(value)


def _of_vllm(value: object) -> bool:
    return type(value).__module__.startswith("vllm.") and not isinstance(value, nn.Module)


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
