"""A quantized Linear as compressed-tensors stores it: tensor names, shapes, dtypes, and the model's config entry.

Sources: compressed-tensors 0.17 `compressors/pack_quantized`, `compressors/naive_quantized` and
`ModelCompressor.update_config`. Neither torch nor compressed-tensors is imported until a function needs it, so the
size of a model's tensors can be known without them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from qarl_formats.scheme import Scheme

if TYPE_CHECKING:
    from torch import Tensor

    from qarl_formats.quantize import QuantizedWeight

_FORMATS = {"w4a16": "pack-quantized", "w4a8": "pack-quantized", "w8a8": "int-quantized", "fp8": "float-quantized"}
_ITEM_BYTES = {"int8": 1, "float8_e4m3fn": 1, "bfloat16": 2, "float16": 2, "int32": 4, "float32": 4, "int64": 8}


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype (torch's name of it) of a stored tensor."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * _ITEM_BYTES[self.dtype]


def tensor_specs(scheme: Scheme, out_features: int, in_features: int) -> dict[str, TensorSpec]:
    """The tensors of one Linear [out_features, in_features], by suffix, in the order in which they are stored.

    A packed dimension that eight does not divide is padded, as the library pads it.
    """
    assert scheme.quantized, f"scheme {scheme.name} stores the plain weight"
    scales = (out_features, scheme.num_groups(in_features))
    if not scheme.packed:
        codes = "int8" if scheme.weight_type == "int" else "float8_e4m3fn"
        return {
            "weight": TensorSpec((out_features, in_features), codes),
            "weight_scale": TensorSpec(scales, scheme.scale_dtype),
        }
    specs = {
        "weight_packed": TensorSpec((out_features, -(-in_features // 8)), "int32"),
        "weight_scale": TensorSpec(scales, scheme.scale_dtype),
    }
    if not scheme.symmetric:
        specs["weight_zero_point"] = TensorSpec((-(-out_features // 8), scales[1]), "int32")
    specs["weight_shape"] = TensorSpec((2,), "int64")
    return specs


def to_state_dict(name: str, quantized: QuantizedWeight) -> dict[str, Tensor]:
    """The stored tensors of module `name` under their full names, in the order of `tensor_specs`; no copies."""
    suffixes = tensor_specs(quantized.scheme, *quantized.shape)
    return {f"{name}.{suffix}": quantized.tensors[suffix] for suffix in suffixes}


def from_state_dict(name: str, tensors: Mapping[str, Tensor], scheme: Scheme) -> QuantizedWeight:
    """Collect module `name` from a state dict with compressed-tensors names; no copies.

    Raises:
        ValueError: a tensor is missing, or has another shape or dtype than `scheme` stores; names the tensor.
    """
    from qarl_formats.quantize import QuantizedWeight

    source = f"{name}.weight_shape" if scheme.packed else f"{name}.weight"
    if source not in tensors:
        raise ValueError(f"{source}: missing; scheme {scheme.name} stores it")
    shape_from = tensors[source]
    out_features, in_features = (int(size) for size in (shape_from if scheme.packed else shape_from.shape))
    found = {}
    for suffix, spec in tensor_specs(scheme, out_features, in_features).items():
        tensor = tensors.get(f"{name}.{suffix}")
        if tensor is None:
            raise ValueError(f"{name}.{suffix}: missing; scheme {scheme.name} stores it")
        dtype = str(tensor.dtype).removeprefix("torch.")
        if (tuple(tensor.shape), dtype) != (spec.shape, spec.dtype):
            raise ValueError(
                f"{name}.{suffix}: {dtype} {list(tensor.shape)}, "
                f"but scheme {scheme.name} stores {spec.dtype} {list(spec.shape)}"
            )
        found[suffix] = tensor
    return QuantizedWeight(scheme, found, (out_features, in_features))


def quantization_config(scheme: Scheme, ignore: list[str]) -> dict[str, Any]:
    """The `quantization_config` entry of config.json for a model whose Linears, but for `ignore`, are in `scheme`.

    Built by the library's own classes from the values of its presets W4A16, W4A16_ASYM, W4A8, W8A8 and FP8_DYNAMIC,
    and written as `ModelCompressor.update_config` writes it. The format is set by name: left to infer it, the
    library would store W4A8 unpacked as int-quantized. The file does not record the scale dtype or the grid: the
    first is that of the stored tensors, the second is no matter for the reader.

    Returns:
        plain JSON values.
    """
    assert scheme.quantized, f"scheme {scheme.name} has no quantization_config"
    import compressed_tensors
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        QuantizationStatus,
    )

    weights = QuantizationArgs(
        num_bits=scheme.weight_bits,
        type=scheme.weight_type,
        symmetric=scheme.symmetric,
        strategy="channel" if scheme.group_size is None else "group",
        group_size=scheme.group_size,
    )
    activations = None
    if scheme.activation is not None:
        kind = "int" if scheme.activation == "int8" else "float"
        activations = QuantizationArgs(num_bits=8, type=kind, symmetric=True, strategy="token", dynamic=True)
    file_format = _FORMATS[scheme.name]
    group = QuantizationScheme(
        targets=["Linear"], weights=weights, input_activations=activations, format=file_format
    )
    config = QuantizationConfig(
        config_groups={"group_0": group},
        format=file_format,
        quantization_status=QuantizationStatus.COMPRESSED,
        ignore=list(ignore),
    )
    return {
        "version": compressed_tensors.__version__,
        "sparsity_config": {},
        "transform_config": {},
        **config.model_dump(mode="json"),
    }
