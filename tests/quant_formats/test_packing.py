"""The packed layout against the library's `pack_to_int32` and `unpack_from_int32`."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from qarl_formats.packing import pack_int4, pack_zero_points, unpack_int4, unpack_zero_points

SHAPES = [(1, 8), (3, 64), (5, 13), (16, 1), (8, 7), (24, 256)]


def _codes(shape):
    return torch.randint(-8, 8, shape, dtype=torch.int8, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("shape", SHAPES)
def test_packed_words_equal_the_library(shape):
    assert torch.equal(pack_int4(_codes(shape)), pack_to_int32(_codes(shape), 4))


@pytest.mark.parametrize("shape", SHAPES)
def test_unpacking_the_librarys_words_gives_the_codes(shape):
    assert torch.equal(unpack_int4(pack_to_int32(_codes(shape), 4), shape[1]), _codes(shape))


@pytest.mark.parametrize("shape", SHAPES)
def test_the_library_unpacks_our_words(shape):
    assert torch.equal(unpack_from_int32(pack_int4(_codes(shape)), 4, torch.Size(shape)), _codes(shape))


@pytest.mark.parametrize("shape", SHAPES)
def test_packed_zero_points_equal_the_library(shape):
    packed = pack_zero_points(_codes(shape))
    assert torch.equal(packed, pack_to_int32(_codes(shape), 4, packed_dim=0))
    assert packed.is_contiguous()


@pytest.mark.parametrize("shape", SHAPES)
def test_zero_points_come_back(shape):
    assert torch.equal(unpack_zero_points(pack_zero_points(_codes(shape)), shape[0]), _codes(shape))


def test_first_code_is_in_the_lowest_bits():
    codes = torch.tensor([[-7, -8, -8, -8, -8, -8, -8, 7]], dtype=torch.int8)
    assert pack_int4(codes).tolist() == [[0xF0000001 - 2**32]]


def test_packing_leaves_the_codes_as_they_were():
    codes = _codes((3, 64))
    pack_int4(codes)
    assert torch.equal(codes, _codes((3, 64)))


def test_unpacking_leaves_the_words_as_they_were():
    packed = pack_int4(_codes((3, 64)))
    unpack_int4(packed, 64)
    assert torch.equal(packed, pack_int4(_codes((3, 64))))
