"""The products that `tools/tune_kernels.py` times, with random operands, and the format of the table that it writes."""

import json
from dataclasses import asdict
from typing import Any

import torch
from kernel_bench.candidates import candidates
from kernel_bench.experts import make_routing
from model_sizes import Shape as Sizes
from qarl_kernels import fp8_block, gemm, library, nvfp4a16, w4a8, w4a16
from qarl_kernels.groups import Groups
from qarl_kernels.integers import cdiv
from qarl_kernels.moe import backward
from qarl_kernels.moe.dispatch import groups_of
from qarl_kernels.tile import meta_w4a16
from qarl_kernels.tuning import BACKWARD, SECTIONS, Shape, Tile, lookup
from torch import Tensor

ROWS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 16384)
PRODUCTS = ("gate_up", "down")  # the two products of an expert
TOKENS = (1, 4, 16, 64, 128, 256, 512, 1024, 4096, 16_384)
BACKWARD_TOKENS = (1024, 4096, 16_384)  # a training batch has no fewer


class Problem:
    """Random operands of one kernel family and shape, and the product of m rows with a given tile."""

    section, numbers = "tiles", ROWS  # section of the table, default numbers of rows
    grouped: dict[str, Any] = {}  # noqa: RUF012 - arguments of a grouped product: `groups`, and whether rows are `gathered`

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
        """Key of the shape in a table."""
        return f"{self.n}x{self.k}"

    def limit(self, m: int) -> int:
        """Return the number of rows that the table has for m: tokens times experts per token in a grouped product."""
        return m

    def known(self, m: int) -> Tile:
        """Return the tile that the tables give now. Call `rows` before."""
        rows = self.grouped["groups"].rows if self.grouped else m
        return lookup(self.family, self.n, self.k, rows, self.x, **self.grouped)

    def candidates(self, m: int) -> list[Tile]:
        """Return the tiles to try for m rows."""
        return candidates(self.family, m)

    def comparable(self, tile: Tile) -> bool:
        """Whether the result of a tile must have the same bits as those of other tiles."""
        return bool(self.grouped) or tile.way != "dequantized"  # `product` gives this way other codes

    def timed(self, tile: Tile) -> object:
        """Run the part of `product` that is timed."""
        return self.product(tile)

    def product(self, tile: Tile) -> Tensor:
        """Return the product of m rows. Call `rows(m)` before."""
        family, x, dtype, how = self.family, self.x, torch.bfloat16, {**self.grouped, "tile": tile}
        if family == "w4a16" and tile.way == "dequantized" and not self.grouped:
            packed = self.tiled.view(self.n, -1)  # the same number of words; their order does not affect the time
            scale = self.scale_w.expand(-1, self.k // 128).bfloat16().contiguous()
            return gemm.dense(x, w4a16.dequantize_int4(packed, scale, None, self.k, dtype))
        if family == "w4a16":
            return w4a16.w4a16(x, None, self.scale_w, None, self.tiled, self.meta, **how)
        if family == "nvfp4a16":
            packed = None if self.grouped else self.stored[0]
            return nvfp4a16.nvfp4a16(x, packed, *self.stored[1:], self.tiled, self.meta, **how)
        if family == "w4a8":
            return w4a8.w4a8(x, self.scale_x, self.tiled, self.meta, self.k, self.n, None, dtype, **how)
        if family == "fp8_block":
            return fp8_block.fp8_block(x, self.scale_x, self.weight, self.scale_w, None, dtype, **how)
        if self.grouped:
            if family == "dense":
                return gemm.dense(x, self.weight, **how)
            return gemm.scaled(x, self.scale_x, self.weight, self.scale_w, None, dtype, **how)
        out = torch.empty(x.shape[0], self.n, dtype=dtype, device=self.device)
        if tile.way == "library":
            return out[: library.product(x, self.weight, out, gemm.by_kernel)]  # shorter where its bits differ
        scales = (None, None) if family == "dense" else (self.scale_x, self.scale_w)
        gemm.run(x, self.weight, *scales, None, out, tile)
        return out


class GroupedProblem(Problem):
    """Random operands of one kernel family and one product of a layer's experts, and its result for m tokens.

    All experts are equally likely. gate_up reads one row per token, down one row per token and expert. In the families
    of the backward pass, `input_grad` and `weight_grad`, n and k are those of the weight in the forward pass.
    """

    section, numbers = "experts", TOKENS

    def __init__(self, family: str, sizes: Sizes, which: str, device: torch.device) -> None:
        self.sizes, self.gathered = sizes, which == "gate_up"
        n, k = (2 * sizes.inner, sizes.hidden) if self.gathered else (sizes.hidden, sizes.inner)
        if family == "input_grad":
            self.gathered = False
        self.shape, width = Shape(n, k, sizes.experts, self.gathered), sizes.experts * n
        super().__init__("dense" if family in BACKWARD else family, width, k, device)
        self.family, self.n = family, n
        if family == "w4a16":
            self.scale_w = (torch.rand(width, k // 128, device=device) * 0.01).bfloat16()
            self.meta = meta_w4a16(self.scale_w, None, width, k, 128, torch.bfloat16)
        if family == "weight_grad":
            self.into = torch.zeros(width, k, device=device)

    @property
    def key(self) -> str:
        return str(self.shape)

    def limit(self, m: int) -> int:
        return m * self.sizes.per_token

    def rows(self, m: int) -> None:
        rows = self.limit(m)
        super().rows(m if self.gathered else rows)
        if self.family in BACKWARD:
            self.dy = torch.randn(rows, self.n, device=self.device, dtype=torch.bfloat16)
        if self.device.type == "meta":
            order = torch.empty(rows, dtype=torch.int32, device=self.device)
            starts = torch.empty(self.sizes.experts + 1, dtype=torch.int32, device=self.device)
            self.groups = Groups(self.sizes.experts, self.sizes.per_token, order, order, starts)
        else:
            chosen = make_routing("balanced", m, self.sizes, self.device).experts
            self.groups = groups_of(chosen, self.sizes.experts, kernels=self.device.type == "cuda")
        self.grouped = {"groups": self.groups, "gathered": self.gathered}

    def candidates(self, m: int) -> list[Tile]:
        return candidates(self.family, cdiv(self.limit(m), self.sizes.experts), True, self.gathered)

    def timed(self, tile: Tile) -> object:
        if self.family == "weight_grad":  # adds to `into`, which `product` has to clear
            return backward.grouped_weight_grad(self.dy, self.x, self.groups, self.gathered, self.into, tile)
        return self.product(tile)

    def product(self, tile: Tile) -> Tensor:
        if self.family == "input_grad":
            return backward.grouped_input_grad(self.dy, self.weight, self.groups, tile=tile)
        if self.family == "weight_grad":
            self.into.zero_()
            self.timed(tile)
            return self.into.clone()
        return super().product(tile)


def dump_tile(tile: Tile | None) -> dict[str, Any] | None:
    """Return the fields of a tile that differ from their defaults."""
    if tile is None:
        return None
    default = Tile(tile.way)
    return {"way": tile.way} | {k: v for k, v in asdict(tile).items() if v != getattr(default, k)}


def format_table(data: dict[str, Any]) -> str:
    """Return a table as JSON text with one shape per line."""
    parts = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in data.items() if key not in SECTIONS]
    for section in SECTIONS:
        families = []
        for family, shapes in data.get(section, {}).items():
            lines = ",\n".join(f"   {json.dumps(shape)}: {json.dumps(tiles)}" for shape, tiles in shapes.items())
            families.append(f"  {json.dumps(family)}: {{\n{lines}\n  }}")
        if families:
            parts.append(f" {json.dumps(section)}: {{\n" + ",\n".join(families) + "\n }")
    return "{\n" + ",\n".join(parts) + "\n}\n"
