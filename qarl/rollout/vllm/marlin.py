"""Marlin's lock words, which the CUDA graphs of a started vLLM know by address.

A Marlin kernel object has a workspace: counters with which its blocks wait for each other, all 0 between launches.
Every reload of weights gives the object a new one (`process_weights_after_loading`, read in vLLM 0.24), and the old
one's memory goes to other tensors. A CUDA graph that was captured before goes on with the old address, where its blocks
may wait for ever. Seen on an H200 with `cudagraph_mode: FULL_DECODE_ONLY` and no sleep: the first rollout after the
first publish did not end; with the old ones held, runs of 100 steps went through.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn


def workspaces(modules: Iterable[nn.Module]) -> list[Tensor]:
    """The workspaces that the modules' kernels have now. Who holds them keeps their memory from being used again.

    They hang on the layer itself (FP8), or on the kernel of its scheme or quantization method (packed int4).
    """
    found: list[Tensor] = []
    for module in modules:
        methods = [module, *(getattr(module, name, None) for name in ("scheme", "quant_method"))]
        for holder in (*methods, *(getattr(method, "kernel", None) for method in methods)):
            workspace = getattr(holder, "workspace", None)
            if isinstance(workspace, Tensor) and not any(workspace is other for other in found):
                found.append(workspace)
    return found
