"""Model directories: configuration, tokenizer, tensors and indices that are damaged, incomplete or hostile."""

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
from fuzzing.tensorfiles import damage_file, lose_tensors, read_tensors, spoil_values, write_tensors
from fuzzing.values import NAMES_OF_FILES, TEXTS, json_value, make_traps, shown

COMMANDS = ("generate", "generate", "quantize", "quantize", "check", "compare", "train", "eval")
TIED = ("lm_head.weight",)
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"

# JSON of a value, by the key of config.json or generation_config.json that gets it.
ODD: dict[str, tuple[str, ...]] = {
    "auto_map": (
        "5",
        "[]",
        '"x"',
        '{"AutoConfig": 5}',
        '{"AutoConfig": ["a", null]}',
        '{"AutoModelForCausalLM": "../../x.py--y.Z"}',
        "{}",
    ),
    "architectures": ("5", '"x"', "[5]", "[null]", '["NoSuchModel"]', "[]", '["LlamaForSequenceClassification"]', "{}"),
    "model_type": ("5", "null", '"nosuch"', '"bert"', '"\\u001b[31m"', '"../llama"', "[]", '""', '"gpt2"', '"mamba"'),
    "quantization_config": (
        "5",
        "[]",
        "{}",
        '"x"',
        '{"quant_method": "gptq"}',
        '{"quant_method": "compressed-tensors"}',
        '{"quant_method": "compressed-tensors", "config_groups": []}',
        '{"quant_method": 5}',
        "null",
        "true",
    ),
    "rope_parameters": (
        "5",
        "[]",
        '{"rope_type": "nosuch"}',
        '{"rope_type": "yarn"}',
        '{"rope_theta": "x"}',
        '{"rope_theta": 0}',
        '{"rope_theta": 1e400}',
        "null",
    ),
    "rope_scaling": ("5", '{"type": "linear"}', '{"rope_type": "yarn", "factor": -1}', '{"rope_type": 5}', "[]"),
    "dtype": ('"float99"', "5", '"int8"', "null", '"float64"', '"torch.float32"', "[]", '"__class__"'),
    "hidden_act": ('"nosuch"', "5", "null", "[]"),
    "attention_dropout": ("2", '"x"', "-1"),
    "rms_norm_eps": ("0", "-1", '"x"', "1e400", "NaN"),
    "eos_token_id": (
        "-1",
        "999999",
        '"x"',
        "[[1]]",
        "null",
        "[]",
        "[1, null]",
        '{"a": 1}',
        "1.5",
        "true",
        "1" + "0" * 30,
    ),
    "pad_token_id": ("-1", "999999", '"x"', "null", "[1]"),
    "tie_word_embeddings": ("false", '"x"', "null", "5"),
    "layer_types": ("5", "[]", '["nosuch", "nosuch"]', '"x"'),
    "attn_implementation": ('"nosuch"', "5"),
    "transformers_version": ("5", "null"),
    "id2label": ("5", "[]", '{"x": 1}'),
    "head_dim": ("0", "-1", "7", "null", "1000000"),
    "num_labels": ("-1", "1000000000"),
    "temperature": ('"x"', "-1", "NaN"),
    "do_sample": ("5",),
    "stop_strings": ("5", "[5]", '"x"'),
    "max_length": ("-1", '"x"', "0"),
}
SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "max_position_embeddings",
)
SIZE_VALUES = (
    "0",
    "-1",
    "1",
    "3",
    "63",
    "65",
    "128",
    "1000000000",
    "1" + "0" * 30,
    "9" * 400,
    "1e308",
    "2.5",
    '"64"',
    "null",
    "true",
    "[64]",
    "NaN",
    "{}",
)
# Sizes that the tensors of the tiny model contradict.
CONTRADICTIONS = {
    "num_hidden_layers": ("1", "3"),
    "intermediate_size": ("64", "256"),
    "vocab_size": ("200", "300"),
    "hidden_size": ("32", "128"),
    "num_key_value_heads": ("4", "1"),
}
TEMPLATES = (
    "{% for",
    "{{ x.y.z }}",
    "{{ messages[99].content }}",
    "{{ raise_exception('no \\u001b[31m') }}",
    "{{ 1 / 0 }}",
    "{{ 'a' * 99999999999 }}",
    "{% for i in range(99999999999) %}{% endfor %}",
    "{{ messages.__class__.__mro__ }}",
    "{{ ''.format.__globals__ }}",
    "",
    "\\ud800",
    "{{ '\\ud800' }}",
    "{% include 'x' %}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{{ messages[0]['content'] + 5 }}",
    "{{ strftime_now(5) }}",
    "plain",
)


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
        "config": (12, _config),
        "contradiction": (3, _contradiction),
        "generation": (4, _generation),
        "tokenizer": (8, _tokenizer),
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


