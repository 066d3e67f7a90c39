"""The tiled form of int4 weights against its definition, word by word."""

import pytest
import torch
from exact import assert_same, poisoned_outputs
from pairwise import pairwise
from qarl_formats.packing import pack_int4, pack_zero_points
from qarl_kernels.tile import meta_w4a8, meta_w4a16, tile_int4, untile_int4
from running import NEEDS_TRITON

pytestmark = NEEDS_TRITON

SHAPES = [(16, 128), (5, 96), (37, 1152), (17, 100), (1, 1), (40, 36)]


def _codes(n: int, k: int) -> torch.Tensor:
    return torch.randint(-8, 8, (n, k), generator=torch.Generator().manual_seed(n * k), dtype=torch.int8)


def _tiled(codes: torch.Tensor) -> torch.Tensor:
    """Nibble j of [a, b, r, w] is the stored nibble of row 16a + r, column 128b + 16j + w; 8 beyond the weight."""
    n, k = codes.shape
    rows, columns = -(-n // 16), -(-k // 128)
    nibbles = torch.full((16 * rows, 128 * columns), 8, dtype=torch.int64)
    nibbles[:n, :k] = codes.long() + 8
    words = torch.zeros(rows, columns, 16, 16, dtype=torch.int64)
    for a in range(rows):
        for b in range(columns):
            for j in range(8):
                first = 128 * b + 16 * j
                words[a, b] |= nibbles[16 * a : 16 * (a + 1), first : first + 16] << (4 * j)
    return words.to(torch.int32)


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_tiles_are_as_defined_and_untile_is_the_inverse(n, k, device):
    codes = _codes(n, k)
    with poisoned_outputs():
        tiled = tile_int4(pack_int4(codes).to(device), k)
        packed = untile_int4(_tiled(codes).to(device), n, k)
    assert_same(tiled, _tiled(codes))
    assert_same(packed, pack_int4(codes))


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int16).long() & 0xFFFF


def _group_of(entry: int, k: int, group: int | None) -> int | None:
    """The group that an entry of `meta` describes; None beyond the weight."""
    if group is None:
        return 0
    parts = 128 // group if group < 128 else 1
    column = entry // parts * 128 + entry % parts * (128 // parts)
    return column // group if column < k else None


META_SHAPES = [(37, 96, 32), (5, 192, 64), (70, 1408, 128), (16, 1408, 32), (17, 100, None), (40, 300, None)]


@pytest.mark.parametrize(
    ("shape", "symmetric", "dtype"), pairwise(META_SHAPES, [True, False], [torch.bfloat16, torch.float16])
)
def test_meta_w4a16_is_as_defined(shape, symmetric, dtype, device):
    n, k, group = shape
    groups = 1 if group is None else k // group
    generator = torch.Generator().manual_seed(n)
    scale = torch.rand(n, groups, generator=generator).to(dtype)
    scale[0, 0] = torch.finfo(dtype).smallest_normal / 4
    zero_points = torch.zeros(n, groups, dtype=torch.int8)
    if not symmetric:
        zero_points = torch.randint(-8, 8, (n, groups), generator=generator, dtype=torch.int8)
    packed = None if symmetric else pack_zero_points(zero_points).to(device)
    with poisoned_outputs():
        meta = meta_w4a16(scale.to(device), packed, n, k, group, dtype).cpu()

    base = 128.0 if dtype == torch.bfloat16 else 1024.0
    entries = -(-k // 128) * (128 // group if group else 1)
    expected = torch.empty(entries, -(-n // 16) * 16, dtype=torch.int64)
    expected[:] = _bits(torch.tensor([-(base + 8)], dtype=dtype)) << 16
    for entry in range(entries):
        g = _group_of(entry, k, group)
        if g is not None:
            offset = (-(base + zero_points[:, g].float() + 8)).to(dtype)
            expected[entry, :n] = _bits(scale[:, g].contiguous()) | (_bits(offset) << 16)
    assert_same(meta, expected.to(torch.int32))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_meta_w4a16_gives_the_dequantized_weight_in_its_own_arithmetic(dtype, device):
    scale = torch.rand(16, 1, generator=torch.Generator().manual_seed(0)).to(dtype)
    zero_points = torch.arange(-8, 8, dtype=torch.int8)[:, None]
    meta = meta_w4a16(scale.to(device), pack_zero_points(zero_points).to(device), 16, 128, 128, dtype).cpu()[0]
    low = (meta & 0xFFFF).to(torch.int16).view(dtype)
    high = (meta >> 16).to(torch.int16).view(dtype)
    nibbles = torch.arange(16)
    base = 128.0 if dtype == torch.bfloat16 else 1024.0
    weight = ((base + nibbles).to(dtype)[None, :] + high[:, None]) * low[:, None]
    assert torch.equal(weight, ((nibbles - 8 - zero_points).float() * scale.float()).to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("n", "k", "group"), META_SHAPES)
def test_meta_w4a8_is_as_defined(n, k, group, dtype, device):
    scale = torch.rand(n, 1 if group is None else k // group, generator=torch.Generator().manual_seed(n)).to(dtype)
    scale[0, 0] = torch.finfo(dtype).smallest_normal / 4
    with poisoned_outputs():
        meta = meta_w4a8(scale.to(device), n, k, group)
    expected = torch.zeros(-(-k // 128) * (128 // group if group else 1), -(-n // 16) * 16)
    for entry in range(len(expected)):
        g = _group_of(entry, k, group)
        if g is not None:
            expected[entry, :n] = scale[:, g].float()
    assert_same(meta, expected)


def test_no_rows_give_no_tiles(device):
    tiled = tile_int4(torch.zeros(0, 4, dtype=torch.int32, device=device), 32)
    assert tiled.shape == (0, 1, 16, 16)
    assert untile_int4(tiled, 0, 32).shape == (0, 4)


def test_tensors_that_do_not_fit_are_errors_that_name_them(device):
    packed = torch.zeros(2, 4, dtype=torch.int32, device=device)
    scale = torch.ones(2, 1, dtype=torch.bfloat16, device=device)
    with pytest.raises(ValueError, match=r"^packed must be contiguous int32 \[2, 8\], not torch.int32 \[2, 4\]; pass"):
        tile_int4(packed, 64)
    with pytest.raises(ValueError, match=r"^tiled must be contiguous int32 \[1, 1, 16, 16\]"):
        untile_int4(packed, 2, 32)
    with pytest.raises(ValueError, match=r"^scale must be contiguous float16 \[2, 1\], not torch.bfloat16"):
        meta_w4a16(scale, None, 2, 32, 32, torch.float16)
    with pytest.raises(ValueError, match=r"^dtype must be bfloat16 or float16, not torch.float32"):
        meta_w4a16(scale, None, 2, 32, 32, torch.float32)
    with pytest.raises(ValueError, match=r"^scale must be contiguous .* \[2, 2\]"):
        meta_w4a8(scale, 2, 64, 32)
