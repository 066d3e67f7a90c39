"""Grouped INT8 and FP8 products: each row against the product with its expert's weight alone, and float64."""

from __future__ import annotations

import mixtures
import pytest
import torch
from products import integers, random, relative_error
from qarl_kernels import fp8_block, gemm, reference
from qarl_kernels.activation import quantize_activation_fp8, quantize_activation_int8
from qarl_kernels.launch import INTERPRETED
from qarl_kernels.tuning import Tile
from torch import Tensor

pytestmark = [
    pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="needs TRITON_INTERPRET=1 or a GPU"),
    pytest.mark.usefixtures("poisoned"),
]

EXPERTS, TOKENS = 3, 8
TILES = [Tile("w_first", 16, 64, 64), Tile("x_first", 64, 128, 64, warps=8), Tile("x_first", 64, 64, 32)]
# N, K of an expert, whether x is gathered; the last one comes by pointers
SHAPES = [(72, 160, True), (72, 160, False), (30, 100, True)]


def _x(k: int, gathered: bool, device: torch.device) -> Tensor:
    return random(TOKENS * (1 if gathered else 2), k, seed=1, device=device, dtype=torch.bfloat16)


def _part(tensor: Tensor, expert: int) -> Tensor:
    return tensor.chunk(EXPERTS)[expert]


def _scale(rows: int, device: torch.device) -> Tensor:
    return (torch.rand(rows, 1, generator=torch.Generator().manual_seed(3)) * 0.01).bfloat16().to(device)


@pytest.mark.parametrize("tile", TILES, ids=lambda tile: f"{tile.way}_{tile.block_n}")
@pytest.mark.parametrize(("n", "k", "gathered"), SHAPES)
def test_w8a8_is_the_reference_of_each_rows_expert_bit_for_bit(device, n: int, k: int, gathered: bool, tile) -> None:
    given = mixtures.grouped(TOKENS, 2, EXPERTS, device)
    x, codes = _x(k, gathered, device), integers(-128, 127, EXPERTS * n, k, seed=2, device=device)
    scale = _scale(len(codes), device)
    grouped = {"groups": given, "gathered": gathered, "tile": tile}
    y = gemm.w8a8(*quantize_activation_int8(x), codes, scale, None, torch.bfloat16, **grouped)

    def expected(rows: Tensor, expert: int) -> Tensor:
        return reference.w8a8(rows, _part(codes, expert).float(), _part(scale, expert))

    assert torch.equal(y, mixtures.by_expert(given, gathered, x, expected))


@pytest.mark.parametrize("tile", TILES, ids=lambda tile: f"{tile.way}_{tile.block_n}")
@pytest.mark.parametrize(("n", "k", "gathered"), SHAPES)
def test_fp8_is_the_product_of_each_expert_alone_bit_for_bit(device, n: int, k: int, gathered: bool, tile) -> None:
    if device.type == "cuda" and k % 16:
        pytest.skip("FP8 rows of this K have no 16-byte stride; the interpreter covers the pointer path")
    given = mixtures.grouped(TOKENS, 2, EXPERTS, device)
    x, codes = _x(k, gathered, device), random(EXPERTS * n, k, seed=2, device=device)
    codes, scale = codes.to(torch.float8_e4m3fn), _scale(len(codes), device)
    grouped = {"groups": given, "gathered": gathered, "tile": tile}
    y = gemm.fp8(*quantize_activation_fp8(x), codes, scale, None, torch.bfloat16, **grouped)

    def alone(rows: Tensor, expert: int) -> Tensor:
        own = _part(codes, expert), _part(scale, expert)
        return gemm.fp8(*quantize_activation_fp8(rows), *own, None, torch.bfloat16, tile=tile)

    def exact(rows: Tensor, expert: int) -> Tensor:
        qx, s_x = quantize_activation_fp8(rows)
        return qx.double() @ _part(codes, expert).double().t() * _part(scale, expert).double().t() * s_x.double()

    assert torch.equal(y, mixtures.by_expert(given, gathered, x, alone))
    assert relative_error(y, mixtures.by_expert(given, gathered, x, exact)) < 5e-3  # as `gemm.fp8`


@pytest.mark.parametrize("tile", [Tile("w_first", 16, 64), Tile("x_first", 64, 128, warps=8)], ids=lambda t: t.way)
@pytest.mark.parametrize(("k", "gathered"), [(160, True), (160, False), (100, True)])
def test_fp8_block_is_the_product_of_each_expert_alone_bit_for_bit(device, k: int, gathered: bool, tile) -> None:
    if device.type == "cuda" and k % 16:
        pytest.skip("FP8 rows of this K have no 16-byte stride; the interpreter covers the pointer path")
    n, given = 128, mixtures.grouped(TOKENS, 2, EXPERTS, device)
    x, codes = _x(k, gathered, device), random(EXPERTS * n, k, seed=2, device=device)
    codes, scale = codes.to(torch.float8_e4m3fn), random(EXPERTS, -(-k // 128), seed=4, device=device).bfloat16()

    def quantized(rows: Tensor) -> tuple[Tensor, Tensor]:
        parts = [quantize_activation_fp8(part) for part in rows.split(128, 1)]
        return tuple(torch.cat(side, 1) for side in zip(*parts, strict=True))  # type: ignore[return-value]

    grouped = {"groups": given, "gathered": gathered, "tile": tile}
    y = fp8_block.fp8_block(*quantized(x), codes, scale, None, torch.bfloat16, **grouped)

    def alone(rows: Tensor, expert: int) -> Tensor:
        parts = _part(codes, expert), _part(scale, expert).float()
        return fp8_block.fp8_block(*quantized(rows), *parts, None, torch.bfloat16, tile=tile)

    assert torch.equal(y, mixtures.by_expert(given, gathered, x, alone))

    def exact(rows: Tensor, expert: int) -> Tensor:
        return reference.fp8_block(rows, _part(codes, expert).float(), _part(scale, expert))

    assert relative_error(y, mixtures.by_expert(given, gathered, x, exact)) < 5e-3


@pytest.mark.parametrize("product", [gemm.w8a8, gemm.fp8, fp8_block.fp8_block], ids=["w8a8", "fp8", "fp8_block"])
def test_what_does_not_fit_is_refused(device, product) -> None:
    given = mixtures.grouped(4, 2, EXPERTS, device)
    scale = torch.ones(4, 1, device=device)
    x, weight = torch.zeros(4, 96, device=device), torch.zeros(EXPERTS * 128, 96, device=device)
    with pytest.raises(ValueError, match=r"needs .* codes, not torch.float32"):
        product(x, scale, weight, scale, None, torch.bfloat16, groups=given, gathered=True)
    kind = torch.int8 if product is gemm.w8a8 else torch.float8_e4m3fn
    with pytest.raises(ValueError, match="x has 4 rows, but these groups need 8, one per sorted pair"):
        product(x.to(kind), scale, weight.to(kind), torch.ones(5, 1), None, torch.bfloat16, groups=given)


def test_experts_that_would_share_a_scale_are_refused(device) -> None:
    x, weight = (torch.zeros(rows, 96, device=device).to(torch.float8_e4m3fn) for rows in (4, EXPERTS * 40))
    given = {"groups": mixtures.grouped(4, 2, EXPERTS, device), "gathered": True}
    with pytest.raises(ValueError, match="experts of 40 output features would share scales, which span 128"):
        fp8_block.fp8_block(x, torch.ones(4, 1), weight, torch.ones(2, 1), None, torch.bfloat16, **given)
