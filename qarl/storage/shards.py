"""Assignment of tensors to the safetensors files of a model. Imports no torch."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from qarl_formats.scheme import TensorSpec

from qarl.errors import UserError

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True)
class Shard:
    """One safetensors file. specs: its tensors by name. parameters: the parameters they belong to, in the model's
    order.
    """

    file: str
    parameters: list[str]
    specs: dict[str, TensorSpec]


def plan_shards(specs: Mapping[str, Mapping[str, TensorSpec]], max_bytes: int) -> list[Shard]:
    """Split a model into files of at most `max_bytes` of tensors; the tensors of one parameter stay together.

    specs: parameter name -> its tensors. A parameter larger than `max_bytes` gets a file of its own.
    """
    groups: list[list[str]] = [[]]
    filled = 0
    for parameter, tensors in specs.items():
        size = stored_bytes({parameter: tensors})
        if groups[-1] and filled + size > max_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(parameter)
        filled += size
    shards = []
    for number, parameters in enumerate(groups, start=1):
        file = f"model-{number:05d}-of-{len(groups):05d}.safetensors" if len(groups) > 1 else "model.safetensors"
        tensors = {name: spec for parameter in parameters for name, spec in specs[parameter].items()}
        shards.append(Shard(file, parameters, tensors))
    return shards


def shard_index(shards: list[Shard]) -> dict[str, Any]:
    """Return the content of model.safetensors.index.json."""
    total = sum(spec.nbytes for shard in shards for spec in shard.specs.values())
    weight_map = {name: shard.file for shard in shards for name in shard.specs}
    return {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}


def stored_bytes(specs: Mapping[str, Mapping[str, TensorSpec]]) -> int:
    """Return the total bytes of all tensors."""
    return sum(spec.nbytes for tensors in specs.values() for spec in tensors.values())


def bf16_bytes(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Return the bytes of a model with these parameters in bfloat16."""
    return 2 * sum(prod(shape) for shape in shapes.values())


def parse_size(text: str) -> int:
    """Parse a size in bytes such as 5GB, 500MB or 2GiB. Raises UserError."""
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,15})?)\s*([KMGT]i?B|)", text.strip(), re.IGNORECASE)
    size = int(float(match[1]) * _UNITS.get(match[2].upper(), 0)) if match else 0
    if size < 1:
        raise UserError(f"--max-shard-size: {text!r} is not a size; give one such as 5GB, 500MB or 2GiB")
    return size
