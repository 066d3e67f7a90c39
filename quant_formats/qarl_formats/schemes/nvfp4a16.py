"""nvfp4a16: e2m1 weights, an e4m3 scale per group of 16, a float32 scale per tensor; 16-bit activations (NVFP4A16).

Stored (nvfp4-pack-quantized): `weight_packed` uint8 [N, K / 2], two codes per byte, the first in the low nibble;
`weight_scale` float8_e4m3fn [N, K / 16]; `weight_global_scale` float32 [1], a divisor.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from qarl_formats.registry import register
from qarl_formats.scheme import CodeGrid, Codes, Quantized, Scheme, Shape, Tensors, TensorSpec

if TYPE_CHECKING:
    import torch
    from qarl_kernels.groups import Groups
    from torch import Tensor

GROUP = 16
STORED = ("weight_packed", "weight_scale", "weight_global_scale")


@register
class NVFP4A16(Scheme):
    """y = (x @ (codes * scale)^T in fp32) / global scale, as in vLLM's Marlin kernel: no weight is rounded.

    Operands: the stored tensors. In plain torch also `weight_scaled` (N, K), codes times scales, float32 on the CPU.
    With Triton also `weight_tiled` and `weight_meta` (`qarl_kernels.nvfp4a16.tile_nvfp4`); `weight_packed` may then be
    left out and is restored from the tiles.
    """

    name = "nvfp4a16"
    description = "e2m1 weights, an e4m3 scale per group of 16 and a float32 scale per tensor; 16-bit activations"
    weight_bits = 4
    weight_type = "float"
    scale_dtypes = ()
    chooses_codes = True
    vllm_cpu = False
    tolerance = 0.1
    file_format = "nvfp4-pack-quantized"
    strategies = ("tensor_group",)
    plain_operands = ("weight_scaled", "weight_global_scale")

    def num_groups(self, in_features: int) -> int:
        return in_features // GROUP

    def shape_fault(self, out_features: int, in_features: int) -> str | None:
        if in_features % GROUP == 0:
            return None
        return f"its {in_features} input features are not a multiple of {self.name}'s group, {GROUP}; use w8a8 or fp8"

    def tensor_specs(self, out_features: int, in_features: int, unpacked: bool = False) -> dict[str, TensorSpec]:
        return {
            "weight_packed": TensorSpec((out_features, in_features // 2), "uint8"),
            "weight_scale": TensorSpec((out_features, in_features // GROUP), "float8_e4m3fn"),
            "weight_global_scale": TensorSpec((1,), "float32"),
        }

    def weight_arguments(self) -> dict[str, Any]:
        fixed = {"strategy": "tensor_group", "group_size": GROUP, "scale_dtype": "torch.float8_e4m3fn"}
        return super().weight_arguments() | fixed

    def kernel_bytes(self, out_features: int, in_features: int) -> int:
        rows, blocks = -(-out_features // 16) * 16, -(-in_features // 128)
        return rows * blocks * (64 + 8)

    def library_codes(self, stored: Tensors, shape: Shape) -> Tensor:
        import torch
        from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8

        return unpack_fp4_from_uint8(stored["weight_packed"], *shape, torch.float32).to(torch.float8_e4m3fn)

    def shared(self, weights: Iterable[Tensor]) -> Tensor:
        from qarl_formats import nvfp4

        return nvfp4.global_scale_of(nvfp4.absmax_of(weight) for weight in weights)

    def quantize(self, weight: Tensor, kernels: bool = False, shared: Tensor | None = None) -> Quantized:
        from qarl_formats import nvfp4

        divisor = self.shared([weight]) if shared is None else shared.to(weight.device, copy=True)
        if kernels:
            from qarl_kernels.nvfp4_weights import quantize_nvfp4

            packed, scale, bad = quantize_nvfp4(weight, divisor)
        else:
            packed, scale = nvfp4.quantize_nvfp4(weight, divisor)
            bad = weight.isfinite().logical_not_().sum()
        return dict(zip(STORED, (packed, scale, divisor), strict=True)), bad

    def dequantize(self, tensors: Tensors, shape: Shape, dtype: torch.dtype, kernels: bool = False) -> Tensor:
        packed, scale, divisor = (tensors[name] for name in STORED)
        if kernels:
            from qarl_kernels.nvfp4_weights import dequantize_nvfp4

            return dequantize_nvfp4(packed, scale, divisor, dtype)
        from qarl_kernels.nvfp4 import dequantized_nvfp4

        return dequantized_nvfp4(packed, scale, divisor, dtype)

    def codes(self, tensors: Tensors, shape: Shape) -> Tensor:
        """Return the codes as float8_e4m3fn of the same values, including -0."""
        import torch
        from qarl_kernels.nvfp4 import e2m1_values

        return e2m1_values(tensors["weight_packed"]).to(torch.float8_e4m3fn)

    def code_grid(self, tensors: Tensors, shape: Shape) -> CodeGrid:
        import torch
        from qarl_kernels.nvfp4 import E2M1

        step = tensors["weight_scale"].float() / tensors["weight_global_scale"]
        magnitudes = torch.tensor(E2M1, device=step.device)
        return CodeGrid(torch.cat((-magnitudes[1:].flip(0), magnitudes)), step, torch.zeros_like(step))

    def with_codes(self, tensors: Tensors, codes: Tensor) -> dict[str, Tensor]:
        from qarl_formats.nvfp4 import pack_e2m1

        return {**tensors, "weight_packed": pack_e2m1(codes)}

    def preimage(self, tensors: Tensors, shape: Shape) -> tuple[Tensor, Tensor]:
        from qarl_kernels.nvfp4 import e2m1_values

        from qarl_formats import preimage

        packed, scale, divisor = (tensors[name] for name in STORED)
        master, exact = preimage.tensor_group(e2m1_values(packed).view(-1, GROUP), scale.flatten()[:, None], divisor)
        return master.view(shape), (~exact).sum()

    def operands(self, tensors: Tensors, shape: Shape, dtype: torch.dtype, kernels: bool) -> dict[str, Tensor]:
        stored = {name: tensors[name] for name in STORED}
        if not kernels:
            from qarl_kernels.nvfp4 import scaled_codes

            values = scaled_codes(stored["weight_packed"], stored["weight_scale"])
            return stored | {"weight_scaled": values if values.device.type == "cpu" else values.to(dtype)}
        from qarl_kernels.nvfp4a16 import tile_nvfp4

        tiled, meta = tile_nvfp4(stored["weight_packed"], stored["weight_scale"])
        return stored | {"weight_tiled": tiled, "weight_meta": meta}

    def stored(self, operands: Tensors, shape: Shape, dtype: torch.dtype) -> dict[str, Tensor]:
        if (tiled := operands.get("weight_tiled")) is not None:
            from qarl_kernels.nvfp4a16 import untile_nvfp4

            operands = {**operands, "weight_packed": untile_nvfp4(tiled, *shape)}
        return super().stored(operands, shape, dtype)

    def plain_product(self, x: Tensor, operands: Tensors, bias: Tensor | None) -> Tensor:
        from qarl_kernels import nvfp4

        return nvfp4.nvfp4a16(x, operands["weight_scaled"], operands["weight_global_scale"], bias)

    def kernel_product(
        self, x: Tensor | Codes, operands: Tensors, n: int, bias: Tensor | None, groups: Groups | None, gathered: bool
    ) -> Tensor:
        assert not isinstance(x, Codes), "nvfp4a16 multiplies 16-bit activations"
        scales = operands["weight_scale"], operands["weight_global_scale"]
        weight = operands.get("weight_packed"), *scales, operands["weight_tiled"], operands["weight_meta"]
        from qarl_kernels.nvfp4a16 import nvfp4a16

        return nvfp4a16(x, *weight, bias, groups=groups, gathered=gathered)
