"""vLLM's entry point `vllm.general_plugins`: qarl's products in place of vLLM's, where QARL_VLLM_KERNELS=qarl asks."""

from __future__ import annotations

import os

from qarl import __version__

SWITCH = "QARL_VLLM_KERNELS"


def register() -> None:
    """Make qarl's kernels vLLM's first choice in this process; nothing without QARL_VLLM_KERNELS=qarl.

    To be called before a model is made, any number of times.
    """
    if os.environ.get(SWITCH) != "qarl":
        return
    from vllm import envs
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.layers.quantization import register_quantization_config
    from vllm.platforms import PlatformEnum

    from qarl.rollout.vllm import linear_kernels, linear_methods

    # vLLM keeps what it compiled by its own settings and the model's path, and takes it back without a look at the
    # layers: with kernels that it does not know of, it would run those of an earlier start.
    envs.environment_variables[SWITCH] = lambda: f"qarl {__version__}"
    tables = {
        "mp": (linear._POSSIBLE_KERNELS, linear_kernels.W4A16Kernel),
        "int8": (linear._POSSIBLE_INT8_KERNELS, linear_kernels.W8A8Kernel),
        "fp8": (linear._POSSIBLE_FP8_KERNELS, linear_kernels.FP8Kernel),
    }
    for kind, (table, kernel) in tables.items():
        for platform in (PlatformEnum.CUDA, PlatformEnum.CPU):
            if kernel in table[platform]:
                continue
            linear.register_linear_kernel(kernel, platform, kind)
            # vLLM takes the first kernel of its list that can do a layer and appends what is registered, so a kernel
            # of its own would always come first. The public choice, linear_backend, knows its own names only.
            table[platform].insert(0, table[platform].pop())
    for kernels in linear._POSSIBLE_FP8_BLOCK_KERNELS.values():  # for which vLLM has no registration
        if linear_kernels.FP8BlockKernel not in kernels:
            kernels.insert(0, linear_kernels.FP8BlockKernel)
    linear_methods.keep_routers()
    register_quantization_config("qarl-dense")(linear_methods.DenseConfig)
    register_quantization_config("compressed-tensors")(linear_methods.MixedConfig)
