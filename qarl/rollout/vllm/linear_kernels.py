"""qarl's products as linear kernels of vLLM: what the learner multiplies with, so that both compute the same bits.

vLLM fuses q, k and v, and gate and up, into one weight. On a GPU the fused weight is multiplied at once: K is never
split, and an output's bits depend on its own row of x and of the weight alone. On the CPU, where a BLAS may sum
otherwise for another N, the parts are multiplied one by one in the learner's shapes.

A kernel's state are the layer's parameters, all made in `process_weights_after_loading` with the same names, shapes and
dtypes in every call: vLLM reloads weights by making them anew and copying them into the first ones, whose addresses
CUDA graphs know. Only one form of a weight is held, from which `published` gives back what was loaded. The exception
is W4A16 on the CPU: packed codes, and the values in float32 that the product reads, as in the learner.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import qarl_kernels.ops  # noqa: F401 (registers torch.ops.qarl)
import torch
from qarl_formats.packing import pack_int4
from qarl_kernels import unpack
from torch import Tensor, nn
from vllm.model_executor.kernels.linear import (
    FP8ScaledMMLinearLayerConfig,
    Int8ScaledMMLinearLayerConfig,
    MPLinearKernel,
    MPLinearLayerConfig,
    ScaledMMLinearKernel,
)
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8DynamicTokenSym, kFp8StaticChannelSym
from vllm.platforms import current_platform
from vllm.scalar_type import scalar_types

from qarl.rollout.vllm import int4_ops  # noqa: F401 (registers torch.ops.qarl)

OPS = torch.ops.qarl
INT4_GROUPS = (-1, 32, 64, 128)  # -1: a row is one group


class HoldsPublished(ABC):
    """A kernel or linear method that multiplies with qarl's products."""

    @abstractmethod
    def published(self, layer: nn.Module) -> dict[str, Tensor]:
        """The loaded tensors by compressed-tensors suffix, fused parts under one another.

        Scales are in the dtype that vLLM holds them in: float32 for int8 and FP8 weights. May be the held tensors
        themselves: do not write into them.
        """


def kernel_of(layer: nn.Module) -> HoldsPublished | None:
    """What multiplies the layer's weight if it is qarl's, else None."""
    method, scheme = getattr(layer, "quant_method", None), getattr(layer, "scheme", None)
    for candidate in (method, getattr(scheme, "kernel", None), getattr(scheme, "fp8_linear", None)):
        if isinstance(candidate, HoldsPublished):
            return candidate
    return None


def unserved(model: nn.Module) -> list[str]:
    """Names of the model's linear layers that vLLM multiplies with kernels of its own."""
    return [
        name for name, module in model.named_modules() if isinstance(module, LinearBase) and kernel_of(module) is None
    ]


def hold(layer: nn.Module, name: str, value: Tensor) -> None:
    """Make `value` the layer's parameter `name`, instead of any that has the name."""
    layer.register_parameter(name, nn.Parameter(value, requires_grad=False))


def plain(layer: nn.Module) -> None:
    """Make vLLM's parameters, whose classes know how to load, ones that torch.compile knows. The memory stays.

    `weight_shape` stays as it is: in a reload vLLM gives it to a fused layer once more after this.
    """
    for name in ("weight", "weight_packed", "weight_scale", "weight_zero_point"):
        if name in layer._parameters:
            hold(layer, name, getattr(layer, name).data)


