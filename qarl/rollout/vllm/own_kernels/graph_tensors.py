"""Keeps tensors alive that vLLM's CUDA graphs read and that are neither parameters nor buffers.

A reload of weights copies into the existing parameters and buffers, but it allocates all other tensors of a layer's
kernel anew (`process_weights_after_loading` in vLLM 0.24): the lock words of Marlin, the global scales of NVFP4
experts. A CUDA graph that was captured before still reads the old addresses, which other tensors may use by then.
Observed on an H200 with `cudagraph_mode: FULL_DECODE_ONLY` and without sleep: Marlin's thread blocks deadlocked in the
first rollout after the first publish. With the old lock words kept alive, runs of 100 steps finished.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

SMALL = 1 << 20  # bytes; a kernel's tensors other than weights are smaller


class KernelTensors:
    """The tensors of vLLM's kernels that are neither parameters nor buffers of modules.

    Examples are the lock words of Marlin, all 0 between launches, and the strides of CUTLASS's experts. They are
    attributes of the layer, or of vLLM's objects that it refers to (method, scheme, kernel, its experts). Tensors of at
    most `SMALL` bytes are kept alive, so that their memory is not reused. They can be saved for a sleep of level 2,
    which frees all memory allocated during the load and restores only buffers.

    Args:
        modules: Layers that were just loaded.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        modules = list(modules)
        known = {
            _bytes(tensor).data_ptr() for module in modules for tensor in (*module.parameters(), *module.buffers())
        }
        own = (_bytes(tensor) for module in modules for tensor in _reachable_tensors(module) if not tensor.is_meta)
        found = {t.data_ptr(): t for t in own if 0 < t.nbytes <= SMALL and t.data_ptr() not in known}
        self._held = list(found.values())
        self._saved: list[Tensor] = []
        self._attributes = [
            (module, name, value) for module in modules for name, value in vars(module).items() if type(value) is Tensor
        ]

    def copy_replaced(self) -> None:
        """Copy tensors that a reload replaced into the original ones, if shape and dtype are the same.

        Only for attributes of the layers themselves.
        """
        for module, name, first in self._attributes:
            now = vars(module).get(name)
            if type(now) is Tensor and now is not first and (now.shape, now.dtype) == (first.shape, first.dtype):
                first.copy_(now)

    def save(self) -> None:
        """Copy the tensors that are kept alive."""
        self._saved = [tensor.clone() for tensor in self._held]

    def restore(self) -> None:
        """Restore the saved values, if there are any, and forget them."""
        if self._saved:
            torch._foreach_copy_(self._held, self._saved)
        self._saved = []


def _bytes(tensor: Tensor) -> Tensor:
    """Return the storage of a tensor as bytes."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _reachable_tensors(module: nn.Module) -> Iterator[Tensor]:
    """Yield tensors that are attributes of a module, or of objects of vLLM's classes reachable from it."""
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


def scale_permutations(device: torch.device) -> tuple[Tensor, ...]:
    """Return the permutations of scales in Marlin's repacking, on a device; empty if this vLLM has none.

    Must be called outside of the capture of a CUDA graph, because it copies from the host.
    """
    from vllm.model_executor.layers.quantization.utils import marlin_utils

    lists: Sequence[list[int]] = getattr(marlin_utils, "get_scale_perms", tuple)()
    return tuple(torch.tensor(order, device=device) for order in lists)


@contextmanager
def use_scale_permutations(permutations: tuple[Tensor, ...]) -> Iterator[None]:
    """Context manager: Marlin's repacking uses these `scale_permutations` instead of vLLM's lists.

    vLLM copies a list to the device at each use. For a mixture of experts that means hundreds of synchronizations, and
    it is not possible in a CUDA graph.
    """
    if not permutations:
        yield
        return
    from vllm.model_executor.layers.quantization.utils import marlin_utils

    with patch.object(marlin_utils, "get_scale_perms", lambda: permutations):
        yield
