"""What only a GPU can show of nvfp4a16: one function on every tile and for every number of rows, and exact decoding."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from qarl_formats import nvfp4 as formats
from qarl_kernels import gemm, nvfp4, nvfp4_weights, nvfp4a16
from qarl_kernels.tuning import Tile

sys.path.insert(0, str(Path(__file__).parent.parent / "kernels"))
from nvfp4_products import Nvfp4
from products import random, relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; torch sees none"),
]

CUDA = torch.device("cuda")
BF16 = torch.bfloat16
# (N, K): SmolLM2's, one with K of no whole tile, a large one, the longest K of Llama-3-70B
SHAPES = [(576, 1536), (1536, 576), (1000, 1008), (6144, 4096), (1024, 28_672)]
ROWS = [1, 2, 7, 8, 9, 15, 16, 17, 33, 64, 65, 128, 129, 255, 256, 257, 1000, 1024, 1025, 4096, 5000]
MOST = 8192
TILES = [
    Tile("narrow", 8, 32, warps=2, stages=4),
    Tile("narrow", 16, 32, warps=2, stages=4),
    Tile("narrow", 32, 64, warps=4, stages=3),
    Tile("wide", 16, 64, warps=4, stages=3),
    Tile("wide", 64, 64, warps=4, stages=4),
    Tile("wide", 64, 128, warps=8, stages=3),
    Tile("wide", 128, 64, warps=4, stages=2),
]


@pytest.fixture(autouse=True)
def full_float32_products():
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before
    torch.cuda.empty_cache()


def master(n: int, k: int) -> torch.Tensor:
    """float32 (N, K) whose groups are of many sizes."""
    groups = torch.rand(n, k // 16, generator=torch.Generator().manual_seed(4)).mul_(6).neg_().exp_()
    return random(n, k, seed=3, device="cpu") * groups.repeat_interleave(16, 1)


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_a_row_has_the_same_bits_in_every_batch_and_place(n: int, k: int) -> None:
    weight = Nvfp4.random(n, k, device=CUDA)
    tiled = weight.tiled()
    x = random(MOST, k, seed=7, device=CUDA, dtype=BF16)
    whole = nvfp4a16.nvfp4a16(x, *weight.stored(), *tiled)
    expected = nvfp4.nvfp4a16(x[::37].float(), weight.scaled_codes(), weight.global_scale)
    assert relative_error(whole[::37], expected) < 5e-3
    for rows in ROWS:
        for start in (0, 1, 37, MOST - rows):
            part = nvfp4a16.nvfp4a16(x[start : start + rows], *weight.stored(), *tiled)
            assert torch.equal(part, whole[start : start + rows]), f"{rows} rows from {start}"
    shuffled = torch.randperm(MOST, generator=torch.Generator().manual_seed(1)).to(CUDA)
    assert torch.equal(nvfp4a16.nvfp4a16(x[shuffled], *weight.stored(), *tiled), whole[shuffled])


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_every_tile_gives_the_same_bits(dtype: torch.dtype) -> None:
    """Many times over, because a product that reads a buffer too late goes wrong only now and then."""
    n, k = 1152, 4096
    weight = Nvfp4.random(n, k, device=CUDA)
    tiled = weight.tiled()
    x, bias = random(700, k, seed=7, device=CUDA, dtype=dtype), random(n, seed=8, device=CUDA, dtype=dtype)
    whole = nvfp4a16.nvfp4a16(x, *weight.stored(), *tiled, bias, tile=Tile("dequantized"))
    for tile in TILES:
        for _ in range(20):
            y = nvfp4a16.nvfp4a16(x, *weight.stored(), *tiled, bias, tile=tile)
            assert torch.equal(y, whole), str(tile)


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("tile", TILES, ids=lambda tile: f"{tile.way}_{tile.block_m}_{tile.block_n}")
def test_every_code_under_every_scale_is_exact(tile: Tile, dtype: torch.dtype) -> None:
    weight = Nvfp4.every_code_and_scale(CUDA)
    x = torch.eye(weight.shape[1], device=CUDA, dtype=dtype)
    y = nvfp4a16.nvfp4a16(x, *weight.stored(), *weight.tiled(), out_dtype=torch.float32, tile=tile)
    assert torch.equal(y, weight.scaled_codes().t())


def test_under_a_global_scale_that_is_a_power_of_two_it_is_dense_on_the_dequantized_weight() -> None:
    weight = Nvfp4.random(1000, 2048, device=CUDA)
    weight.global_scale = torch.tensor([4096.0], device=CUDA)
    wide = nvfp4_weights.dequantize_nvfp4(*weight.stored(), BF16)
    x = random(5000, 2048, seed=3, device=CUDA, dtype=BF16)
    for rows in (1, 16, 64, 300, 5000):
        y = nvfp4a16.nvfp4a16(x[:rows], *weight.stored(), *weight.tiled())
        assert torch.equal(y, gemm.dense(x[:rows], wide))


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_masters_give_the_codes_and_scales_that_a_cpu_computes(n: int, k: int) -> None:
    weight = master(n, k)
    divisor = formats.global_scale_of([formats.absmax_of(weight)])
    expected = formats.quantize_nvfp4(weight, divisor)
    on_device = weight.to(CUDA)
    assert torch.equal(formats.global_scale_of([formats.absmax_of(on_device)]).cpu(), divisor)
    packed, scale, bad = nvfp4_weights.quantize_nvfp4(on_device, divisor.to(CUDA))
    assert bad.item() == 0 and torch.equal(packed.cpu(), expected[0])
    assert torch.equal(scale.cpu().view(torch.uint8), expected[1].view(torch.uint8))
    plain = formats.quantize_nvfp4(on_device, divisor.to(CUDA))
    assert torch.equal(packed, plain[0]) and torch.equal(scale.view(torch.uint8), plain[1].view(torch.uint8))
    for dtype in (BF16, torch.float16, torch.float32):
        values = nvfp4_weights.dequantize_nvfp4(packed, scale, divisor.to(CUDA), dtype)
        assert torch.equal(values.cpu(), nvfp4.dequantized_nvfp4(*expected, divisor, dtype))


def test_a_captured_product_replays() -> None:
    weight = Nvfp4.random(576, 1536, device=CUDA)
    tiled = weight.tiled()
    for rows in (9, 64, 300):
        x = random(rows, 1536, seed=1, device=CUDA, dtype=BF16)
        nvfp4a16.nvfp4a16(x, *weight.stored(), *tiled)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = nvfp4a16.nvfp4a16(x, *weight.stored(), *tiled)
        x.copy_(random(rows, 1536, seed=2, device=CUDA, dtype=BF16))
        graph.replay()
        assert torch.equal(y, nvfp4a16.nvfp4a16(x, *weight.stored(), *tiled))
