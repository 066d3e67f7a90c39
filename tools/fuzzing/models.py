"""Model directories that are damaged, incomplete or hostile: one kind of damage and one command a case."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, sampled_from

from fuzzing.base import COMPARE, EVALUATE_GREEDILY, GENERATE, QUANTIZE, Base, lay_out
from fuzzing.case import Case
from fuzzing.damage import (
    TIED,
    damage_bytes,
    damage_entry,
    damage_file,
    flip_bit,
    lose_tensors,
    read_tensors,
    spoil_values,
    write_tensors,
)
from fuzzing.values import chance, file_names, json_values, listed, make_traps, pick, shown, texts

LINES = {
    "generate": GENERATE.format("model"),
    "quantize": QUANTIZE,
    "compare": COMPARE,
    "eval": EVALUATE_GREEDILY.format("model", "rows.jsonl"),
    "check": "check c.yaml",
    "train": "train c.yaml",
}
COMMANDS = ("generate", "generate", "quantize", "quantize", "check", "compare", "train", "eval")
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
# Keys of config.json and generation_config.json that a library acts on, and JSON that means something to one of them.
KEYS = listed("""
    auto_map  architectures  model_type  quantization_config  rope_parameters  rope_scaling  dtype  hidden_act
    rms_norm_eps  attention_dropout  eos_token_id  pad_token_id  tie_word_embeddings  layer_types  attn_implementation
    head_dim  id2label  transformers_version  num_labels  temperature  do_sample  stop_strings  max_length
""")
SIZES = listed("""
    hidden_size  intermediate_size  num_hidden_layers  num_attention_heads  num_key_value_heads  vocab_size
""")
POINTED = listed(r"""
    {"AutoConfig": 5}  {"AutoConfig": ["a", null]}  {"AutoModelForCausalLM": "../../x.py--y.Z"}  [5]  [null]  "nosuch"
    ["NoSuchModel"]  ["LlamaForSequenceClassification"]  "bert"  "../llama"  "gpt2"  "mamba"  {"quant_method": "gptq"}
    {"quant_method": "compressed-tensors"}  {"quant_method": "compressed-tensors", "config_groups": []}  [[1]]
    {"quant_method": 5}  {"rope_type": "yarn"}  {"rope_theta": "x"}  {"rope_theta": 0}  {"rope_theta": 1e400}
    {"type": "linear"}  {"rope_type": "yarn", "factor": -1}  {"rope_type": 5}  "float99"  "int8"  "float64"  [1, null]
    "__class__"  ["nosuch", "nosuch"]  {"x": 1}  999999  -1  0  1000000000  1.5  "64"
