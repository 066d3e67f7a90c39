"""`nvfp4a16`: every code under every scale, and all ways against each other. More: `test_product_kernels.py`."""

import ptx
import pytest
import torch
from kernel_harness import NEEDS_TRITON
from nvfp4_products import Nvfp4
from products import random
from qarl_kernels import nvfp4, nvfp4a16, planes, tuning
from qarl_kernels.tuning import Tile

pytestmark = [NEEDS_TRITON, pytest.mark.usefixtures("poisoned")]

NARROW, WIDE = Tile("narrow", 16, 32, warps=2), Tile("wide", 16, 64)
TILES = [NARROW, WIDE, Tile("wide", 64, 128, warps=8, tma=True), Tile("wide", 16, 64, tma=True, split=True)]


def _fused(weight: Nvfp4, x, tile, bias=None, out=torch.float32):
    return nvfp4a16.nvfp4a16(x, *weight.stored(), *weight.tiled(), bias, out, tile=tile)


EVERY = [(NARROW, torch.bfloat16), (WIDE, torch.bfloat16), (WIDE, torch.float16)]
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


def test_the_tiled_scales_are_the_stored_bytes_in_columns(device) -> None:
    weight = Nvfp4.random(37, 336, device=device)
    _, scales = weight.tiled()
    assert scales.dtype == torch.int32 and scales.shape == (6, 48)
    stored = weight.scale.view(torch.uint8).int()
    for row, group in ((0, 0), (5, 7), (36, 20), (3, 13)):
        assert (scales[group // 4, row] >> 8 * (group % 4)) & 0xFF == stored[row, group]
    assert not scales[:, 37:].any() and not (scales[5] >> 8).any()  # group 20 is the last of 336 features


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_assembly_makes_code_times_scale_of_every_code_and_scale(dtype) -> None:
    """All finite scales of a byte, eight at a time; each with sixteen codes: two words at a time hold a code twice."""
    text = planes._nvfp4_asm(half=dtype == torch.float16)
    codes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    codes = torch.cat([codes, -codes])
    scales = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    for first in range(0, 0x7F - 8, 7):
        bytes_ = range(first, first + 8)
        low, high = (sum(byte << 8 * i for i, byte in enumerate(four)) for four in (bytes_[:4], bytes_[4:]))
        for code in range(16):
            words = code * 0x11111111, (15 - code) * 0x11111111
            done = ptx.run(text, dict(enumerate((*words, low, low, high, high), 8)))
            pair = torch.stack([codes[code], codes[15 - code]])
            for j, byte in enumerate(bytes_):
                assert torch.equal(ptx.floats(done[f"${j}"], dtype).double(), pair * scales[byte]), (code, byte)
    word = 0x76543210
    done = ptx.run(text, dict(enumerate((word, word, *[0x38383838] * 4), 8)))  # 0x38 is 1.0: each nibble in its plane
    assert [ptx.floats(done[f"${j}"], dtype)[0].item() for j in range(8)] == codes[:8].tolist()
