"""The compressed-tensors file format: tensor names of weights, and the model's config entry.

Sources: compressed-tensors 0.17 `compressors/pack_quantized`, `compressors/naive_quantized` and
`ModelCompressor.update_config`. torch and compressed-tensors are imported only by functions that need them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from qarl_formats.registry import make_scheme, scheme_class, scheme_names
from qarl_formats.scheme import CHANNEL, Scheme, Shape

if TYPE_CHECKING:
    from torch import Tensor

    from qarl_formats.weight import LowBitWeight

_NEW_ARGUMENTS = ("scale_dtype", "zp_dtype")  # fields of QuantizationArgs since compressed-tensors 0.13
_STATIC_ORDERS = (None, "static", "weight")


def to_state_dict(name: str, weight: LowBitWeight, unpacked: bool = False) -> dict[str, Tensor]:
    """Return the stored tensors of module `name` under their full names, in file order.

    Copies nothing, except int4 codes with `unpacked`.
    """
    if unpacked and weight.scheme.packed:
        return {f"{name}.weight": weight.codes(), f"{name}.weight_scale": weight.tensors["weight_scale"]}
    return {f"{name}.{suffix}": tensor for suffix, tensor in weight.tensors.items()}


def from_state_dict(name: str, tensors: Mapping[str, Tensor], scheme: Scheme, shape: Shape) -> LowBitWeight:
    """Collect module `name`, with a weight of `shape`, from a state dict with compressed-tensors names.

    Copies nothing, except that int4 codes stored one per byte are packed.

    Raises:
        ValueError: A tensor is missing, or is not what `scheme` stores for this shape; names the tensor.
    """
    from qarl_formats.weight import LowBitWeight

    if scheme.unpackable and f"{name}.weight" in tensors:
        tensors = _packed(name, tensors)
    found = {}
    for suffix, spec in scheme.tensor_specs(*shape).items():
        tensor = tensors.get(f"{name}.{suffix}")
        if tensor is None:
            raise ValueError(f"{name}.{suffix}: missing; scheme {scheme.name} stores it")
        dtype = str(tensor.dtype).removeprefix("torch.")
        if (tuple(tensor.shape), dtype) != (spec.shape, spec.dtype):
            raise ValueError(
                f"{name}.{suffix}: {dtype} {list(tensor.shape)}, "
                f"but scheme {scheme.name} stores {spec.dtype} {list(spec.shape)}"
            )
        if suffix == "weight_shape" and tuple(tensor.tolist()) != tuple(shape):
            raise ValueError(f"{name}.{suffix}: says {tensor.tolist()}, but the layer is {list(shape)}")
        found[suffix] = tensor
    return LowBitWeight(scheme, found, shape)


def _packed(name: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    import torch

    from qarl_formats.packing import pack_int4

    codes = tensors[f"{name}.weight"]
    if codes.dtype != torch.int8 or codes.ndim != 2 or not bool(((codes >= -8) & (codes <= 7)).all()):
        raise ValueError(f"{name}.weight: not int4 codes stored one per byte (int8 in [-8, 7])")
    shape = torch.tensor(codes.shape)
    return {**tensors, f"{name}.weight_packed": pack_int4(codes), f"{name}.weight_shape": shape}


def quantization_config(scheme: Scheme, ignore: list[str], unpacked: bool = False) -> dict[str, Any]:
    """Return the `quantization_config` of config.json for a model whose Linears, except `ignore`, use `scheme`.

    Built by the library's classes from the values of its presets (W4A16, W4A16_ASYM, W4A8, W8A8, FP8_DYNAMIC, ...), and
    written as `ModelCompressor.update_config` writes it. The format is set by name: the library would infer
    int-quantized for W4A8. The file does not record the scale dtype, which is that of the stored tensors, or the grid,
    which does not matter to a reader. Unset arguments that compressed-tensors added after 0.12 are left out, because
    older versions reject unknown fields. unpacked: see `Scheme.tensor_specs`.
    """
    assert scheme.quantized, f"scheme {scheme.name} has no quantization_config"
    import compressed_tensors
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        QuantizationStatus,
    )

    given = scheme.activation_arguments()
    weights = QuantizationArgs(**scheme.weight_arguments())
    activations = None if given is None else QuantizationArgs(**given)
    file_format = "int-quantized" if unpacked else scheme.file_format
    group = QuantizationScheme(targets=["Linear"], weights=weights, input_activations=activations, format=file_format)
    config = QuantizationConfig(
        config_groups={"group_0": group},
        format=file_format,
        quantization_status=QuantizationStatus.COMPRESSED,
        ignore=list(ignore),
    )
    values = {
        "version": compressed_tensors.__version__,
        "sparsity_config": {},
        "transform_config": {},
        **config.model_dump(mode="json"),
    }
    for arguments in (values["config_groups"]["group_0"][key] or {} for key in ("weights", "input_activations")):
        for key in _NEW_ARGUMENTS:
            if key in arguments and arguments[key] is None:
                del arguments[key]
    return values


def parse_quantization_config(config: Mapping[str, Any]) -> tuple[Scheme, list[str]]:
    """Return the scheme and ignore list of a config.json: the inverse of `quantization_config`.

    The scale dtype and the grid are not recorded there; the result has their defaults.

    Raises:
        ValueError: Another method or format, several groups, a layout without a scheme, values of the wrong type.
    """
    method = config.get("quant_method")
    if method != "compressed-tensors":
        raise ValueError(f"method {shown(method)} cannot be read; only compressed-tensors can")
    for key in ("kv_cache_scheme", "sparsity_config", "transform_config"):
        if config.get(key):
            raise ValueError(f"its {key} cannot be read; only quantized weights and activations can")
    groups = list(_mapping(config.get("config_groups") or {}, "config_groups").values())
    if len(groups) != 1 or _mapping(groups[0], "the group").get("targets") != ["Linear"]:
        raise ValueError("it needs one group with targets ['Linear']; mixed schemes cannot be read")
    weights, activations = _mapping(groups[0].get("weights"), "weights"), groups[0].get("input_activations")
    if groups[0].get("output_activations") is not None:
        raise ValueError("quantized outputs cannot be read; only weights and input activations can")
    kind = _scheme_of(weights, activations)
    symmetric, size, ignore = weights.get("symmetric"), weights.get("group_size"), config.get("ignore") or []
    if not isinstance(symmetric, bool):
        raise ValueError(f"symmetric is {shown(symmetric)}, expected true or false")
    if not isinstance(ignore, list) or not all(isinstance(entry, str) for entry in ignore):
        raise ValueError(f"ignore is {shown(ignore)}, expected a list of names")
    grouped = bool(kind.group_sizes) and weights["strategy"] == "group"
    if grouped and (not isinstance(size, int) or isinstance(size, bool)):
        raise ValueError(f"group_size is {shown(size)}, expected a number")
    by_channel = CHANNEL if kind.group_sizes else None
    found = make_scheme(kind.name, size if grouped else by_channel, symmetric)
    formats = [found.file_format, *(["int-quantized"] if found.unpackable else [])]
    if config.get("format") not in formats:
        raise ValueError(
            f"format {shown(config.get('format'))} is not that of scheme {kind.name} ({' or '.join(formats)})"
        )
    for key, value in found.weight_arguments().items():
        absent = key in _NEW_ARGUMENTS and weights.get(key) is None  # in files of older versions
        if weights.get(key) != value and not absent:
            raise ValueError(f"weights with {key} {shown(weights.get(key))} have no scheme; {kind.name} has {value!r}")
    return found, list(ignore)


def _scheme_of(weights: Mapping[str, Any], activations: Any) -> type[Scheme]:
    """Return the scheme with these weight and activation types. Raises ValueError."""
    quantized = None
    if activations is not None:
        activations = _mapping(activations, "input_activations")
        quantized = {"int": "int8", "float": "fp8"}.get(_text(activations, "type"))
    bits, weight_type, strategy = weights.get("num_bits"), _text(weights, "type"), _text(weights, "strategy")
    layout, kinds = (bits, weight_type, quantized), [scheme_class(name) for name in scheme_names()]
    kinds = [kind for kind in kinds if (kind.weight_bits, kind.weight_type, kind.activation) == layout]
    if not kinds:
        raise ValueError(
            f"{shown(bits)}-bit {weight_type} weights with {quantized or 'unquantized'} activations have no scheme"
        )
    kinds = [kind for kind in kinds if strategy in kind.strategies]
    # GPTQ with static activation ordering (alias: weight) changes the order in which columns are rounded. The groups
    # stay in column order, so the file has the layout of an unordered one.
    if not kinds or weights.get("actorder") not in _STATIC_ORDERS:
        raise ValueError(f"weight strategy {strategy!r} (actorder {str(weights.get('actorder'))[:20]}) cannot be read")
    wanted = kinds[0]().activation_arguments()
    if wanted is not None and any(activations.get(key, True) != value for key, value in wanted.items()):
        per = "token" if wanted["strategy"] == "token" else f"group of {wanted['group_size']}"
        raise ValueError(f"activations must be 8 bits, dynamic, per {per}, symmetric")
    return kinds[0]


def _mapping(value: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} is {shown(value)}, expected an object")
    return value


def _text(values: Mapping[str, Any], key: str) -> str:
    if not isinstance(values.get(key), str):
        raise ValueError(f"{key} is {shown(values.get(key))}, expected text")
    return values[key]


def shown(value: Any) -> str:
    """Return a value for a message: at most 60 characters, on one line."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
