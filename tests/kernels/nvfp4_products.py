"""Random NVFP4 weights, and one with every code under every scale."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from qarl_kernels import nvfp4, nvfp4a16
from torch import Tensor


@dataclass
class Nvfp4:
    """An NVFP4 weight (N, K) as it is stored: uint8 (N, K / 2), e4m3 (N, K / 16), float32 (1,)."""

    packed: Tensor
    scale: Tensor
    global_scale: Tensor

    @classmethod
    def random(cls, n: int, k: int, *, seed: int = 0, device: torch.device, scales: Tensor | None = None) -> Nvfp4:
        """scales: Values to sample scales from; default: every positive e4m3 value."""
        generator = torch.Generator().manual_seed(seed)
        packed = torch.randint(0, 256, (n, k // 2), generator=generator).to(torch.uint8)
        if scales is None:
            scales = torch.arange(1, 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
        drawn = scales[torch.randint(0, len(scales), (n, k // 16), generator=generator)].to(torch.float8_e4m3fn)
        return cls(packed.to(device), drawn.to(device), torch.tensor([5376.7], device=device))

    @classmethod
    def every_code_and_scale(cls, device: torch.device) -> Nvfp4:
        """126 rows of 144 features; row and group decide the scale, so that each stands in each of eight groups."""
        packed = torch.tensor([(2 * j + 1) << 4 | 2 * j for j in range(8)], dtype=torch.uint8).repeat(126, 9)
        code = (torch.arange(126)[:, None] + 37 * torch.arange(9)[None, :]) % 126 + 1
        scale = code.to(torch.uint8).view(torch.float8_e4m3fn)
        return cls(packed.to(device), scale.to(device), torch.ones(1, device=device))

    @property
    def shape(self) -> tuple[int, int]:
        return self.packed.shape[0], self.packed.shape[1] * 2

    def stored(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.packed, self.scale, self.global_scale

    def tiled(self) -> tuple[Tensor, Tensor]:
        return nvfp4a16.tile_nvfp4(self.packed, self.scale)

    def scaled_codes(self) -> Tensor:
        """Return code * scale, float32 (N, K)."""
        return nvfp4.scaled_codes(self.packed, self.scale)
