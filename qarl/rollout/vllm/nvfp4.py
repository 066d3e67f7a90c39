"""qarl's product of NVFP4 weights in vLLM: the scheme of compressed-tensors' nvfp4-pack-quantized, 16-bit activations.

vLLM's own scheme keeps 1 / global scale and forgets the divisors of a fused layer's parts; here they stay as they were
loaded, so that a publish can be read back, and a layer whose parts have different ones is refused.
"""

from __future__ import annotations

from typing import Any

import torch
from qarl_formats.bits import Proof
from qarl_formats.registry import make_scheme
from torch import Tensor, nn
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import CompressedTensorsScheme
from vllm.model_executor.parameter import GroupQuantScaleParameter, ModelWeightParameter, PerTensorScaleParameter

from qarl.rollout.vllm.linear_kernels import HoldsPublished, loaded

GROUP = 16


class NVFP4A16Kernel(HoldsPublished):
    """The CPU holds the packed codes and, in float32, what its product reads; a GPU the tiled weight alone."""

    def process_weights_after_loading(self, layer: nn.Module, kernels: bool | None = None) -> None:
        tensors = loaded(layer)
        divisors, (n, half) = tensors["weight_global_scale"], tensors["weight_packed"].shape
        if not bool((divisors == divisors[0]).all()):
            raise ValueError(
                f"a layer that vLLM fuses has parts with global scales {divisors.tolist()}; qarl multiplies it with "
                "one, as its exports have it: export the checkpoint again"
            )
        tensors["weight_global_scale"] = divisors[:1].clone()
        # the dtype of the activations is no matter to the operands
        self.prepare(layer, make_scheme("nvfp4a16"), tensors, (n, 2 * half), torch.bfloat16, kernels)

    def apply_weights(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.multiply(layer, x, bias)

    def published(self, layer: nn.Module, proof: Proof | None = None) -> dict[str, Tensor]:
        found = super().published(layer, proof)
        return found | {"weight_global_scale": found["weight_global_scale"].repeat(len(layer.output_partition_sizes))}


class NVFP4A16Scheme(CompressedTensorsScheme):
    """Makes the parameters that vLLM loads into, and leaves the rest to the kernel."""

    def __init__(self) -> None:
        self.kernel = NVFP4A16Kernel()

    @classmethod
    def get_min_capability(cls) -> int:
        return 80

    def create_weights(
        self,
        layer: nn.Module,
        output_partition_sizes: list[int],
        input_size_per_partition: int,
        weight_loader: Any,
        **arguments: Any,
    ) -> None:
        n, k = sum(output_partition_sizes), input_size_per_partition
        if k != arguments.get("input_size", k):
            raise ValueError("qarl does not split sums over input features between GPUs; use tensor_parallel_size 1")
        layer.output_partition_sizes = output_partition_sizes
        by_row = {"input_dim": 1, "output_dim": 0, "weight_loader": weight_loader}
        packed, scale = torch.empty(n, k // 2, dtype=torch.uint8), torch.empty(n, k // GROUP, dtype=torch.float8_e4m3fn)
        divisors = torch.empty(len(output_partition_sizes), dtype=torch.float32)
        layer.register_parameter("weight_packed", ModelWeightParameter(data=packed, **by_row))
        layer.register_parameter("weight_scale", GroupQuantScaleParameter(data=scale, **by_row))
        layer.register_parameter(
            "weight_global_scale", PerTensorScaleParameter(data=divisors, weight_loader=weight_loader)
        )

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        self.kernel.process_weights_after_loading(layer)

    def apply_weights(self, layer: nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
        return self.kernel.apply_weights(layer, x, bias)
