"""Tensors that the compressed-tensors library stores for a master weight, as expected values of these tests."""

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from qarl_formats.scheme import Scheme
from torch import Tensor

FORMATS = {
    "w4a16": "pack-quantized",
    "w4a8": "pack-quantized",
    "w8a8": "int-quantized",
    "fp8": "float-quantized",
    "fp8_block": "float-quantized",
}


def library_scheme(scheme: Scheme) -> QuantizationScheme:
    block = scheme.name == "fp8_block"
    weights = QuantizationArgs(
        num_bits=scheme.weight_bits,
        type=scheme.weight_type,
        symmetric=scheme.symmetric,
        strategy="block" if block else "channel" if scheme.group_size is None else "group",
        group_size=scheme.group_size,
        block_structure=[128, 128] if block else None,
        scale_dtype=getattr(torch, scheme.scale_dtype),
    )
    return QuantizationScheme(targets=["Linear"], weights=weights)


def library_tensors(weight: Tensor, scheme: Scheme) -> dict[str, Tensor]:
    """Scale and zero point by `calculate_qparams`, the scale cast to its stored dtype, then the format's compressor."""
    library = library_scheme(scheme)
    if scheme.name == "fp8_block":
        rows = [[part for part in row.split(128, 1)] for row in weight.split(128)]
        low = torch.stack([torch.stack([block.amin() for block in row]) for row in rows])
        high = torch.stack([torch.stack([block.amax() for block in row]) for row in rows])
    else:
        groups = weight.unflatten(-1, (scheme.num_groups(weight.shape[1]), -1))
        low, high = groups.amin(-1), groups.amax(-1)
    scale, zero_point = calculate_qparams(low, high, library.weights)
    state = {
        "weight": weight,
        "weight_scale": scale.to(getattr(torch, scheme.scale_dtype)),
        "weight_zero_point": zero_point,
    }
    compressor = BaseCompressor.get_value_from_registry(FORMATS[scheme.name])
    return compressor.compress(state, library)


def library_dequantized(tensors: dict[str, Tensor], scheme: Scheme) -> Tensor:
    compressor = BaseCompressor.get_value_from_registry(FORMATS[scheme.name])
    return compressor.decompress(tensors, library_scheme(scheme))["weight"]
