"""nvfp4a16: e2m1 weights, an e4m3 scale a group of 16, a float32 scale a tensor; activations as they are (NVFP4A16).

Stored (nvfp4-pack-quantized): `weight_packed` uint8 [N, K / 2], two codes a byte, the first in the low nibble;
`weight_scale` float8_e4m3fn [N, K / 16]; `weight_global_scale` float32 [1], a divisor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from qarl_formats.registry import register
from qarl_formats.scheme import Scheme, TensorSpec

if TYPE_CHECKING:
    import torch
    from qarl_kernels.moe.groups import Groups
    from torch import Tensor

    from qarl_formats.prepared import PreparedWeight
    from qarl_formats.quantize import QuantizedWeight

GROUP = 16
STORED = ("weight_packed", "weight_scale", "weight_global_scale")


@register
class NVFP4A16(Scheme):
    """y = (x @ (codes * scale)^T in fp32) / global scale, as vLLM's Marlin kernel has it: no weight is rounded.

    Operands: the stored tensors, and in plain torch `weight_values` (N, K), codes times scales, which it multiplies,
    float32 on the CPU; for the kernels `weight_tiled` and `weight_meta` (`qarl_kernels.nvfp4a16.tile_nvfp4`), beside
    which `weight_packed` may be left out: it is then put back in order from the tiles.
    """

    name = "nvfp4a16"
    description = "e2m1 weights, an e4m3 scale a group of 16 and a float32 scale a tensor; activations in 16 bits"
    weight_bits = 4
    weight_type = "float"
    scale_dtypes = ()
    vllm_cpu = False
    tolerance = 0.1
    file_format = "nvfp4-pack-quantized"
    strategies = ("tensor_group",)
    shape_suffix = "weight_packed"

    def num_groups(self, in_features: int) -> int:
        return in_features // GROUP

    def shape_fault(self, out_features: int, in_features: int) -> str | None:
        if in_features % GROUP == 0:
            return None
        return f"its {in_features} input features are no multiple of {GROUP}, the group of {self.name}; use w8a8 or fp8"

    def tensor_specs(self, out_features: int, in_features: int, unpacked: bool = False) -> dict[str, TensorSpec]:
        return {
            "weight_packed": TensorSpec((out_features, in_features // 2), "uint8"),
            "weight_scale": TensorSpec((out_features, in_features // GROUP), "float8_e4m3fn"),
            "weight_global_scale": TensorSpec((1,), "float32"),
        }

    def shape_from(self, tensor: Tensor) -> tuple[int, int] | None:
        return (tensor.shape[0], tensor.shape[1] * 2) if tensor.ndim == 2 else None

    def weight_arguments(self) -> dict[str, Any]:
        fixed = {"strategy": "tensor_group", "group_size": GROUP, "scale_dtype": "torch.float8_e4m3fn"}
        return super().weight_arguments() | fixed

    def kernel_bytes(self, out_features: int, in_features: int) -> int:
        rows, blocks = -(-out_features // 16) * 16, -(-in_features // 128)
        return rows * blocks * (64 + 8)

    @property
    def text(self) -> str:
        return f"{self.name}: e2m1 weights, an e4m3 scale per {GROUP} inputs, a float32 scale; inputs not quantized"

    def library_codes(self, stored: Mapping[str, Tensor], shape: tuple[int, int]) -> Tensor:
        import torch
        from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8

        return unpack_fp4_from_uint8(stored["weight_packed"], *shape, torch.float32).to(torch.float8_e4m3fn)

    def shared(self, weights: Iterable[Tensor]) -> Tensor:
        from qarl_formats import nvfp4

        return nvfp4.global_scale_of(nvfp4.absmax_of(weight) for weight in weights)

    def quantize(
        self, weight: Tensor, kernels: bool = False, shared: Tensor | None = None
    ) -> tuple[dict[str, Tensor], Tensor]:
        from qarl_formats import nvfp4

        divisor = self.shared([weight]) if shared is None else shared.to(weight.device, copy=True)
        if kernels:
            from qarl_kernels.nvfp4_weights import quantize_nvfp4

            packed, scale, bad = quantize_nvfp4(weight, divisor)
        else:
            packed, scale = nvfp4.quantize_nvfp4(weight, divisor)
            bad = weight.isfinite().logical_not_().sum()
        return dict(zip(STORED, (packed, scale, divisor), strict=True)), bad

    def dequantize(self, weight: QuantizedWeight, dtype: torch.dtype, kernels: bool = False) -> Tensor:
        packed, scale, divisor = (weight.tensors[name] for name in STORED)
        if kernels:
            from qarl_kernels.nvfp4_weights import dequantize_nvfp4

            return dequantize_nvfp4(packed, scale, divisor, dtype)
        from qarl_kernels.nvfp4 import dequantized_nvfp4

        return dequantized_nvfp4(packed, scale, divisor, dtype)

    def codes(self, weight: QuantizedWeight) -> Tensor:
        """As float8_e4m3fn of the same values, -0 among them."""
        import torch
        from qarl_kernels.nvfp4 import e2m1_values

        return e2m1_values(weight.tensors["weight_packed"]).to(torch.float8_e4m3fn)

    def operands(self, weight: QuantizedWeight, dtype: torch.dtype, kernels: bool) -> dict[str, Tensor]:
        stored = {name: weight.tensors[name] for name in STORED}
        if not kernels:
            from qarl_kernels.nvfp4 import scaled_codes

            values = scaled_codes(stored["weight_packed"], stored["weight_scale"])
            return stored | {"weight_values": values if values.device.type == "cpu" else values.to(dtype)}
        from qarl_kernels.nvfp4a16 import tile_nvfp4

        tiled, meta = tile_nvfp4(stored["weight_packed"], stored["weight_scale"])
        return stored | {"weight_tiled": tiled, "weight_meta": meta}

    @classmethod
    def multiply(
        cls, x: Tensor, operands: Mapping[str, Tensor], out_features: int, bias: Tensor | None, kernels: bool
    ) -> Tensor:
        divisor = operands["weight_global_scale"]
        if not kernels:
            from qarl_kernels import nvfp4

            return nvfp4.nvfp4a16(x, operands["weight_values"], divisor, bias)
        from qarl_kernels.nvfp4a16 import nvfp4a16

        packed, scale = operands.get("weight_packed"), operands["weight_scale"]
        tiled, meta = operands["weight_tiled"], operands["weight_meta"]
        return nvfp4a16(x.contiguous(), packed, scale, divisor, tiled, meta, bias)

    @classmethod
    def grouped_by_kernel(
        cls, x: Tensor, operands: Mapping[str, Tensor], out_features: int, groups: Groups, gathered: bool
    ) -> Tensor:
        from qarl_kernels.nvfp4a16 import nvfp4a16

        return nvfp4a16(
            x,
            operands.get("weight_packed"),
            operands["weight_scale"],
            operands["weight_global_scale"],
            operands["weight_tiled"],
            operands["weight_meta"],
            groups=groups,
            gathered=gathered,
        )

    @classmethod
    def parts(cls, operands: Mapping[str, Tensor], widths: list[int]) -> list[dict[str, Tensor]]:
        split = super().parts({"weight_values": operands["weight_values"]}, widths)  # what the CPU reads of a part
        return [part | {"weight_global_scale": operands["weight_global_scale"]} for part in split]

    def stored(
        self, operands: Mapping[str, Tensor], shape: tuple[int, int], dtype: torch.dtype, kernels: bool
    ) -> dict[str, Tensor]:
        found = {name: operands[name] for name in STORED if name in operands}
        if kernels:
            from qarl_kernels.nvfp4a16 import untile_nvfp4

            found["weight_packed"] = untile_nvfp4(operands["weight_tiled"], *shape)
        return found

    def dequantized(self, prepared: PreparedWeight, dtype: torch.dtype) -> Tensor:
        from qarl_formats.quantize import QuantizedWeight

        assert isinstance(prepared.source, QuantizedWeight)
        values = self.dequantize(prepared.source, dtype, prepared.kernels)
        return values.float() if values.device.type == "cpu" and not prepared.kernels else values
