"""qarl's product of NVFP4 weights in vLLM: the scheme of compressed-tensors' nvfp4-pack-quantized, 16-bit activations.

vLLM's own scheme keeps 1 / global scale and forgets the divisors of a fused layer's parts; here they stay as they were
loaded, so that a publish can be read back.
"""

from __future__ import annotations

from typing import Any

import torch
from qarl_formats.scheme import make_scheme
from qarl_formats.schemes.nvfp4a16 import GROUP, STORED
from torch import Tensor, nn
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import CompressedTensorsScheme
from vllm.model_executor.parameter import GroupQuantScaleParameter, ModelWeightParameter, PerTensorScaleParameter

from qarl.rollout.vllm.linear_kernels import HoldsPublished


class NVFP4A16Kernel(HoldsPublished):
    """NVFP4 weights and activations as they are. dtype: of the activations."""

    name = "nvfp4a16"

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def process_weights_after_loading(self, layer: nn.Module, kernels: bool | None = None) -> None:
        """Raises ValueError where parts of a fused layer have different global scales, of which a product reads one."""
        tensors = {name: getattr(layer, name).data for name in STORED}
        divisors = tensors["weight_global_scale"]
        if not bool((divisors == divisors[0]).all()):
            raise ValueError(
                f"a layer that vLLM fuses has parts with global scales {divisors.tolist()}; qarl multiplies it with "
                "one, as its exports have it: export the checkpoint again"
            )
        n, groups = tensors["weight_scale"].shape
        self.prepare(layer, make_scheme(self.name), tensors, (n, groups * GROUP), self.dtype, kernels)

    def apply_weights(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.multiply(layer, x, bias)


class NVFP4A16Scheme(CompressedTensorsScheme):
    """Makes the parameters that vLLM loads into, and leaves the rest to the kernel."""

    kernel: NVFP4A16Kernel

    @classmethod
    def get_min_capability(cls) -> int:
        return 80

    def create_weights(
        self,
        layer: nn.Module,
        output_partition_sizes: list[int],
        input_size_per_partition: int,
        params_dtype: torch.dtype,
        weight_loader: Any,
        **arguments: Any,
    ) -> None:
        n, k = sum(output_partition_sizes), input_size_per_partition
        if k != arguments.get("input_size", k):
            raise ValueError("qarl does not split sums over input features between GPUs; use tensor_parallel_size 1")
        self.kernel = NVFP4A16Kernel(params_dtype)
        layer.output_partition_sizes = output_partition_sizes
        packed, scale = torch.empty(n, k // 2, dtype=torch.uint8), torch.empty(n, k // GROUP, dtype=torch.float8_e4m3fn)
        divisors = torch.empty(len(output_partition_sizes), dtype=torch.float32)
        by_row = {"input_dim": 1, "output_dim": 0, "weight_loader": weight_loader}
        layer.register_parameter("weight_packed", ModelWeightParameter(data=packed, **by_row))
        layer.register_parameter("weight_scale", GroupQuantScaleParameter(data=scale, **by_row))
        layer.register_parameter(
            "weight_global_scale", PerTensorScaleParameter(data=divisors, weight_loader=weight_loader)
        )

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        self.kernel.process_weights_after_loading(layer)

    def apply_weights(self, layer: nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
        return self.kernel.apply_weights(layer, x, bias)
