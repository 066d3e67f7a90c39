"""The packed layout against the library's `pack_to_int32` and `unpack_from_int32`."""

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from qarl_formats.packing import pack_int4, pack_zero_points, unpack_int4, unpack_zero_points

SHAPES = [(1, 8), (3, 64), (5, 13), (16, 1), (8, 7), (24, 256)]


def _codes(shape):
    return torch.randint(-8, 8, shape, dtype=torch.int8, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("shape", SHAPES)
def test_words_of_codes_and_of_zero_points_are_the_librarys_and_come_back(shape):
    codes = _codes(shape)
    packed = pack_int4(codes)
    assert torch.equal(packed, pack_to_int32(_codes(shape), 4)) and torch.equal(codes, _codes(shape))
    assert torch.equal(unpack_int4(packed, shape[1]), codes)
    assert torch.equal(unpack_from_int32(packed, 4, torch.Size(shape)), codes), "unpacking left the words as they were"
    zero_points = pack_zero_points(codes)
    assert torch.equal(zero_points, pack_to_int32(codes, 4, packed_dim=0)) and zero_points.is_contiguous()
    assert torch.equal(unpack_zero_points(zero_points, shape[0]), codes)
