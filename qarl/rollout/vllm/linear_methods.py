"""Layers that vLLM gives no kernel to choose for: unquantized ones, packed int4 weights with int8 activations, experts.

`DenseConfig` is the quantization config `qarl-dense` of a model without quantized layers
(`hf_overrides={"quantization_config": {"quant_method": "qarl-dense"}}`). `MixedConfig` takes the place of vLLM's
`compressed-tensors`, of which it changes only what it says.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch
from qarl_formats.compressed import parse_quantization_config
from qarl_formats.weight import UNQUANTIZED
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import CompressedTensorsWNA16

from qarl.experts import is_router
from qarl.rollout.vllm.expert_kernels import ExpertsMethod, method_for
from qarl.rollout.vllm.linear_kernels import HoldsPublished, W4A8Kernel
from qarl.rollout.vllm.nvfp4 import NVFP4A16Scheme


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