def by_parts(product, layer: nn.Module, weights: tuple[Tensor, ...], bias: Tensor | None) -> Tensor:
    """The products of a fused layer's parts next to one another.

    product: called with the rows of each of `weights` (and of the bias or None) that belong to one part.
    """
    widths = layer.output_partition_sizes
    biases = [None] * len(widths) if bias is None else bias.split(widths)
    parts = [product(*part) for part in zip(*(w.split(widths) for w in weights), biases, strict=True)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


class _Int4Kernel(MPLinearKernel, HoldsPublished):
    """Common to the kernels of packed int4 weights."""

    @classmethod
    def get_min_capability(cls) -> int:
        return 80

    @classmethod
    def can_implement(cls, c: MPLinearLayerConfig) -> tuple[bool, str | None]:
        if c.weight_type not in (scalar_types.uint4b8, scalar_types.uint4):
            return False, f"qarl multiplies packed int4 weights, not {c.weight_type}"
        if c.group_size not in INT4_GROUPS:
            return False, f"qarl multiplies groups of 32, 64, 128 or whole rows, not of {c.group_size}"
        if getattr(c, "has_g_idx", False):  # before 0.25
            return False, "qarl does not reorder activations"
        in_features = c.partition_weight_shape[0]
        if in_features != c.full_weight_shape[0]:
            return False, "qarl does not split the sums over input features between GPUs; use tensor_parallel_size 1"
        if in_features % 8:
            return False, f"qarl multiplies packed rows of whole words, not of {in_features} input features"
        dtypes = [torch.bfloat16, torch.float16] + [torch.float32] * current_platform.is_cpu()
        if c.act_type not in dtypes:
            return False, f"qarl multiplies 16-bit activations, not {c.act_type}"
        return True, None

    def apply_weights(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        y = (self.multiply if x.device.type == "cpu" else self.multiply_tiled)(layer, rows, bias)
        return y.view(*x.shape[:-1], y.shape[-1])

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        plain(layer)
        (self.unpack if layer.weight_packed.device.type == "cpu" else self.tile)(layer)

    @abstractmethod
    def unpack(self, layer: nn.Module) -> None:
        """Make the CPU's form of the loaded weight."""

    @abstractmethod
    def tile(self, layer: nn.Module) -> None:
        """Make the GPU's form of the loaded weight."""

    @abstractmethod
    def multiply(self, layer: nn.Module, rows: Tensor, bias: Tensor | None) -> Tensor:
        """The CPU's product. rows: (M, K). Returns (M, N)."""

    @abstractmethod
    def multiply_tiled(self, layer: nn.Module, rows: Tensor, bias: Tensor | None) -> Tensor:
        """The GPU's product. rows: (M, K). Returns (M, N)."""

    @property
    def in_features(self) -> int:
        return self.config.partition_weight_shape[0]

    @property
    def group(self) -> int | None:
        return None if self.config.group_size == -1 else self.config.group_size

    def _untiled(self, layer: nn.Module) -> Tensor:
        from qarl_kernels import tile

        return tile.untile_int4(layer.weight_tiled, len(layer.weight_scale), self.in_features)


class W4A16Kernel(_Int4Kernel):
    """Packed int4 weights, symmetric or with zero points, and activations as they are."""

    def unpack(self, layer: nn.Module) -> None:
        packed, scale, zero_point = self._get_weight_params(layer)[:3]
        values = unpack.dequantized_int4(packed, scale, zero_point, self.in_features, self.config.act_type)
        hold(layer, "weight_values", values.float())

    def tile(self, layer: nn.Module) -> None:
        from qarl_kernels import tile  # imports Triton, which the CPU does not need

        packed, scale, zero_point = self._get_weight_params(layer)[:3]
        n, k, dtype = len(scale), self.in_features, self.config.act_type
        hold(layer, "weight_tiled", tile.tile_int4(packed, k))
        hold(layer, "weight_meta", tile.meta_w4a16(scale, zero_point, n, k, self.group, dtype))
        del layer.weight_packed

    def multiply(self, layer: nn.Module, rows: Tensor, bias: Tensor | None) -> Tensor:
        return by_parts(lambda weight, bias: OPS.dense(rows, weight, bias), layer, (layer.weight_values,), bias)

    def multiply_tiled(self, layer: nn.Module, rows: Tensor, bias: Tensor | None) -> Tensor:
        zero_point = getattr(layer, "weight_zero_point", None)
        return OPS.w4a16_tiled(rows, layer.weight_tiled, layer.weight_meta, layer.weight_scale, zero_point, bias)

    def published(self, layer: nn.Module) -> dict[str, Tensor]:
        packed = layer.weight_packed.data if hasattr(layer, "weight_packed") else self._untiled(layer)
        found = {"weight_packed": packed, "weight_scale": layer.weight_scale.data}
        if self.config.zero_points:
            found["weight_zero_point"] = layer.weight_zero_point.data
        return found


class W4A8Kernel(_Int4Kernel):
    """Packed int4 weights, activations quantized to int8 per token. `linear_methods.W4A8Scheme` makes it."""

    @classmethod
    def can_implement(cls, c: MPLinearLayerConfig) -> tuple[bool, str | None]:
        if c.zero_points:
            return False, "qarl multiplies int8 activations with symmetric weights"
        return super().can_implement(c)

    def unpack(self, layer: nn.Module) -> None:
        hold(layer, "weight_codes", unpack.int4_codes(layer.weight_packed, self.in_features).float())
        del layer.weight_packed

    def tile(self, layer: nn.Module) -> None:
        from qarl_kernels import tile

        scale, k = layer.weight_scale, self.in_features
        hold(layer, "weight_tiled", tile.tile_int4(layer.weight_packed, k))
        hold(layer, "weight_meta", tile.meta_w4a8(scale, len(scale), k, self.group))
        del layer.weight_packed

    def multiply(self, layer: nn.Module, rows: Tensor, bias: Tensor | None) -> Tensor:
        weights = layer.weight_codes, layer.weight_scale
        return by_parts(lambda codes, scale, bias: OPS.w4a8_codes(rows, codes, scale, bias), layer, weights, bias)

    def multiply_tiled(self, layer: nn.Module, rows: Tensor, bias: Tensor | None) -> Tensor:
        return OPS.w4a8_tiled(rows, layer.weight_tiled, layer.weight_meta, layer.weight_scale, bias)

    def published(self, layer: nn.Module) -> dict[str, Tensor]:
        codes = getattr(layer, "weight_codes", None)
        packed = self._untiled(layer) if codes is None else pack_int4(codes.data.to(torch.int8))
        return {"weight_packed": packed, "weight_scale": layer.weight_scale.data}


class _ByteKernel(ScaledMMLinearKernel, HoldsPublished):
    """Common to the kernels of one code a byte, a scale a row, activations quantized per token by the product itself.

    The CPU holds codes as float32, which its product reads and which give the bytes back.
    """

    stored: torch.dtype
    capability = 80

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        if compute_capability is not None and compute_capability < cls.capability:
            return False, f"needs compute capability {cls.capability / 10}"
        return True, None

    def apply_weights(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        if x.device.type == "cpu":
            weights = layer.weight, layer.weight_scale
            y = by_parts(lambda codes, scale, bias: self.product(rows, codes, scale, bias), layer, weights, bias)
        else:
            y = self.product(rows, layer.weight, layer.weight_scale, bias)
        return y.view(*x.shape[:-1], y.shape[-1])

    @abstractmethod
    def product(self, x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        """x: (M, K), codes: (N, K), scale: (N, 1), bias: (N,) or None. Returns (M, N)."""

    def published(self, layer: nn.Module) -> dict[str, Tensor]:
        return {"weight": layer.weight.data.to(self.stored), "weight_scale": layer.weight_scale.data}

    def _get_layer_params(self, layer: nn.Module) -> tuple[Tensor, Tensor]:
        return layer.weight, layer.weight_scale

    def _hold_codes(self, layer: nn.Module, codes: Tensor) -> None:
        plain(layer)
        hold(layer, "weight", codes.float() if codes.device.type == "cpu" else codes)


class W8A8Kernel(_ByteKernel):
    """int8 weights and activations."""

    stored = torch.int8

    @classmethod
    def can_implement(cls, c: Int8ScaledMMLinearLayerConfig) -> tuple[bool, str | None]:
        if c.is_static_input_scheme or not c.input_symmetric or not c.is_channelwise:
            return False, "qarl multiplies weights with a scale a row and activations with a symmetric scale a token"
        return True, None

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        self._hold_codes(layer, layer.weight.data)

    def product(self, x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        return OPS.w8a8(x, codes, scale, bias)


class FP8Kernel(_ByteKernel):
    """float8_e4m3fn weights and activations."""

    stored = torch.float8_e4m3fn
    capability = 89

    @classmethod
    def can_implement(cls, c: FP8ScaledMMLinearLayerConfig) -> tuple[bool, str | None]:
        if c.activation_quant_key != kFp8DynamicTokenSym or c.weight_quant_key != kFp8StaticChannelSym:
            return False, "qarl multiplies weights with a scale a row and activations with a dynamic scale a token"
        return True, None

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        self._hold_codes(layer, layer.weight.data.t())  # vLLM's scheme has made it (K, N), a view

    def product(self, x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        return OPS.fp8(x, codes, scale, bias)
