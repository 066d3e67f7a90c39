"""`w4a8` and `fp8_block`: the kernels against the plain-torch reference."""

import pytest
import torch
from products import Int4, random, relative_error
from qarl_kernels import fp8_block, reference, w4a8
from qarl_kernels.activation import quantize_activation_fp8, quantize_activation_int8
from qarl_kernels.tuning import Tile
from running import NEEDS_TRITON

pytestmark = [NEEDS_TRITON, pytest.mark.usefixtures("poisoned")]

TILES = [Tile("wide", 16, 32, warps=2), Tile("wide", 64, 64), Tile("wide", 16, 128, warps=8)]
CASES = [(16, 64, 256, 128), (1, 37, 192, 64), (18, 70, 160, 32), (3, 40, 100, None)]


@pytest.mark.parametrize("tile", TILES, ids=lambda tile: f"{tile.block_m}x{tile.block_n}")
@pytest.mark.parametrize(("m", "n", "k", "group"), CASES)
def test_w4a8_is_the_reference_bit_for_bit(device, m, n, k, group, tile) -> None:
    weight = Int4.random(n, k, group, device=device)
    x = random(m, k, seed=5, device=device, dtype=torch.bfloat16)
    bias = random(n, seed=6, device=device, dtype=torch.bfloat16)
    qx, scale_x = quantize_activation_int8(x)
    result = w4a8.w4a8(
        qx, scale_x, weight.tiled(), weight.meta_int8(), k, n, bias, torch.bfloat16, group is None, tile=tile
    )
    assert torch.equal(result, reference.w4a8(x, weight.codes.float(), weight.scale, bias))


def test_w4a8_channel_sums_stay_exact_beyond_the_float32_integers(device) -> None:
    """All codes -8 against all activations 127, K = 17,000: 17.3 million, more than 2^24, in one group."""
    n, k = 16, 17_000
    weight = Int4.random(n, k, None, device=device)
    weight.codes.fill_(-8)
    x = torch.ones(2, k, device=device, dtype=torch.bfloat16)
    qx, scale_x = quantize_activation_int8(x)
    result = w4a8.w4a8(
        *(qx, scale_x, weight.tiled(), weight.meta_int8(), k, n, None, torch.float32, True),
        tile=Tile("wide", 16, 32, warps=2),
    )
    assert torch.equal(result, reference.w4a8(x.float(), weight.codes.float(), weight.scale))


def test_w4a8_refuses_activations_of_another_kind(device) -> None:
    weight = Int4.random(40, 128, 32, device=device)
    x = random(3, 128, seed=5, device=device, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"int8 activations of 128 features, not torch\.bfloat16"):
        w4a8.w4a8(x, x[:, :1].float(), weight.tiled(), weight.meta_int8(), 128, 40, None, torch.bfloat16)


@pytest.mark.parametrize("tile", [Tile("x_first", 64, 64), Tile("w_first", 16, 64), Tile("w_first", 16, 128)])
@pytest.mark.parametrize(("m", "n", "k"), [(64, 128, 256), (5, 200, 304), (1, 72, 576), (3, 129, 64)])
def test_fp8_block_is_the_float64_sum_of_its_blocks(device, m, n, k, tile) -> None:
    x = random(m, k, seed=1, device=device, dtype=torch.bfloat16)
    codes = random(n, k, seed=2, device=device).to(torch.float8_e4m3fn)
    scale = torch.rand(-(-n // 128), -(-k // 128), generator=torch.Generator().manual_seed(3)).to(device)
    bias = random(n, seed=4, device=device, dtype=torch.bfloat16)
    parts = [quantize_activation_fp8(part) for part in x.split(128, dim=1)]
    qx, scale_x = torch.cat([q for q, _ in parts], 1), torch.cat([s for _, s in parts], 1)
    wide = codes.double() * scale.double().repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
    expected = (qx.double() * scale_x.double().repeat_interleave(128, 1)[:, :k]) @ wide.t() + bias.double()
    result = fp8_block.fp8_block(qx, scale_x, codes, scale, bias, torch.float32, tile=tile)
    assert relative_error(result, expected) < 2e-3  # a block is a fast-accumulated chain on Hopper
    assert relative_error(reference.fp8_block(x.float(), codes.float(), scale, bias), expected) < 1e-5


def test_fp8_block_refuses_scales_of_another_shape(device) -> None:
    q = torch.zeros(2, 256, device=device).to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="do not fit each other"):
        scale = torch.ones(2, 2, device=device)
        fp8_block.fp8_block(q, scale, q, scale[:1, :1], None, torch.bfloat16)
