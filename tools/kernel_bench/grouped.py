"""What `tools/tune_kernels.py --experts` times: grouped products of the experts of a layer, and of their backward."""

from __future__ import annotations

import torch
from qarl_kernels import fp8_block, gemm, nvfp4a16, w4a8, w4a16
from qarl_kernels.moe import backward
from qarl_kernels.moe.dispatch import groups_of
from qarl_kernels.moe.groups import Groups
from qarl_kernels.tile import meta_w4a16
from qarl_kernels.tuning import BACKWARD, Shape, Tile, lookup
from torch import Tensor

from kernel_bench.experts import Sizes, make_routing
from kernel_bench.grouped_candidates import grouped_candidates
from kernel_bench.tuned import Problem

PRODUCTS = ("gate_up", "down")
TOKENS = (1, 4, 16, 64, 128, 256, 512, 1024, 4096, 16_384)
BACKWARD_TOKENS = (1024, 4096, 16_384)  # a training forward has no fewer


class GroupedProblem(Problem):
    """Random operands of a family and one of a layer's two products, and the product of m tokens with a given tile.

    Tokens choose experts that are all as likely. gate_up reads a row a token, down a row for each of its experts. In a
    backward, `input_grad` and `weight_grad`, n and k are those of the forward's weight.
    """

    section = "experts"

    def __init__(self, family: str, sizes: Sizes, which: str, device: torch.device) -> None:
        self.sizes, self.gathered = sizes, which == "gate_up"
        n, k = (2 * sizes.inner, sizes.hidden) if self.gathered else (sizes.hidden, sizes.inner)
        if family == "input_grad":
            self.gathered = False
        self.shape, width = Shape(n, k, sizes.experts, self.gathered), sizes.experts * n
        super().__init__("dense" if family in BACKWARD else family, width, k, device)
        self.family, self.n = family, n
        if family == "w4a16":
            self.scale = (torch.rand(width, k // 128, device=device) * 0.01).bfloat16()
            self.meta = meta_w4a16(self.scale, None, width, k, 128, torch.bfloat16)
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

    def known(self, m: int) -> Tile:
        return self._tile(self.family)

    def _tile(self, family: str) -> Tile:
        given = {"groups": self.groups, "gathered": self.gathered}
        return lookup(family, self.n, self.k, self.groups.rows, self.x, **given)

    def candidates(self, m: int) -> list[Tile]:
        return grouped_candidates(self.family, self.limit(m), self.sizes.experts, self.gathered)

    def comparable(self, tile: Tile) -> bool:
        return True

    def timed(self, tile: Tile) -> object:
        if self.family == "weight_grad":  # adds to what is there, which `product` has to clear
            return backward.grouped_weight_grad(self.dy, self.x, self.groups, self.gathered, self.into, tile)
        return self.product(tile)

    def product(self, tile: Tile) -> Tensor:
        family, x = self.family, self.x
        if family == "input_grad":
            return backward.grouped_input_grad(self.dy, self.weight, self.groups, tile=tile)
        if family == "weight_grad":
            self.into.zero_()
            self.timed(tile)
            return self.into.clone()
        grouped = {"groups": self.groups, "gathered": self.gathered, "tile": tile}
        if family == "dense":
            return gemm.dense(x, self.weight, **grouped)
        if family == "w4a16":
            return w4a16.w4a16(x, None, self.scale, None, self.tiled, self.meta, **grouped)
        if family == "nvfp4a16":
            return nvfp4a16.nvfp4a16(x, None, *self.stored[1:], self.tiled, self.meta, **grouped)
        if family == "w4a8":
            weight = self.tiled, self.meta, self.k, self.n
            return w4a8.w4a8(x, self.scale_x, *weight, None, torch.bfloat16, **grouped)
        products = {"w8a8": gemm.scaled, "fp8": gemm.scaled, "fp8_block": fp8_block.fp8_block}
        return products[family](x, self.scale_x, self.weight, self.scale_w, None, torch.bfloat16, **grouped)
