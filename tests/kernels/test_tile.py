"""The tiled form of int4 weights against its definition, word by word."""

import pytest
import torch
from kernel_harness import NEEDS_TRITON, assert_same
from qarl_formats.packing import pack_int4
from qarl_kernels.tile import tile_int4, untile_int4

pytestmark = [NEEDS_TRITON, pytest.mark.usefixtures("poisoned")]

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
    tiled = tile_int4(pack_int4(codes).to(device), k)
    packed = untile_int4(_tiled(codes).to(device), n, k)
    assert_same(tiled, _tiled(codes))
    assert_same(packed, pack_int4(codes))