""")
# Sizes that the tensors of the tiny model contradict.
CONTRADICTIONS = {
    "num_hidden_layers": (1, 3),
    "intermediate_size": (64, 256),
    "vocab_size": (200, 300),
    "hidden_size": (32, 128),
    "num_key_value_heads": (4, 1),
}
TEMPLATES = listed(r"""
    {% for  {{ x.y.z }}  {{ messages[99].content }}  {{ raise_exception('no \u001b[31m') }}  {{ 1 / 0 }}  plain  \ud800
    {{ 'a' * 99999999999 }}  {% for i in range(99999999999) %}{% endfor %}  {{ messages.__class__.__mro__ }}
    {{ ''.format.__globals__ }}  {{ '\ud800' }}  {% include 'x' %}  {% macro m() %}{{ m() }}{% endmacro %}{{ m() }}
    {{ messages[0]['content'] + 5 }}  {{ strftime_now(5) }}
""")


def mutate_model(draw: DrawFn, base: Base, case: Case) -> None:
    """A damaged model for one of the commands that take one."""
    make_traps(case.cwd)
    lay_out(base, case, "model", "data")
    kind = pick(draw, [name for name, (weight, _) in DAMAGE.items() for _ in range(weight)])
    what, refuse = DAMAGE[kind][1](draw, base, case.cwd / "model")
    command = pick(draw, {"gguf": ("check", "train"), "export": ("generate", "eval")}.get(kind, COMMANDS))
    gguf = {"gguf_file": "model.gguf"} if kind == "gguf" else {}
    (case.cwd / "c.yaml").write_text(yaml.safe_dump(base.config(model={"path": "./model", **gguf})))
    case.mutation, case.argv = f"model {kind}: {what}", shlex.split(LINES[command])
    case.must_refuse = refuse and command != "check"  # which reads no tensors
    if kind == "export":  # half of the cases reach the checks behind the digests
        if draw(st.booleans()):
            case.argv.append("--no-verify-digests")
            case.must_refuse = refuse and "flipped" not in what
        else:
            case.must_refuse |= _documents_differ(base.export, case.cwd / "model")


def _tensors(draw: DrawFn, base: Base, model: Path) -> tuple[str, bool]:
    tensors = read_tensors(model / WEIGHTS)
    what, refuse = (lose_tensors(draw, tensors), True) if chance(draw, 70) else spoil_values(draw, tensors)
    write_tensors(model / WEIGHTS, tensors)
    return what, refuse


def _file(draw: DrawFn, base: Base, model: Path) -> tuple[str, bool]:
    return damage_file(draw, pick(draw, (model / WEIGHTS, *sorted(model.glob("*.json"))))), False


def _shards(draw: DrawFn, base: Base, model: Path) -> tuple[str, bool]:
    """Two shards and an index, of which something is wrong."""
    tensors = read_tensors(model / WEIGHTS)
    (model / WEIGHTS).unlink()
    names = list(tensors)
    name = pick(draw, names)
    first, second = SHARDS
    weight_map: Any = {n: SHARDS[number >= len(names) // 2] for number, n in enumerate(names)}
    kind = pick(draw, ("tensors", "text", "escape", "misplaced", "forgotten", "unlisted", "map", "absent", "damaged"))
    what, refuse = f"{kind} {name}", False
    if kind == "tensors":
        what, refuse = lose_tensors(draw, tensors), True
        weight_map = {n: weight_map.get(n, first) for n in tensors}
    stored = dict(weight_map)
    if kind == "misplaced":
        weight_map[name] = second if weight_map[name] == first else first
    elif kind == "forgotten":
        del weight_map[name]
    elif kind == "unlisted":
        weight_map["model.layers.9.extra.weight"] = first
    for file in SHARDS:
        write_tensors(model / file, {n: tensors[n] for n in tensors if stored[n] == file})
    if kind == "escape":
        outside = model.parent / "outside.safetensors"
        ways = sampled_from(("../outside.safetensors", str(outside.resolve()), "sub/../../outside.safetensors"))
        target = draw(ways | file_names)
        shutil.copyfile(model / second, outside)
        weight_map = {n: target if file == second else file for n, file in weight_map.items()}
        what, refuse = f"shard named {shown(target)}", True
    elif kind == "map":
        odd = pick(draw, (None, [], "x", 5, {}, ["b"], {"b": "c"}))
        weight_map = pick(draw, (odd, {"a": odd}, [odd], weight_map | {name: odd}))
        what = f"weight_map with {odd!r}"
    elif kind == "absent":
        what = damage_entry(draw, model / second)
    elif kind == "damaged":
        what = damage_file(draw, model / first)
    text = json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}, indent=1)
    (model / INDEX).write_bytes(text.encode())
    return f"shards {what if kind != 'text' else damage_file(draw, model / INDEX)}", refuse


def _key(draw: DrawFn, base: Base, model: Path) -> tuple[str, bool]:
    """A hostile value at a key of a JSON object."""
    path = pick(draw, sorted(model.glob("*config.json")))
    data = json.loads(path.read_text())
    key = draw(sampled_from(KEYS) | sampled_from(SIZES) | sampled_from(list(data)))
    value = draw(sampled_from(POINTED) | json_values)
    data[key] = "@0@"
    path.write_text(json.dumps(data, indent=1).replace('"@0@"', value))
    return f"{path.name} {key} = {shown(value)}", False


def _contradiction(draw: DrawFn, base: Base, model: Path) -> tuple[str, bool]:
    path = model / "config.json"
    data = json.loads(path.read_text())
    key = pick(draw, list(CONTRADICTIONS))
    data[key] = pick(draw, CONTRADICTIONS[key])
    if key == "hidden_size":
        data.pop("head_dim", None)
    path.write_text(json.dumps(data))
    return f"config.json {key} = {data[key]}, which the tensors contradict", True


def _template(draw: DrawFn, base: Base, model: Path) -> tuple[str, bool]:
    template = draw(sampled_from(TEMPLATES) | texts)
    (model / "chat_template.jinja").write_bytes(template.encode("utf-8", "surrogatepass"))
    return shown(template), False


def _entry(draw: DrawFn, base: Base, model: Path) -> tuple[str, bool]:
    """Another entry of a name, or a document that was not there."""
    name = pick(draw, ("special_tokens_map.json", "added_tokens.json"))
    if chance(draw, 20) and not (model / name).exists():
        (model / name).write_text(draw(json_values))
        return f"{name} appears: {shown((model / name).read_text())}", False
    return damage_entry(draw, pick(draw, sorted(model.iterdir()))), False


def _pickle(draw: DrawFn, base: Base, model: Path) -> tuple[str, bool]:
    (model / WEIGHTS).unlink()
    shutil.copyfile(base.pickle, model / pick(draw, ("pytorch_model.bin", "model.bin", "consolidated.pth")))
    if chance(draw, 30):
        (model / "pytorch_model.bin").write_bytes(draw(st.binary(min_size=100, max_size=500)))
    return "pickled weights", True


def _gguf(draw: DrawFn, base: Base, model: Path) -> tuple[str, bool]:
    """A GGUF of the same model, damaged, mostly in its header."""
    for path in model.iterdir():
        path.unlink()
    raw = base.gguf.read_bytes()
    header = 4_096 if chance(draw, 60) else len(raw)
    what, data = damage_bytes(draw, raw[:header])
    (model / "model.gguf").write_bytes(data + raw[header:])
    return f"GGUF {what}", False


def _export(draw: DrawFn, base: Base, model: Path) -> tuple[str, bool]:
    """An exported checkpoint in place of the model."""
    shutil.rmtree(model)
    shutil.copytree(base.export, model)
    kind = pick(draw, ("tensor", "file", "entry", "key", "flip", "flip"))
    (file,) = model.glob("*.safetensors")
    if kind == "file":
        return damage_file(draw, pick(draw, (file, model / "config.json", *sorted(model.glob("*.json"))))), False
    if kind in ("entry", "key"):
        return (_entry if kind == "entry" else _key)(draw, base, model)
    tensors = read_tensors(file)
    name = pick(draw, list(tensors))
    if kind == "flip":
        what, refuse = flip_bit(draw, tensors), True
    else:
        tensor = tensors.pop(name)
        tensors |= pick(draw, ({}, {f"{name}_old": tensor}))
        what, refuse = f"tensor missing: {name}", name != TIED
    write_tensors(file, tensors)
    return what, refuse


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


DAMAGE: dict[str, tuple[int, Callable[[DrawFn, Base, Path], tuple[str, bool]]]] = {
    "tensors": (11, _tensors),
    "file": (12, _file),
    "shards": (8, _shards),
    "key": (12, _key),
    "contradiction": (3, _contradiction),
    "template": (3, _template),
    "entry": (6, _entry),
    "pickle": (1, _pickle),
    "gguf": (3, _gguf),
    "export": (6, _export),
}
