"""Layers that vLLM gives no kernel to choose for: unquantized ones, packed int4 weights with int8 activations, experts.

`DenseConfig` is the quantization config `qarl-dense` of a model without quantized layers
(`hf_overrides={"quantization_config": {"quant_method": "qarl-dense"}}`). `MixedConfig` takes the place of vLLM's
`compressed-tensors`, of which it changes only what it says.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch
from qarl_formats.bits import Proof
from qarl_formats.compressed import parse_quantization_config
from qarl_formats.registry import make_scheme
from qarl_formats.weight import UNQUANTIZED
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
    CompressedTensorsScheme,
    CompressedTensorsWNA16,
)
from vllm.model_executor.parameter import GroupQuantScaleParameter, ModelWeightParameter, PerTensorScaleParameter

from qarl.experts import is_router
from qarl.rollout.vllm.own_kernels.expert_kernels import ExpertsMethod, method_for
from qarl.rollout.vllm.own_kernels.linear_kernels import HoldsPublished, W4A8Kernel, loaded

NVFP4_GROUP = 16


class DenseMethod(UnquantizedLinearMethod, HoldsPublished):
    """Weights of the compute dtype. The CPU holds them in float32, which its product reads."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        weight = layer.weight.data
        self.prepare(layer, UNQUANTIZED, {"weight": weight}, tuple(weight.shape), layer.params_dtype)

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.multiply(layer, x, bias)


class DenseConfig(QuantizationConfig):
    """Every linear layer with `DenseMethod`; embedding and output layer as vLLM has them."""

    def get_name(self) -> str:
        return "qarl-dense"

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> DenseConfig:
        return cls()

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        if isinstance(layer, RoutedExperts):
            return ExpertsMethod(layer.moe_config, UNQUANTIZED)
        return DenseMethod() if isinstance(layer, LinearBase) else None


def keep_routers() -> None:
    """Let routers, which vLLM makes without asking a quantization config, have `DenseMethod`: on the CPU vLLM's own
    takes their weights away. Does nothing the second time."""
    make = LinearBase.__init__
    if hasattr(make, "__wrapped__"):
        return

    @wraps(make)
    def making(self: LinearBase, *arguments: Any, **options: Any) -> None:
        make(self, *arguments, **options)
        if type(self.quant_method) is UnquantizedLinearMethod and is_router(f"{options.get('prefix', '')}.weight"):
            self.quant_method = DenseMethod()

    LinearBase.__init__ = making


class W4A8Scheme(CompressedTensorsWNA16):
    """vLLM's packed int4 parameters, multiplied with int8 activations.

    vLLM 0.24 has no scheme for them, and the one of 0.32 does not tell its kernel about the activations.
    """

    def create_weights(self, layer: nn.Module, **arguments: Any) -> None:
        super().create_weights(layer, **arguments)
        self.kernel = W4A8Kernel(self.kernel.config, "weight_packed", "weight_scale")


class NVFP4A16Kernel(HoldsPublished):
    """The CPU holds the packed codes and their values in float32; a GPU holds the tiled weight only.

    vLLM's own scheme keeps 1 / global scale and forgets the divisors of a fused layer's parts. Here they stay as
    loaded, so that a publish can be read back, and a layer whose parts have different divisors is refused.
    """

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
        packed, scale = (
            torch.empty(n, k // 2, dtype=torch.uint8),
            torch.empty(n, k // NVFP4_GROUP, dtype=torch.float8_e4m3fn),
        )
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


class MixedConfig(CompressedTensorsConfig):
    """compressed-tensors, with qarl's product for layers left unquantized, for W4A8 and for NVFP4A16."""

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        if isinstance(layer, RoutedExperts):
            return method_for(layer, prefix, *parse_quantization_config(self.config))
        if is_router(f"{prefix}.weight"):
            return DenseMethod()
        method = super().get_quant_method(layer, prefix)
        if isinstance(layer, LinearBase) and type(method) is UnquantizedLinearMethod:
            return DenseMethod()
        return method

    def _get_scheme_from_parts(self, weight_quant, input_quant, output_quant=None, format=None, layer_name=None):
        stored = self.quant_format if format is None else format
        if stored == "nvfp4-pack-quantized" and input_quant is None and output_quant is None:
            return NVFP4A16Scheme()
        packed = stored == "pack-quantized"
        int8 = input_quant is not None and (input_quant.num_bits, input_quant.type) == (8, "int")
        if packed and int8 and output_quant is None and self._is_dynamic_token_w4a8_int(weight_quant, input_quant):
            return W4A8Scheme(
                strategy=weight_quant.strategy, num_bits=4, group_size=weight_quant.group_size, layer_name=layer_name
            )
        return super()._get_scheme_from_parts(weight_quant, input_quant, output_quant, format, layer_name)
