"""NVFP4 codes and scales against the compressed-tensors library, bit for bit, and against their definition."""

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.quantization.quant_scheme import NVFP4A16
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from hard_weights import NVFP4, normal
from qarl_formats.nvfp4 import absmax_of, global_scale_of, pack_e2m1, quantize_nvfp4
from qarl_kernels.nvfp4 import dequantized_nvfp4, e2m1_values, scaled_codes
from torch import Tensor

LIBRARY = QuantizationScheme(targets=["Linear"], **NVFP4A16)
COMPRESSOR = BaseCompressor.get_value_from_registry("nvfp4-pack-quantized")


def library_tensors(weight: Tensor, global_scale: Tensor | None = None) -> dict[str, Tensor]:
    """What the library stores; its rounding, which it compiles for speed, runs as plain torch."""
    groups = weight.unflatten(-1, (-1, 16))
    if global_scale is None:
        global_scale = generate_gparam(weight.amin(), weight.amax())
    scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), LIBRARY.weights, global_scale)
    state = {"weight": weight, "weight_scale": scale, "weight_global_scale": global_scale}
    with torch.compiler.set_stance("force_eager"):
        return COMPRESSOR.compress(state, LIBRARY)


def our_tensors(weight: Tensor) -> dict[str, Tensor]:
    divisor = global_scale_of([absmax_of(weight)])
    packed, scale = quantize_nvfp4(weight, divisor)
    return {"weight_packed": packed, "weight_scale": scale, "weight_global_scale": divisor}


@pytest.mark.parametrize("case", NVFP4)
def test_stored_and_dequantized_tensors_equal_the_library(case):
    expected, tensors = library_tensors(NVFP4[case]), our_tensors(NVFP4[case])
    assert tensors.keys() == expected.keys()
    for suffix, tensor in tensors.items():
        want = expected[suffix]
        assert (tensor.dtype, tensor.shape) == (want.dtype, want.shape), suffix
        assert torch.equal(tensor.view(torch.uint8), want.view(torch.uint8)), suffix
    expected = COMPRESSOR.decompress(tensors, LIBRARY)["weight"]
    ours = dequantized_nvfp4(*tensors.values(), torch.bfloat16)
    assert expected.dtype == torch.bfloat16 and torch.equal(ours.view(torch.int16), expected.view(torch.int16))


@pytest.mark.parametrize("factor", [0.3, 1.0, 700.0])
def test_stored_tensors_equal_the_library_under_a_given_global_scale(factor):
    """A larger absmax's, which a layer may share, or a smaller one's, whose scales are clamped to 448."""
    divisor = generate_gparam(torch.tensor(-factor), torch.tensor(0.0))
    expected = library_tensors(normal(3), divisor)
    packed, scale = quantize_nvfp4(normal(3), divisor)
    assert torch.equal(packed, expected["weight_packed"])
    assert torch.equal(scale.view(torch.uint8), expected["weight_scale"].view(torch.uint8))


def test_every_code_and_every_tie_of_e2m1():
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    ties = {0.25: 0, 0.75: 2, 1.25: 2, 1.75: 4, 2.5: 4, 3.5: 6, 5.0: 6}
    points, codes = [*values.tolist()], [*range(8)]
    for tie, code in ties.items():
        low = int((values < tie).sum()) - 1
        points += [tie, *(torch.nextafter(torch.tensor(tie), torch.tensor(end)).item() for end in (0.0, 9.0))]
        codes += [code, low, low + 1]
    points += [448.0, float("inf"), 2.0**-149]
    codes += [7, 7, 0]
    x = torch.tensor([points, [-point for point in points]])
    packed = pack_e2m1(torch.nn.functional.pad(x, (0, x.shape[1] % 2)))
    nibbles = torch.stack((packed & 15, packed >> 4), -1).flatten(1)[:, : len(points)].int().tolist()
    assert nibbles[0] == codes
    assert nibbles[1] == [0 if point == 0 else code + 8 for point, code in zip(points, codes, strict=True)]


def test_the_product_code_times_scale_is_exact_in_16_bits():
    scale = torch.arange(1, 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)[:, None]
    packed = torch.tensor([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE], dtype=torch.uint8).expand(len(scale), 8)
    wide = e2m1_values(packed).double() * scale.double()
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert torch.equal(scaled_codes(packed, scale).to(dtype).double(), wide)


def test_the_global_scale_of_fused_layers_is_that_of_the_largest_absmax():
    weights = [normal(seed) * size for seed, size in ((1, 0.1), (2, 2.0), (3, 0.7))]
    assert torch.equal(global_scale_of(map(absmax_of, weights)), our_tensors(weights[1])["weight_global_scale"])
    largest = torch.cat(weights)
    assert torch.equal(global_scale_of(map(absmax_of, weights)), generate_gparam(largest.amin(), largest.amax()))
