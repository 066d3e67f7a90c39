"""`nvfp4a16`: the reference against float64, the fused kernels against both, and the three ways against each other."""

import ptx
import pytest
import torch
from nvfp4_products import Nvfp4
from pairwise import pairwise
from products import random, relative_error
from qarl_kernels import nvfp4, nvfp4a16, planes, tuning
from qarl_kernels.tuning import Tile
from running import NEEDS_TRITON

pytestmark = [NEEDS_TRITON, pytest.mark.usefixtures("poisoned")]

NARROW, WIDE = Tile("narrow", 16, 32, warps=2), Tile("wide", 16, 64)
TILES = [NARROW, WIDE, Tile("wide", 64, 128, warps=8, tma=True), Tile("wide", 16, 64, tma=True, split=True)]
# (M, N, K): whole, ragged N, K of one and a half tiles, K of less than one, a word of scales with two of them
CASES = [(16, 64, 256), (18, 70, 160), (3, 41, 16), (1, 37, 336)]
ONE_ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11}


def _fused(weight: Nvfp4, x, tile, bias=None, out=torch.float32):
    return nvfp4a16.nvfp4a16(x, *weight.stored(), *weight.tiled(), bias, out, tile=tile)


def _exact(weight: Nvfp4, x, bias=None):
    y = (x.double() @ weight.scaled_codes().double().t()) / weight.global_scale.double()
    return y if bias is None else y + bias.double()


@pytest.mark.parametrize(("case", "tile", "dtype"), pairwise(CASES, [*TILES, Tile("dequantized")], ONE_ROUNDING))
def test_fused_product_is_the_float64_product(device, case, tile, dtype) -> None:
    m, n, k = case
    weight = Nvfp4.random(n, k, device=device)
    x, bias = random(m, k, seed=5, device=device, dtype=dtype), random(n, seed=6, device=device, dtype=dtype)
    expected = _exact(weight, x, bias)
    assert relative_error(_fused(weight, x, tile, bias), expected) < 2**-20  # FP32 sums
    assert relative_error(_fused(weight, x, tile, bias, dtype), expected) < ONE_ROUNDING[dtype]


@pytest.mark.parametrize(("tile", "dtype"), [(NARROW, torch.bfloat16), (WIDE, torch.bfloat16), (WIDE, torch.float16)])
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


def test_a_weight_of_another_width_or_type_is_refused(device) -> None:
    weight = Nvfp4.random(40, 128, device=device)
    x = random(3, 64, seed=5, device=device, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="x has 64 features and the weight 128"):
        nvfp4a16.nvfp4a16(x, *weight.stored(), *weight.tiled())
    with pytest.raises(ValueError, match=r"^weight_packed must be contiguous uint8 \[40, 64\]"):
        nvfp4a16.tile_nvfp4(weight.packed[:, ::2], weight.scale)
    with pytest.raises(ValueError, match=r"^weight_scale must be contiguous float8_e4m3fn"):
        nvfp4a16.tile_nvfp4(weight.packed, weight.scale.float())


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


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the interpreter sums a tile's features in another order")
@pytest.mark.parametrize("tile", TILES[1:], ids=["pointers", "tma", "tma_split"])
def test_how_x_comes_and_whether_a_block_is_split_changes_no_bit(device, tile) -> None:
    """Many times over, because a product that reads a register too late goes wrong only now and then."""
    weight = Nvfp4.random(640, 2048, device=device)
    x = random(300, 2048, seed=5, device=device, dtype=torch.bfloat16)
    expected = _fused(weight, x, NARROW, out=torch.bfloat16)
    for _ in range(20):
        assert torch.equal(_fused(weight, x, tile, out=torch.bfloat16), expected)
