"""qarl's products as linear kernels of vLLM: what the learner multiplies with, so that both compute the same bits.

vLLM fuses q, k and v, and gate and up, into one weight. On a GPU the fused weight is multiplied at once: K is never
split, and an output's bits depend on its own row of x and of the weight alone. On the CPU, where a BLAS may sum
otherwise for another N, the parts are multiplied one by one in the learner's shapes.

A kernel's state are the layer's parameters, all made in `process_weights_after_loading` with the same names, shapes and
dtypes in every call: vLLM reloads weights by making them anew and copying them into the first ones, whose addresses
CUDA graphs know. They are the operands of the scheme, from which `published` gives back what was loaded: only one form
of a weight is held (but of W4A16 on the CPU both the packed codes and the values in float32 that the product reads).
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping

import torch
from qarl_formats.bits import Proof
from qarl_formats.registry import make_scheme
from qarl_formats.scheme import GROUP_SIZES, Scheme
from qarl_formats.weight import LowBitWeight
from torch import Tensor, nn
from vllm.model_executor.kernels.linear import (
    FP8ScaledMMLinearLayerConfig,
    Int8ScaledMMLinearLayerConfig,
    MPLinearKernel,
    MPLinearLayerConfig,
    ScaledMMLinearKernel,
)
from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8DynamicTokenSym, kFp8StaticChannelSym
from vllm.platforms import current_platform
from vllm.scalar_type import scalar_types

from qarl.rollout.vllm.own_kernels.ops import linear

STORED = ("weight", "weight_packed", "weight_scale", "weight_zero_point", "weight_global_scale")


class HoldsPublished(ABC):
    """A kernel or linear method that multiplies with qarl's products.

    Prepared once for each load of its layer: scheme, shape (N, K) and dtype of the activations of the fused weight,
    names of the operands, and whether Triton multiplies them.
    """

    scheme: Scheme
    shape: tuple[int, int]
    dtype: torch.dtype
    names: tuple[str, ...]
    kernels: bool

    def prepare(
        self,
        layer: nn.Module,
        scheme: Scheme,
        tensors: Mapping[str, Tensor],
        shape: tuple[int, int],
        dtype: torch.dtype,
        kernels: bool | None = None,
    ) -> None:
        """Make the loaded `tensors` of a weight (N, K), fused parts under one another, operands of the product.

        kernels: by Triton; None: where they are on a GPU.
        """
        on_gpu = any(tensor.device.type != "cpu" for tensor in tensors.values())
        self.kernels = on_gpu if kernels is None else kernels
        self.scheme, self.shape, self.dtype = scheme, shape, dtype
        operands = scheme.operands(tensors, shape, dtype, self.kernels)
        if "weight_tiled" in operands:
            operands.pop("weight_packed", None)
        for name in STORED:
            if name in layer._parameters and name not in operands:
                delattr(layer, name)
        for name, tensor in operands.items():
            hold(layer, name, tensor)
        self.names = tuple(operands)

    def multiply(self, layer: nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
        """x: (*, K) of the compute dtype; bias: (N,) or None. Returns (*, N)."""
        rows, operands = x.reshape(-1, x.shape[-1]), {name: getattr(layer, name) for name in self.names}
        widths = [self.shape[0]] if self.kernels else list(layer.output_partition_sizes)
        if len(widths) == 1:
            y = self._product(rows, operands, self.shape[0], bias)
        else:
            biases = [None] * len(widths) if bias is None else bias.split(widths)
            parts = zip(self.scheme.parts(operands, widths), widths, biases, strict=True)
            y = torch.cat([self._product(rows, *part) for part in parts], -1)
        return y.view(*x.shape[:-1], y.shape[-1])

    def _product(self, rows: Tensor, operands: Mapping[str, Tensor], width: int, bias: Tensor | None) -> Tensor:
        names, tensors = ",".join(operands), list(operands.values())
        return linear(rows, tensors, names, self.scheme.name, width, bias, self.kernels)

    def published(self, layer: nn.Module, proof: Proof | None = None) -> dict[str, Tensor]:
        """The loaded tensors by compressed-tensors suffix, fused parts under one another.

        Scales are in the dtype that vLLM holds them in: float32 for int8 and FP8 weights. May be the held tensors
        themselves: do not write into them. What the product reads is then what these make: raises ValueError where
        it is not, or where there is a proof, its `settle` does.
        """
        operands = {name: getattr(layer, name).data for name in self.names}
        weight = LowBitWeight(self.scheme, {}, self.shape, operands, self.dtype, self.kernels)
        found = weight.stored(proof)
        found.pop("weight_shape", None)
        return found


def kernel_of(layer: nn.Module) -> HoldsPublished | None:
    """What multiplies the layer's weight if it is qarl's, else None."""
    method, scheme = getattr(layer, "quant_method", None), getattr(layer, "scheme", None)
    for candidate in (method, getattr(scheme, "kernel", None), getattr(scheme, "fp8_linear", None)):
        if isinstance(candidate, HoldsPublished):
            return candidate
    return None


def hold(layer: nn.Module, name: str, value: Tensor) -> None:
    """Make `value` the layer's parameter `name`, instead of any that has the name.

    vLLM's own parameters, whose classes know how to load, become ones that torch.compile knows. The memory stays.
    `weight_shape` is left as it is: in a reload vLLM gives it to a fused layer once more after this.
    """
    layer.register_parameter(name, nn.Parameter(value, requires_grad=False))


def loaded(layer: nn.Module) -> dict[str, Tensor]:
    """The stored tensors of a layer, as vLLM has just loaded them."""
    return {name: getattr(layer, name).data for name in STORED if name in layer._parameters}


class _Int4Kernel(MPLinearKernel, HoldsPublished):
    """Common to the kernels of packed int4 weights. name: the scheme's."""

    name: str

    @classmethod
    def get_min_capability(cls) -> int:
        return 80

    @classmethod
    def can_implement(cls, c: MPLinearLayerConfig) -> tuple[bool, str | None]:
        if c.weight_type not in (scalar_types.uint4b8, scalar_types.uint4):
            return False, f"qarl multiplies packed int4 weights, not {c.weight_type}"
        if c.group_size not in (-1, *GROUP_SIZES):
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

    def process_weights_after_loading(self, layer: nn.Module, kernels: bool | None = None) -> None:
        tensors, c = loaded(layer), self.config
        scale_dtype = str(tensors["weight_scale"].dtype).removeprefix("torch.")
        scheme = make_scheme(self.name, c.group_size, not c.zero_points, scale_dtype=scale_dtype)
        shape = len(tensors["weight_scale"]), c.partition_weight_shape[0]
        self.prepare(layer, scheme, tensors, shape, c.act_type, kernels)

    def apply_weights(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.multiply(layer, x, bias)


class W4A16Kernel(_Int4Kernel):
    """Packed int4 weights, symmetric or with zero points, and activations as they are."""

    name = "w4a16"


class W4A8Kernel(_Int4Kernel):
    """Packed int4 weights, activations quantized to int8 per token. `linear_methods.W4A8Scheme` makes it."""

    name = "w4a8"

    @classmethod
    def can_implement(cls, c: MPLinearLayerConfig) -> tuple[bool, str | None]:
        if c.zero_points:
            return False, "qarl multiplies int8 activations with symmetric weights"
        return super().can_implement(c)


class _ByteKernel(ScaledMMLinearKernel, HoldsPublished):
    """Common to the kernels of one code a byte, activations quantized by the product itself. name: the scheme's."""

    name: str
    capability = 80

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        if compute_capability is not None and compute_capability < cls.capability:
            return False, f"needs compute capability {cls.capability / 10}"
        return True, None

    def process_weights_after_loading(self, layer: nn.Module, kernels: bool | None = None) -> None:
        # vLLM holds these scales in float32; the dtype of the activations is no matter to the operands
        scheme, tensors = make_scheme(self.name, scale_dtype="float32"), self.stored(layer)
        self.prepare(layer, scheme, tensors, tuple(tensors["weight"].shape), torch.float32, kernels)

    def stored(self, layer: nn.Module) -> dict[str, Tensor]:
        """`loaded`, the weight (N, K)."""
        return loaded(layer)

    def apply_weights(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.multiply(layer, x, bias)

    def _get_layer_params(self, layer: nn.Module) -> tuple[Tensor, Tensor]:
        return layer.weight, layer.weight_scale


class W8A8Kernel(_ByteKernel):
    """int8 weights and activations."""

    name = "w8a8"

    @classmethod
    def can_implement(cls, c: Int8ScaledMMLinearLayerConfig) -> tuple[bool, str | None]:
        if c.is_static_input_scheme or not c.input_symmetric or not c.is_channelwise:
            return False, "qarl multiplies weights with a scale a row and activations with a symmetric scale a token"
        return True, None


class FP8Kernel(_ByteKernel):
    """float8_e4m3fn weights and activations."""

    name = "fp8"
    capability = 89

    @classmethod
    def can_implement(cls, c: FP8ScaledMMLinearLayerConfig) -> tuple[bool, str | None]:
        if c.activation_quant_key != kFp8DynamicTokenSym or c.weight_quant_key != kFp8StaticChannelSym:
            return False, "qarl multiplies weights with a scale a row and activations with a dynamic scale a token"
        return True, None

    def stored(self, layer: nn.Module) -> dict[str, Tensor]:
        tensors = loaded(layer)
        return tensors | {"weight": tensors["weight"].t()}  # vLLM's scheme has made it (K, N), a view


class FP8BlockKernel(_ByteKernel):
    """float8_e4m3fn weights with a scale a block of 128 x 128, activations with one a token and 128 features."""

    name = "fp8_block"
    capability = 89

    def __init__(self, c: FP8ScaledMMLinearLayerConfig, layer_param_names: tuple[str, ...] = ()) -> None:
        super().__init__(c, layer_param_names)

    @classmethod
    def can_implement(cls, c: FP8ScaledMMLinearLayerConfig) -> tuple[bool, str | None]:
        weight, activation = c.weight_quant_key.scale, c.activation_quant_key.scale
        if tuple(weight.group_shape) != (128, 128) or tuple(activation.group_shape) != (1, 128) or activation.static:
            return False, "qarl multiplies blocks of 128 x 128 and activations with a dynamic scale a token and 128"
        return True, None
