"""Random operands of the product kernels, and their values."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from qarl_kernels import tile
from torch import Tensor


def random(*shape: int, seed: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def integers(low: int, high: int, *shape: int, seed: int, device: torch.device) -> Tensor:
    """int8 in [low, high]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high + 1, shape, generator=generator, dtype=torch.int8).to(device)


def of_both_dtypes(shapes: list[tuple[int, int]]) -> list[tuple[int, int, torch.dtype]]:
    """All shapes in bf16, and every second one also in fp16: kernels differ in their conversions only."""
    return [(*shape, torch.bfloat16) for shape in shapes] + [(*shape, torch.float16) for shape in shapes[::2]]


def relative_error(result: Tensor, expected: Tensor) -> float:
    """Frobenius norm of the difference relative to that of `expected`; NaN if the result contains NaN."""
    return ((result.double() - expected.double()).norm() / expected.double().norm()).item()


@dataclass
class Int4:
    """An int4 weight (N, K): codes and zero points int8, scales of `dtype`; the stored and the tiled form of it."""

    codes: Tensor
    scale: Tensor
    zero_point: Tensor | None
    group: int | None

    @classmethod
    def random(
        cls,
        n: int,
        k: int,
        group: int | None,
        *,
        asymmetric: bool = False,
        seed: int = 0,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device,
    ) -> Int4:
        groups = 1 if group is None else k // group
        codes = integers(-8, 7, n, k, seed=seed, device=device)
        scale = torch.rand(n, groups, generator=torch.Generator().manual_seed(seed + 1)).to(device) * 0.02 + 0.001
        zero_point = integers(-8, 7, n, groups, seed=seed + 2, device=device) if asymmetric else None
        return cls(codes, scale.to(dtype), zero_point, group)

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    def values(self, dtype: torch.dtype) -> Tensor:
        """(code - zero) * scale in float32, rounded once."""
        repeat = self.group or self.shape[1]
        zero = 0 if self.zero_point is None else self.zero_point.float().repeat_interleave(repeat, dim=1)
        return ((self.codes.float() - zero) * self.scale.float().repeat_interleave(repeat, dim=1)).to(dtype)

    def packed(self) -> Tensor:
        return _pack(self.codes)

    def packed_zero_point(self) -> Tensor | None:
        return None if self.zero_point is None else _pack(self.zero_point.t()).t().contiguous()

    def tiled(self) -> Tensor:
        return tile.tile_int4(self.packed(), self.shape[1])

    def meta(self, dtype: torch.dtype) -> Tensor:
        return tile.meta_w4a16(self.scale, self.packed_zero_point(), *self.shape, self.group, dtype)

    def meta_int8(self) -> Tensor:
        return tile.meta_w4a8(self.scale, *self.shape, self.group)


def _pack(codes: Tensor) -> Tensor:
    """int8 (R, C) in [-8, 7] -> int32 (R, ceil(C / 8)): code + 8, the first in the lowest bits, missing ones zero."""
    nibbles = torch.nn.functional.pad(codes.int() + 8, (0, -codes.shape[1] % 8)).view(codes.shape[0], -1, 8)
    words = torch.zeros(nibbles.shape[:2], dtype=torch.int32, device=codes.device)
    for j in range(8):
        words |= nibbles[:, :, j] << (4 * j)
    return words
