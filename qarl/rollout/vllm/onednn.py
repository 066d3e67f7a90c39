"""vLLM's INT8 product on the CPU reads its scales by address, which a reload of weights leaves dangling.

vLLM makes a handle for oneDNN that holds the address of the weight scales. A reload makes a new handle from new
tensors, copies their values into the old ones and frees the new: the handle then reads freed memory, and the sampler
falls silent (seen with 0.32; the publish canary catches it).
"""

from __future__ import annotations

from functools import wraps

import vllm._custom_ops as ops


def keep_scales() -> None:
    """Let each handle keep the scales that it reads. Does nothing the second time, or where vLLM has no such handle."""
    make = getattr(ops, "create_onednn_scaled_mm", None)
    if make is None or hasattr(make, "__wrapped__"):
        return

    @wraps(make)
    def keeping(weight, weight_scales, *rest):
        handle = make(weight, weight_scales, *rest)
        handle.weight_scales = weight_scales
        return handle

    ops.create_onednn_scaled_mm = keeping
