"""What `tools/tune_kernels.py` times: a product of one family and shape on random operands."""

from __future__ import annotations

import torch
from qarl_kernels import fp8_block, gemm, library, nvfp4a16, w4a8, w4a16
from qarl_kernels.tuning import Tile, lookup
from torch import Tensor

from kernel_bench.candidates import candidates


class Problem:
    """Random operands of one family and shape, and the product of m rows with a given tile."""

    section = "tiles"  # of a table

    def __init__(self, family: str, n: int, k: int, device: torch.device, group: int = 128) -> None:
        self.family, self.n, self.k, self.device = family, n, k, device
        self.scale_w = torch.rand(n, 1, device=device) * 0.01
        if family in ("w4a16", "w4a8"):
            words = -(-n // 16), -(-k // 128), 16, 16
            self.tiled = torch.randint(-(2**31), 2**31 - 1, words, dtype=torch.int32, device=device)
            rows = words[1] * max(1, 128 // group), words[0] * 16
            scales = torch.rand(rows, device=device) * 0.01
            if family == "w4a8":
                self.meta = scales
            else:
                low = scales.bfloat16().view(torch.int16).int() & 0xFFFF
                self.meta = low | (torch.full_like(scales, -136).bfloat16().view(torch.int16).int() << 16)
        elif family == "nvfp4a16":
            packed = torch.randint(0, 256, (n, k // 2), device=device).to(torch.uint8)
            self.stored = packed, torch.rand(n, k // 16, device=device).to(torch.float8_e4m3fn), self.scale_w[0]
            self.tiled, self.meta = nvfp4a16.tile_nvfp4(*self.stored[:2])
        elif family == "fp8_block":
            self.weight = torch.randn(n, k, device=device).to(torch.float8_e4m3fn)
            self.scale_w = torch.rand(-(-n // 128), -(-k // 128), device=device)
        else:
            self.weight = self._codes(n)

    def _codes(self, rows: int) -> Tensor:
        if self.family in ("w8a8", "w4a8"):
            return torch.randint(-127, 128, (rows, self.k), dtype=torch.int8, device=self.device)
        x = torch.randn(rows, self.k, device=self.device, dtype=torch.bfloat16)
        return x.to(torch.float8_e4m3fn) if self.family.startswith("fp8") else x

    def rows(self, m: int) -> None:
        self.x = self._codes(m)
        self.scale_x = torch.rand(m, -(-self.k // 128) if self.family == "fp8_block" else 1, device=self.device)

    @property
    def key(self) -> str:
        """What stands for the shape in a table."""
        return f"{self.n}x{self.k}"

    def limit(self, m: int) -> int:
        """Rows as a table counts them."""
        return m

    def known(self, m: int) -> Tile:
        """What the tables give now. After `rows`."""
        return lookup(self.family, self.n, self.k, m, self.x)

    def candidates(self, m: int) -> list[Tile]:
        """Tiles worth trying for m rows."""
        return candidates(self.family, m)

    def comparable(self, tile: Tile) -> bool:
        """Whether what a tile gives must have the bits of the others."""
        return tile.way != "dequantized"  # here of other codes, see `product`

    def timed(self, tile: Tile) -> object:
        """What is timed of `product`."""
        return self.product(tile)

    def product(self, tile: Tile) -> Tensor:
        """The result of m rows, after `rows(m)`."""
        dtype = torch.bfloat16
        if self.family == "w4a16":
            if tile.way == "dequantized":
                packed = self.tiled.view(self.n, -1)  # as many words; their order does not matter to the time
                scale = self.scale_w.expand(-1, self.k // 128).bfloat16().contiguous()
                weight = w4a16.dequantize_int4(packed, scale, None, self.k, dtype)
                return gemm.dense(self.x, weight)
            return w4a16.w4a16(self.x, None, self.scale_w, None, self.tiled, self.meta, tile=tile)
        if self.family == "nvfp4a16":
            return nvfp4a16.nvfp4a16(self.x, *self.stored, self.tiled, self.meta, tile=tile)
        if self.family == "w4a8":
            weight = self.tiled, self.meta, self.k, self.n
            return w4a8.w4a8(self.x, self.scale_x, *weight, None, dtype, tile=tile)
        if self.family == "fp8_block":
            return fp8_block.fp8_block(self.x, self.scale_x, self.weight, self.scale_w, None, dtype, tile=tile)
        out = torch.empty(self.x.shape[0], self.n, dtype=dtype, device=self.device)
        if tile.way == "library":
            return out[: library.product(self.x, self.weight, out, gemm.by_kernel)]  # shorter where its bits differ
        scales = (None, None) if self.family == "dense" else (self.scale_x, self.scale_w)
        gemm.run(self.x, self.weight, *scales, None, out, tile)
        return out
