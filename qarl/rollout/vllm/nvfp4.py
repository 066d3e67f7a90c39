"""qarl's product of NVFP4 weights in vLLM: the scheme of compressed-tensors' nvfp4-pack-quantized, 16-bit activations.

vLLM's own scheme keeps 1 / global scale and forgets the divisors of a fused layer's parts; here they stay as they were
loaded, so that a publish can be read back, and a layer whose parts have different ones is refused.
"""

from __future__ import annotations

from typing import Any

import torch
from qarl_kernels import nvfp4
from torch import Tensor, nn
from torch.library import custom_op
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import CompressedTensorsScheme
from vllm.model_executor.parameter import GroupQuantScaleParameter, ModelWeightParameter, PerTensorScaleParameter

from qarl.rollout.vllm.linear_kernels import OPS, HoldsPublished, by_parts, hold

GROUP = 16


@custom_op("qarl::nvfp4a16_tiled", mutates_args=())
def nvfp4a16_tiled(
    x: Tensor, tiled: Tensor, columns: Tensor, scale: Tensor, divisor: Tensor, bias: Tensor | None
) -> Tensor:
    """The GPU's product. x: (M, K) bf16 or fp16; tiled, columns: of `tile_nvfp4`; scale: (N, K / 16) e4m3; divisor:
    (1,) float32; bias: (N,). Returns (M, N) of x's dtype."""
    from qarl_kernels import nvfp4a16  # imports Triton, which the CPU does not need

    return nvfp4a16.nvfp4a16(x.contiguous(), None, scale, divisor, tiled, columns, bias)


@custom_op("qarl::nvfp4a16_values", mutates_args=())
def nvfp4a16_values(x: Tensor, values: Tensor, divisor: Tensor, bias: Tensor | None) -> Tensor:
    """`qarl_kernels.nvfp4.nvfp4a16`, the CPU's. values: (N, K) float32, codes times scales."""
    return nvfp4.nvfp4a16(x, values, divisor, bias)


@nvfp4a16_tiled.register_fake
def _(x, tiled, columns, scale, divisor, bias):
    return x.new_empty(x.shape[0], scale.shape[0])


@nvfp4a16_values.register_fake
def _(x, values, divisor, bias):
    return x.new_empty(x.shape[0], values.shape[0])


class NVFP4A16Kernel(HoldsPublished):
    """The CPU holds the packed codes and, in float32, what its product reads; a GPU the tiled weight alone."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        packed, scale, divisors = (
            getattr(layer, f"weight_{name}").data for name in ("packed", "scale", "global_scale")
        )
        if not bool((divisors == divisors[0]).all()):
            raise ValueError(
                f"a layer that vLLM fuses has parts with global scales {divisors.tolist()}; qarl multiplies it with "
                "one, as its exports have it: export the checkpoint again"
            )
        for name, tensor in (("weight_scale", scale), ("weight_global_scale", divisors)):
            hold(layer, name, tensor)  # as parameters of torch's own class, which torch.compile knows
        if packed.device.type == "cpu":
            hold(layer, "weight_packed", packed)
            hold(layer, "weight_values", nvfp4.scaled_codes(packed, scale))
        else:
            from qarl_kernels.nvfp4a16 import tile_nvfp4

            tiled, columns = tile_nvfp4(packed, scale)
            hold(layer, "weight_tiled", tiled)
            hold(layer, "weight_columns", columns)
            del layer.weight_packed

    def apply_weights(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        rows, divisor = x.reshape(-1, x.shape[-1]), layer.weight_global_scale[:1]
        if x.device.type == "cpu":
            weights = (layer.weight_values,)
            y = by_parts(lambda values, bias: OPS.nvfp4a16_values(rows, values, divisor, bias), layer, weights, bias)
        else:
            y = OPS.nvfp4a16_tiled(rows, layer.weight_tiled, layer.weight_columns, layer.weight_scale, divisor, bias)
        return y.view(*x.shape[:-1], y.shape[-1])

    def published(self, layer: nn.Module) -> dict[str, Tensor]:
        scale = layer.weight_scale.data
        if hasattr(layer, "weight_packed"):
            packed = layer.weight_packed.data
        else:
            from qarl_kernels.nvfp4a16 import untile_nvfp4

            packed = untile_nvfp4(layer.weight_tiled.data, len(scale), scale.shape[1] * GROUP)
        return {"weight_packed": packed, "weight_scale": scale, "weight_global_scale": layer.weight_global_scale.data}


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
