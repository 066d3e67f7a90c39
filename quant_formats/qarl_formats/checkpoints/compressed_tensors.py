"""compressed-tensors, the format that qarl and llm-compressor export, in the layout of every scheme.

Groups may be in activation order (`actorder: group`): `weight_g_idx` int32 [K] is the group of each input; -1 means
that the order was not used.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from qarl_formats.checkpoints.base import FLOATS, CheckpointFormat, Stored, StoredSpecs
from qarl_formats.compressed import from_state_dict, parse_quantization_config
from qarl_formats.scheme import Scheme, Shape, Tensors, check_shape, is_ignored

if TYPE_CHECKING:
    from torch import Tensor

    from qarl_formats.weight import LowBitWeight

_ORDER = "weight_g_idx"


class CompressedTensors(CheckpointFormat):
    method = "compressed-tensors"
    scheme: Scheme

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.scheme, self.ignore = parse_quantization_config(_in_column_order(config))

    def quantizes(self, module: str, found: Collection[str]) -> bool:
        return not is_ignored(module, self.ignore)

    def specs(self, module: str, shape: Shape, found: Collection[str]) -> StoredSpecs:
        check_shape(self.scheme, module, *shape)
        unpacked = self.scheme.unpackable and f"{module}.weight" in found
        specs = {
            suffix: Stored(spec.shape, FLOATS if suffix == self.scale and self.scheme.scale_dtypes else (spec.dtype,))
            for suffix, spec in self.scheme.tensor_specs(*shape, unpacked=unpacked).items()
        }
        if self.scheme.group_sizes and f"{module}.{_ORDER}" in found:
            specs[_ORDER] = Stored((shape[1],), ("int32", "int64"))
        return specs

    def read(self, module: str, tensors: Tensors, shape: Shape) -> LowBitWeight | Tensor:
        scheme = self.scheme
        if scheme.scale_dtypes:
            scheme = replace(scheme, scale_dtype=str(tensors[self.scale].dtype).removeprefix("torch."))
        named = {f"{module}.{suffix}": tensor for suffix, tensor in tensors.items()}
        weight = from_state_dict(module, named, scheme, shape)
        order = tensors.get(_ORDER)
        return weight if order is None else _in_order(weight, order, module)


def _in_order(weight: LowBitWeight, order: Tensor, module: str) -> LowBitWeight | Tensor:
    """Return the weight if its groups are in column order, else its dequantized values. order: Group of each input."""
    import torch

    from qarl_formats.packing import unpack_zero_points

    scale, zero = weight.tensors["weight_scale"], weight.tensors.get("weight_zero_point")
    size = weight.shape[1] // scale.shape[1]
    if (order == -1).any() or torch.equal(order.long(), torch.arange(len(order)) // size):
        return weight
    if order.min() < 0 or order.max() >= scale.shape[1]:
        raise ValueError(f"{module}.{_ORDER} names a group that does not exist")
    codes, groups = weight.codes().float(), order.long()
    if zero is not None:
        codes -= unpack_zero_points(zero, len(codes)).float()[:, groups]
    return codes.mul_(scale.float()[:, groups])


def _in_column_order(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the configuration without `actorder: group` (alias: dynamic), which only affects how tensors are read."""
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping):
        return config
    plain = {}
    for name, group in groups.items():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(weights, Mapping) and weights.get("actorder") in ("group", "dynamic"):
            group = {**group, "weights": {**weights, "actorder": None}}
        plain[name] = group
    return {**config, "config_groups": plain}
