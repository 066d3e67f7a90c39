"""safetensors files as bytes, so that they can be wrong in ways that no writer allows.

Format: eight bytes of header length, little-endian; a JSON header name -> {dtype, shape, data_offsets}; the data.
"""

from __future__ import annotations

import json
import random
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from fuzzing.documents import damage_bytes, damage_json
from fuzzing.paths import NAMES_OF_FILES
from fuzzing.values import shown

_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I8": 1, "U8": 1, "BOOL": 1}


@dataclass
class Stored:
    """One tensor of a file."""

    dtype: str
    shape: list[int]
    data: bytes


def read_tensors(path: Path) -> dict[str, Stored]:
    """All tensors of a well-formed file."""
    raw = path.read_bytes()
    (length,) = struct.unpack_from("<Q", raw)
    header, body = json.loads(raw[8 : 8 + length]), raw[8 + length :]
    header.pop("__metadata__", None)
    return {
        name: Stored(entry["dtype"], entry["shape"], body[slice(*entry["data_offsets"])])
        for name, entry in header.items()
    }


def write_tensors(path: Path, tensors: dict[str, Stored]) -> None:
    """Write them well-formed."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    place = 0
    for name, tensor in tensors.items():
        header[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [place, place + len(tensor.data)]}
        place += len(tensor.data)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(tensor.data for tensor in tensors.values()))


def lose_tensors(rng: random.Random, tensors: dict[str, Stored], tied: tuple[str, ...] = ()) -> str:
    """Take away, rename, add or reshape tensors such that no model of that configuration is left. Returns what.

    tied: names that may be absent.
    """
    needed = [name for name in tensors if name not in tied]
    name = needed[int(rng.random() * len(needed))]
    kind = rng.choice(
        (
            "missing",
            "layer missing",
            "kind missing",
            "all missing",
            "renamed",
            "all renamed",
            "extra",
            "transposed",
            "flat",
            "row short",
            "row more",
            "scalar",
        )
    )
    tensor = tensors[name]
    if kind == "missing":
        del tensors[name]
    elif kind == "layer missing":
        name = "model.layers.1."
        _drop(tensors, lambda n: n.startswith(name))
    elif kind == "kind missing":
        name = rng.choice(("up_proj", "q_proj", "norm", "layernorm", "self_attn"))
        _drop(tensors, lambda n: name in n)
    elif kind == "all missing":
        tensors.clear()
    elif kind == "renamed":
        tensors[
            rng.choice(
                (name + "_old", name.upper(), name.replace("model.", "module.", 1), name.replace(".weight", ".weights"))
            )
        ] = tensors.pop(name)
    elif kind == "all renamed":
        change = rng.choice((lambda n: f"transformer.{n}", lambda n: n.replace("layers", "h"), lambda n: f"{n}.data"))
        for old in list(tensors):
            tensors[change(old)] = tensors.pop(old)
    elif kind == "extra":
        name = rng.choice(
            (
                "model.layers.0.mlp.extra.weight",
                "model.layers.7.mlp.up_proj.weight",
                "extra",
                "model.layers.0.self_attn.q_proj.bias",
            )
        )
        tensors[name] = Stored(tensor.dtype, list(tensor.shape), tensor.data)
    else:
        wide = [n for n in needed if len(tensors[n].shape) == 2 and tensors[n].shape[0] != tensors[n].shape[1]]
        name = wide[int(rng.random() * len(wide))]
        rows, columns = tensors[name].shape
        step = columns * _BYTES[tensors[name].dtype]
        shape, data = {
            "transposed": ([columns, rows], tensors[name].data),
            "flat": ([rows * columns], tensors[name].data),
            "row short": ([rows - 1, columns], tensors[name].data[:-step]),
            "row more": ([rows + 1, columns], tensors[name].data + tensors[name].data[:step]),
            "scalar": ([], tensors[name].data[: _BYTES[tensors[name].dtype]]),
        }[kind]
        tensors[name] = Stored(tensors[name].dtype, shape, data)
    return f"tensor {kind}: {name}"


def _drop(tensors: dict[str, Stored], chosen: Any) -> None:
    for name in [name for name in tensors if chosen(name)]:
        del tensors[name]


def spoil_values(rng: random.Random, tensors: dict[str, Stored]) -> tuple[str, bool]:
    """Other values or types of the same tensors. Returns what, and whether it must be refused (not a number)."""
    name = list(tensors)[int(rng.random() * len(tensors))]
    tensor = tensors[name]
    kind = rng.choice(("nan", "infinity", "zeros", "huge", "bool", "int", "float64", "float8"))
    if kind in ("nan", "infinity", "huge", "zeros") and tensor.dtype == "F32":
        value = {"nan": float("nan"), "infinity": float("inf"), "huge": 3e38, "zeros": 0.0}[kind]
        which = int(rng.random() * (len(tensor.data) // 4))
        data = bytearray(tensor.data)
        if rng.random() < 0.5 or kind == "zeros":
            data[:] = struct.pack("<f", value) * (len(data) // 4)
        else:
            data[4 * which : 4 * which + 4] = struct.pack("<f", value)
        tensors[name] = Stored("F32", tensor.shape, bytes(data))
        return f"values {kind}: {name}", kind in ("nan", "infinity")
    dtype = {"bool": "BOOL", "int": "I64", "float64": "F64", "float8": "F8_E4M3"}.get(kind, "U8")
    size = _BYTES.get(dtype, 1) * prod(tensor.shape)
    tensors[name] = Stored(dtype, tensor.shape, bytes(size))
    return f"dtype {dtype}: {name}", dtype not in ("F64",)


def damage_file(rng: random.Random, path: Path) -> str:
    """Make it no safetensors file any more, or one whose header lies. Returns what."""
    raw = path.read_bytes()
    (length,) = struct.unpack_from("<Q", raw)
    header, body = json.loads(raw[8 : 8 + length]), raw[8 + length :]
    kind = rng.choice(
        ("bytes", "bytes", "length", "header", "header", "offsets", "shape", "dtype", "name", "metadata", "list")
    )
    names = [name for name in header if name != "__metadata__"]
    name = names[int(rng.random() * len(names))]
    if kind == "bytes":
        what, data = damage_bytes(rng, raw)
        path.write_bytes(data)
        return f"safetensors bytes: {what}"
    if kind == "length":
        claimed = rng.choice((0, 1, length - 1, length + 1, 10**8, 2**40, 2**63, 2**64 - 1))
        path.write_bytes(struct.pack("<Q", claimed) + raw[8:])
        return f"safetensors header length: {claimed}"
    if kind == "header":
        what, text = damage_json(rng, json.dumps(header))
        path.write_bytes(struct.pack("<Q", len(text)) + text + body)
        return f"safetensors header: {what}"
    if kind == "offsets":
        header[name]["data_offsets"] = rng.choice(
            ([0, 0], [0, 2**62], [-4, 0], [2**63, 2**64], [8, 4], [], ["a", "b"], None, [0.5, 1.5], [0, len(body)])
        )
    elif kind == "shape":
        header[name]["shape"] = rng.choice(
            ([2**31, 2**31], [2**62, 4], [-1, 4], [0], [1] * 100, [0.5], "x", None, [[1]], [2**64])
        )
    elif kind == "dtype":
        header[name]["dtype"] = rng.choice(("F32x", "", "I4", None, 5, ["F32"], "BF16", "C64"))
    elif kind == "name":
        header[rng.choice((*NAMES_OF_FILES, "__metadata__"))] = header.pop(name)
    elif kind == "metadata":
        header["__metadata__"] = rng.choice(
            (None, [], "x", {"format": "tf"}, {"format": 5}, {"format": ["pt"]}, {"a": "x" * 100_000})
        )
    else:
        header = rng.choice(([], [header], "x", 5, None, {}))  # type: ignore[assignment]
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)
    return f"safetensors {kind}: {shown(name)}"
