"""`nvfp4a16`: every code under every scale, and all ways against each other. More: `test_product_kernels.py`."""

import pytest
import torch
from kernel_harness import NEEDS_TRITON
from nvfp4_products import Nvfp4
from products import random
from qarl_kernels import nvfp4, nvfp4a16, tuning
from qarl_kernels.tuning import Tile

pytestmark = [NEEDS_TRITON, pytest.mark.usefixtures("poisoned")]

NARROW, WIDE = Tile("narrow", 16, 32, warps=2), Tile("wide", 16, 64)
TILES = [NARROW, WIDE, Tile("wide", 64, 128, warps=8, tma=True), Tile("wide", 16, 64, tma=True, split=True)]


def _fused(weight: Nvfp4, x, tile, bias=None, out=torch.float32):
    return nvfp4a16.nvfp4a16(x, *weight.stored(), *weight.tiled(), bias, out, tile=tile)


EVERY = [(NARROW, torch.bfloat16), (WIDE, torch.float16)]
if torch.cuda.is_available():
    LARGE = [Tile("narrow", 32, 64, stages=3), Tile("wide", 64, 128, warps=8), Tile("wide", 128, 64, stages=2)]
    EVERY = [(tile, dtype) for tile in (*TILES, *LARGE) for dtype in (torch.bfloat16, torch.float16)]


@pytest.mark.parametrize(("tile", "dtype"), EVERY)
def test_every_code_and_scale_in_the_fused_kernel_is_exact(device, dtype, tile) -> None:
    """One-hot rows of x read single weights out of the product, here every code under every e4m3 scale."""
    weight = Nvfp4.every_code_and_scale(device)
    x = torch.eye(weight.shape[1], device=device, dtype=dtype)
    assert torch.equal(_fused(weight, x, tile), weight.scaled_codes().t())


def test_where_sums_are_exact_every_way_and_the_reference_have_the_same_bits(device) -> None:
    """Small integers for x: float32 holds every partial sum, whatever the order."""
    weight = Nvfp4.random(37, 208, device=device, scales=torch.tensor([0.5, 1.0, 2.0, 8.0]))
    x = torch.randint(-4, 5, (17, 208), generator=torch.Generator().manual_seed(3)).to(device, torch.bfloat16)
    bias = random(37, seed=6, device=device, dtype=torch.bfloat16)
    expected = nvfp4.nvfp4a16(x, weight.scaled_codes(), weight.global_scale, bias)
    for tile in (*TILES, Tile("dequantized")):
        assert torch.equal(_fused(weight, x, tile, bias, torch.bfloat16), expected), tile


def test_packed_codes_come_back_from_the_tiles_where_they_were_left_out(device) -> None:
    weight = Nvfp4.random(37, 80, device=device)
    tiled = weight.tiled()
    assert torch.equal(nvfp4a16.untile_nvfp4(tiled[0], 37, 80), weight.packed)
    x = random(300, 80, seed=5, device=device, dtype=torch.bfloat16)
    assert tuning.lookup("nvfp4a16", 37, 80, 300, x).way == "dequantized"
    y = nvfp4a16.nvfp4a16(x, None, weight.scale, weight.global_scale, *tiled)
    assert torch.equal(y, nvfp4a16.nvfp4a16(x, *weight.stored(), *tiled))
