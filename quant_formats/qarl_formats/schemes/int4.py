"""Base class of schemes with packed int4 weights: eight codes per word, a scale per group or row.

Stored (pack-quantized): `weight_packed` int32 [N, ceil(K / 8)], `weight_scale` [N, groups], if asymmetric
`weight_zero_point` int32 [ceil(N / 8), groups], `weight_shape` int64 [2] on the CPU. Rows that are not whole words are
padded, as the library pads them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from qarl_formats.scheme import GRIDS, GROUP_SIZES, CodeGrid, Quantized, Scheme, Shape, Tensors, TensorSpec

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from qarl_formats.rounding import Grid


class PackedInt4(Scheme):
    weight_bits = 4
    weight_type = "int"
    group_sizes = GROUP_SIZES
    grids = GRIDS
    chooses_codes = True
    file_format = "pack-quantized"
    strategies = ("group", "channel")

    @property
    def unpackable(self) -> bool:
        return self.symmetric

    def tensor_specs(self, out_features: int, in_features: int, unpacked: bool = False) -> dict[str, TensorSpec]:
        assert self.symmetric or not unpacked, "zero points are stored with packed codes only"
        scales = TensorSpec((out_features, self.num_groups(in_features)), self.scale_dtype)
        if unpacked:
            return {"weight": TensorSpec((out_features, in_features), "int8"), "weight_scale": scales}
        specs = {"weight_packed": TensorSpec((out_features, -(-in_features // 8)), "int32"), "weight_scale": scales}
        if not self.symmetric:
            specs["weight_zero_point"] = TensorSpec((-(-out_features // 8), scales.shape[1]), "int32")
        return specs | {"weight_shape": TensorSpec((2,), "int64")}

    def library_codes(self, stored: Tensors, shape: Shape) -> Tensor:
        if "weight_packed" not in stored:  # codes are stored one per byte
            return stored["weight"]
        import torch
        from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

        return unpack_from_int32(stored["weight_packed"], 4, torch.Size(shape))

    @property
    def _grid(self) -> Grid:
        from qarl_formats import rounding

        return rounding.INT4 if self.grid == GRIDS[0] else rounding.INT4_SYMMETRIC7

    def quantize(self, weight: Tensor, kernels: bool = False, shared: Tensor | None = None) -> Quantized:
        import torch

        packed, scale, zero_point, bad = (self._by_kernel if kernels else self._by_torch)(weight)
        tensors = {"weight_packed": packed, "weight_scale": scale}
        if zero_point is not None:
            tensors["weight_zero_point"] = zero_point
        return tensors | {"weight_shape": torch.tensor(weight.shape)}, bad

    def _by_torch(self, weight: Tensor) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        import torch

        from qarl_formats import rounding
        from qarl_formats.packing import pack_int4, pack_zero_points

        (n, k), dtype = weight.shape, getattr(torch, self.scale_dtype)
        groups, zero_point = weight.reshape(n, self.num_groups(k), -1), None
        if self.symmetric:
            scaled, scale, bad = rounding.symmetric(groups, self._grid, dtype)
        else:
            scaled, scale, zero_point, bad = rounding.asymmetric(groups, self._grid, dtype)
            zero_point = pack_zero_points(zero_point.squeeze(-1).to(torch.int8))
        return pack_int4(rounding.integers(scaled, self._grid).view(n, k)), scale.squeeze(-1), zero_point, bad

    def _by_kernel(self, weight: Tensor) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        import torch
        from qarl_kernels import quantize

        grid = self._grid
        return quantize.quantize_int4(
            weight,
            self.group_size,
            symmetric=self.symmetric,
            divisor=grid.divisor,
            lowest=grid.lowest,
            highest=grid.highest,
            scale_dtype=getattr(torch, self.scale_dtype),
        )

    def codes(self, tensors: Tensors, shape: Shape) -> Tensor:
        from qarl_formats.packing import unpack_int4

        return unpack_int4(tensors["weight_packed"], shape[1])

    def code_grid(self, tensors: Tensors, shape: Shape) -> CodeGrid:
        import torch

        from qarl_formats.packing import unpack_zero_points

        step, zero_point = tensors["weight_scale"].float(), tensors.get("weight_zero_point")
        levels = torch.arange(self._grid.lowest, self._grid.highest + 1, device=step.device)
        zero = torch.zeros_like(step) if zero_point is None else unpack_zero_points(zero_point, shape[0]).float()
        return CodeGrid(levels, step, zero)

    def with_codes(self, tensors: Tensors, codes: Tensor) -> dict[str, Tensor]:
        import torch

        from qarl_formats.packing import pack_int4

        return {**tensors, "weight_packed": pack_int4(codes.to(torch.int8))}

    def preimage(self, tensors: Tensors, shape: Shape) -> tuple[Tensor, Tensor]:
        from qarl_formats import preimage
        from qarl_formats.packing import unpack_zero_points

        scale, zero_point = tensors["weight_scale"].flatten()[:, None], tensors.get("weight_zero_point")
        codes = self.codes(tensors, shape).float().view(len(scale), -1)
        if zero_point is None:
            master, exact = preimage.symmetric(codes, scale, self._grid)
        else:
            zero = unpack_zero_points(zero_point, shape[0]).float().flatten()[:, None]
            master, exact = preimage.asymmetric(codes, scale, zero, self._grid)
        return master.view(shape), (~exact).sum()

    def dequantize(self, tensors: Tensors, shape: Shape, dtype: torch.dtype, kernels: bool = False) -> Tensor:
        scale, zero_point = tensors["weight_scale"], tensors.get("weight_zero_point")
        n, k = shape
        if kernels:
            from qarl_kernels.dequantize import dequantize_int4

            return dequantize_int4(tensors["weight_packed"], scale, zero_point, k, dtype)
        from qarl_formats.packing import unpack_zero_points

        values = self.codes(tensors, shape).float().view(n, scale.shape[1], -1)
        if zero_point is not None:
            values.sub_(unpack_zero_points(zero_point, n).unsqueeze(-1))
        return values.mul_(scale.float().unsqueeze(-1)).view(n, k).to(dtype)

    def kernel_bytes(self, out_features: int, in_features: int) -> int:
        # tiles of 16 x 128, and 4 bytes per group and row
        rows, blocks = -(-out_features // 16) * 16, -(-in_features // 128)
        groups = 128 // min(self.group_size or 128, 128)
        return rows * blocks * (64 + 4 * groups)

    def stored(self, operands: Tensors, shape: Shape, dtype: torch.dtype) -> dict[str, Tensor]:
        if (tiled := operands.get("weight_tiled")) is not None:
            from qarl_kernels.tile import untile_int4

            operands = {**operands, "weight_packed": untile_int4(tiled, *shape)}
        return super().stored(operands, shape, dtype)