def _config(rng: random.Random, base: Base, model: Path) -> tuple[str, bool]:
    return _damage_keys(rng, model / "config.json"), False


def _generation(rng: random.Random, base: Base, model: Path) -> tuple[str, bool]:
    path = model / "generation_config.json"
    if rng.random() < 0.5:
        raw = path.read_bytes()
        place = 1 + int(rng.random() * (len(raw) - 4))
        path.write_bytes(raw[:place])
        return f"generation_config.json truncated at {place}", True
    return _damage_keys(rng, path), False


def _damage_keys(rng: random.Random, path: Path) -> str:
    """Hostile values at keys of a JSON object, or damage to its text."""
    text = path.read_text()
    if rng.random() < 0.3:
        what, data = damage_json(rng, text)
        path.write_bytes(data)
        return f"{path.name} {what}"
    data = json.loads(text)
    if rng.random() < 0.3:
        key, value = (lambda k: (k, rng.choice(SIZE_VALUES)))(rng.choice(SIZES))
    elif rng.random() < 0.7:
        key, value = (lambda k: (k, rng.choice(ODD[k])))(rng.choice(list(ODD)))
    else:
        key, value = list(data)[int(rng.random() * len(data))], json_value(rng)[1]
    data[key] = "@0@"
    path.write_text(json.dumps(data, indent=1).replace('"@0@"', value))
    return f"{path.name} {key} = {shown(value)}"


def _contradiction(rng: random.Random, base: Base, model: Path) -> tuple[str, bool]:
    path = model / "config.json"
    data = json.loads(path.read_text())
    key = rng.choice(list(CONTRADICTIONS))
    data[key] = int(rng.choice(CONTRADICTIONS[key]))
    data.pop("head_dim", None) if key == "hidden_size" else None
    path.write_text(json.dumps(data))
    return f"config.json {key} = {data[key]}, which the tensors contradict", True


def _tokenizer(rng: random.Random, base: Base, model: Path) -> tuple[str, bool]:
    name = rng.choice(
        (
            "tokenizer.json",
            "tokenizer_config.json",
            "chat_template.jinja",
            "special_tokens_map.json",
            "added_tokens.json",
        )
    )
    path = model / name
    if name == "chat_template.jinja" or rng.random() < 0.2:
        template = rng.choice((*TEMPLATES, *TEXTS))
        (model / "chat_template.jinja").write_bytes(template.encode("utf-8", "surrogatepass"))
        return f"chat template {shown(template)}", False
    if not path.exists():
        path.write_text(json_value(rng)[1])
        return f"{name} appears: {shown(path.read_text())}", False
    if rng.random() < 0.2:
        return damage_entry(rng, path), False
    what, data = damage_json(rng, path.read_text())
    path.write_bytes(data)
    return f"{name} {what}", False


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
    kind = rng.choice(("tensors", "file", "config", "quantization", "entry", "json"))
    files = sorted(model.glob("*.safetensors"))
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
        return _damage_keys(rng, model / names[int(rng.random() * len(names))]), False
    path = model / "config.json"
    data = json.loads(path.read_text())
    if kind == "config":
        return _damage_keys(rng, path), False
    what, text = damage_json(rng, json.dumps(data["quantization_config"]))
    data["quantization_config"] = "@0@"
    path.write_bytes(json.dumps(data).encode().replace(b'"@0@"', text))
    return f"quantization_config {what}", False
