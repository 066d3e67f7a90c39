"""Model directories that are damaged, incomplete or hostile: one kind of damage and one command a case."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from fuzzing.base import COMPARE, Base, greedy_evaluation, lay_out
from fuzzing.case import Case
from fuzzing.documents import damage_bytes, damage_entry, damage_json
from fuzzing.model_documents import (
    contradict_tensors,
    damage_config,
    damage_generation,
    damage_keys,
    damage_tokenizer,
)
from fuzzing.paths import NAMES_OF_FILES, make_traps
from fuzzing.tensorfiles import damage_file, lose_tensors, read_tensors, spoil_values, write_tensors
from fuzzing.values import shown

COMMANDS = ("generate", "generate", "quantize", "quantize", "check", "compare", "train", "eval")
TIED = ("lm_head.weight",)
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def mutate_model(rng: random.Random, base: Base, case: Case) -> None:
    """A damaged model for one of the commands that take one."""
    make_traps(case.cwd)
    lay_out(base, case, "model", "data")
    model = case.cwd / "model"
    kinds: dict[str, tuple[int, Callable[[random.Random, Base, Path], tuple[str, bool]]]] = {
        "tensors": (8, _tensors),
        "values": (3, _values),
        "file": (6, _file),
        "shards": (8, _shards),
        "config": (12, damage_config),
        "contradiction": (3, contradict_tensors),
        "generation": (4, damage_generation),
        "tokenizer": (8, damage_tokenizer),
        "entry": (4, _entry),
        "pickle": (1, _pickle),
        "gguf": (3, _gguf),
        "export": (6, _export),
    }
    kind = rng.choices(list(kinds), [weight for weight, _ in kinds.values()])[0]
    what, refuse = kinds[kind][1](rng, base, model)
    command = rng.choice(COMMANDS)
    if kind == "gguf":
        command = rng.choice(("check", "train"))
    elif kind == "export":
        command = rng.choice(("generate", "eval"))
    case.mutation = f"model {kind}: {what}"
    case.argv = _argv(command, base, case.cwd, "model.gguf" if kind == "gguf" else None)
    case.must_refuse = refuse and command != "check"  # which reads no tensors
    if kind == "export":  # half of the cases reach the checks behind the digests
        if rng.random() < 0.5:
            case.argv.append("--no-verify-digests")
        else:
            case.must_refuse |= what.startswith("export bit") or _documents_differ(base.export, model)


def _argv(command: str, base: Base, cwd: Path, gguf: str | None) -> list[str]:
    if command in ("check", "train"):
        config = base.config(model={"path": "./model"} | ({"gguf_file": gguf} if gguf else {}))
        (cwd / "c.yaml").write_text(yaml.safe_dump(config))
    return {
        "generate": ["generate", "model", "--prompt", "2 + 2 =", "--max-new-tokens", "4"],
        "quantize": ["quantize", "model", "out", "--scheme", "w4a16", "--group-size", "32"],
        "compare": list(COMPARE),
        "eval": greedy_evaluation("model", "rows.jsonl"),
        "check": ["check", "c.yaml"],
        "train": ["train", "c.yaml"],
    }[command]


def _tensors(rng: random.Random, base: Base, model: Path) -> tuple[str, bool]:
    tensors = read_tensors(model / WEIGHTS)
    what = lose_tensors(rng, tensors, TIED)
    write_tensors(model / WEIGHTS, tensors)
    return what, True


def _values(rng: random.Random, base: Base, model: Path) -> tuple[str, bool]:
    tensors = read_tensors(model / WEIGHTS)
    what, refuse = spoil_values(rng, tensors)
    write_tensors(model / WEIGHTS, tensors)
    return what, refuse


def _file(rng: random.Random, base: Base, model: Path) -> tuple[str, bool]:
    return damage_file(rng, model / WEIGHTS), False


def _shards(rng: random.Random, base: Base, model: Path) -> tuple[str, bool]:
    """Two shards and an index, of which something is wrong."""
    tensors = read_tensors(model / WEIGHTS)
    (model / WEIGHTS).unlink()
    names = list(tensors)
    half = len(names) // 2
    parts = {"model-00001-of-00002.safetensors": names[:half], "model-00002-of-00002.safetensors": names[half:]}
    weight_map = {name: file for file, members in parts.items() for name in members}
    kind = rng.choice(
        (
            "tensors",
            "one file",
            "text",
            "escape",
            "wrong shard",
            "forgotten",
            "unlisted",
            "map",
            "absent shard",
            "damaged",
        )
    )
    what, refuse = kind, False
    if kind == "tensors":
        what, refuse = lose_tensors(rng, tensors, TIED), True
        first, second = parts
        placed = {name: weight_map.get(name, first) for name in tensors}
        parts = {file: [name for name in tensors if placed[name] == file] for file in (first, second)}
        weight_map = {name: file for file, members in parts.items() for name in members}
    elif kind == "wrong shard":
        name = names[int(rng.random() * len(names))]
        weight_map[name] = next(file for file in parts if file != weight_map[name])
        what = f"{name} in the other shard"
    elif kind == "forgotten":
        del weight_map[names[int(rng.random() * len(names))]]
    elif kind == "unlisted":
        weight_map["model.layers.9.extra.weight"] = "model-00001-of-00002.safetensors"
    for file, members in parts.items():
        write_tensors(model / file, {name: tensors[name] for name in members})
    index: Any = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    if kind == "one file":
        write_tensors(model / WEIGHTS, {name: tensors[name] for name in names[:half]})
    elif kind == "escape":
        name = rng.choice(
            (
                "../outside.safetensors",
                str((model.parent / "outside.safetensors").resolve()),
                "sub/../../outside.safetensors",
                *NAMES_OF_FILES,
            )
        )
        shutil.copyfile(model / "model-00002-of-00002.safetensors", model.parent / "outside.safetensors")
        index["weight_map"] = {n: (name if f.startswith("model-00002") else f) for n, f in weight_map.items()}
        what, refuse = f"shard named {shown(name)}", True
    elif kind == "map":
        odd = rng.choice((None, [], "x", 5, {}, {"a": 5}, {"a": None}, {"a": ["b"]}, {"a": {"b": "c"}}, [["a", "b"]]))
        index = rng.choice(({"weight_map": odd}, odd, {"weight_map": {**weight_map, names[0]: odd}}))
        what = f"weight_map with {odd!r}"
    elif kind == "absent shard":
        damage_entry(rng, model / "model-00002-of-00002.safetensors")
    elif kind == "damaged":
        what = damage_file(rng, model / "model-00001-of-00002.safetensors")
    text = json.dumps(index).encode()
    if kind == "text":
        what, text = damage_json(rng, json.dumps(index, indent=1))
    (model / INDEX).write_bytes(text)
    return f"shards {what}", refuse


def _documents_differ(export: Path, model: Path) -> bool:
    """Whether a JSON document of an export that has a record no longer has the values that it was exported with."""

    def values(path: Path) -> str:
        if not path.is_file():  # a pipe, which nobody writes to, would be waited for
            return "unreadable"
        try:
            return json.dumps(json.loads(path.read_text()), sort_keys=True)
        except (OSError, ValueError, RecursionError):
            return "unreadable"

    names = ("config.json", "generation_config.json", "qarl_export.json", "tokenizer.json", "tokenizer_config.json")
    # Without the record there is nothing to compare with.
    return (model / "qarl_export.json").is_file() and any(
        values(export / name) != values(model / name) for name in names
    )


def _entry(rng: random.Random, base: Base, model: Path) -> tuple[str, bool]:
    names = sorted(path.name for path in model.iterdir())
    return damage_entry(rng, model / names[int(rng.random() * len(names))]), False


def _pickle(rng: random.Random, base: Base, model: Path) -> tuple[str, bool]:
    (model / WEIGHTS).unlink()
    shutil.copyfile(base.pickle, model / rng.choice(("pytorch_model.bin", "model.bin", "consolidated.pth")))
    if rng.random() < 0.3:
        (model / "pytorch_model.bin").write_bytes(rng.randbytes(1_000))
    return "pickled weights", True


def _gguf(rng: random.Random, base: Base, model: Path) -> tuple[str, bool]:
    """A GGUF of the same model, damaged."""
    for path in model.iterdir():
        path.unlink()
    raw = base.gguf.read_bytes()
    where = rng.random()
    part = raw[:4_096] if where < 0.6 else raw
    what, data = damage_bytes(rng, part)
    (model / "model.gguf").write_bytes(data + raw[len(part) :])
    return f"GGUF {what}", False


def _export(rng: random.Random, base: Base, model: Path) -> tuple[str, bool]:
    """An exported checkpoint in place of the model."""
    shutil.rmtree(model)
    shutil.copytree(base.export, model)
    kind = rng.choice(("tensors", "file", "config", "quantization", "entry", "json", "flip", "flip"))
    files = sorted(model.glob("*.safetensors"))
    if kind == "flip":
        tensors = read_tensors(files[0])
        name = list(tensors)[int(rng.random() * len(tensors))]
        data, bit = bytearray(tensors[name].data), rng.randrange(8 * len(tensors[name].data))
        data[bit // 8] ^= 1 << bit % 8
        tensors[name].data = bytes(data)
        write_tensors(files[0], tensors)
        return f"export bit {bit} of {name} flipped", False
    if kind == "tensors":
        tensors = read_tensors(files[0])
        names = list(tensors)
        name = names[int(rng.random() * len(names))]
        if rng.random() < 0.5:
            del tensors[name]
            what = f"tensor missing: {name}"
        else:
            tensors[f"{name}_old"] = tensors.pop(name)
            what = f"tensor renamed: {name}"
        write_tensors(files[0], tensors)
        return f"export {what}", name not in TIED
    if kind == "file":
        return f"export {damage_file(rng, files[0])}", False
    if kind == "entry":
        return _entry(rng, base, model)
    if kind == "json":
        names = sorted(path.name for path in model.glob("*.json"))
        return damage_keys(rng, model / names[int(rng.random() * len(names))]), False
    path = model / "config.json"
    data = json.loads(path.read_text())
    if kind == "config":
        return damage_keys(rng, path), False
    what, text = damage_json(rng, json.dumps(data["quantization_config"]))
    data["quantization_config"] = "@0@"
    path.write_bytes(json.dumps(data).encode().replace(b'"@0@"', text))
    return f"quantization_config {what}", False
