"""vLLM's entry point `vllm.general_plugins`: qarl's linear kernels in vLLM's own model, if QARL_VLLM_KERNELS=qarl."""

from __future__ import annotations

import os

SWITCH = "QARL_VLLM_KERNELS"


def register() -> None:
    """Make qarl's kernels vLLM's first choice in this process; does nothing without QARL_VLLM_KERNELS=qarl."""
    if os.environ.get(SWITCH) == "qarl":
        from qarl.rollout.vllm.own_kernels.plugin import register

        register()
