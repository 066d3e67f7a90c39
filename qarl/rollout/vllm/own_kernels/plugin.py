"""Registers qarl's linear kernels with vLLM, ahead of vLLM's own."""

from __future__ import annotations

from vllm import envs
from vllm.model_executor.kernels import linear
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.platforms import PlatformEnum

from qarl import __version__
from qarl.rollout.vllm.own_kernels import linear_kernels, linear_methods
from qarl.rollout.vllm.plugin import SWITCH


def register() -> None:
    """Make qarl's kernels vLLM's first choice. To be called before a model is made, any number of times."""
    # vLLM caches compiled code by its own settings and the model's path. Without this variable among them it would
    # take back the code of a start with other kernels.
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
            # vLLM takes the first kernel of the list that supports a layer, and registration appends. The public
            # choice, linear_backend, knows vLLM's own names only.
            table[platform].insert(0, table[platform].pop())
    for kernels in linear._POSSIBLE_FP8_BLOCK_KERNELS.values():  # for which vLLM has no registration
        if linear_kernels.FP8BlockKernel not in kernels:
            kernels.insert(0, linear_kernels.FP8BlockKernel)
    linear_methods.keep_routers()
    register_quantization_config("qarl-dense")(linear_methods.DenseConfig)
    register_quantization_config("compressed-tensors")(linear_methods.MixedConfig)
