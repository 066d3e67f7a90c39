"""Model directories and exports that are damaged, incomplete or hostile."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import yaml
from hypothesis.strategies import DrawFn, sampled_from

from fuzzing.base import COMPARE, EVALUATE_GREEDILY, GENERATE, QUANTIZE, Base, lay_out
from fuzzing.case import Case
from fuzzing.damage import (
    damage_bytes,
    damage_entry,
    damage_file,
    flip_bit,
    lose_tensors,
    read_tensors,
    spoil_values,
    write_tensors,
)
from fuzzing.values import (
    chance,
    json_values,
    listed,
    make_traps,
    pick,
    position,
    shown,
    texts,
    weighted,
)

MODEL_LINES = {
    "generate": GENERATE.format("model"),
    "quantize": QUANTIZE,
    "compare": COMPARE,
    "eval": EVALUATE_GREEDILY.format("model", "rows.jsonl"),
    "check": "check c.yaml",
    "train": "train c.yaml",
}
MODEL_COMMANDS = {"generate": 2, "quantize": 2, "check": 1, "compare": 1, "train": 1, "eval": 1}
VARIANTS = {"tensors": 11, "tree": 30, "sharded": 8, "contradiction": 3, "pickle": 1, "gguf": 3, "export": 7}
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
# Keys of config.json and generation_config.json that a library acts on, and JSON that means something to one of them.
KEYS = listed("""
    auto_map  architectures  model_type  quantization_config  rope_parameters  rope_scaling  dtype  hidden_act
    rms_norm_eps  attention_dropout  eos_token_id  pad_token_id  tie_word_embeddings  layer_types  attn_implementation
    head_dim  id2label  transformers_version  num_labels  temperature  do_sample  stop_strings  max_length  hidden_size
    intermediate_size  num_hidden_layers  num_attention_heads  num_key_value_heads  vocab_size
""")
POINTED = listed(r"""
    {"AutoConfig": 5}  {"AutoConfig": ["a", null]}  {"AutoModelForCausalLM": "../../x.py--y.Z"}  [5]  [null]  "nosuch"
    ["NoSuchModel"]  ["LlamaForSequenceClassification"]  "bert"  "../llama"  "gpt2"  "mamba"  {"quant_method": "gptq"}
    {"quant_method": "compressed-tensors"}  {"quant_method": "compressed-tensors", "config_groups": []}  [[1]]
    {"quant_method": 5}  {"rope_type": "yarn"}  {"rope_theta": "x"}  {"rope_theta": 0}  {"rope_theta": 1e400}
    {"type": "linear"}  {"rope_type": "yarn", "factor": -1}  {"rope_type": 5}  "float99"  "int8"  "float64"  [1, null]
    "__class__"  ["nosuch", "nosuch"]  {"x": 1}  999999  -1  0  1000000000  1.5  "64"
""")
CHAT_TEMPLATES = listed(r"""
    {% for  {{ x.y.z }}  {{ messages[99].content }}  {{ raise_exception('no \u001b[31m') }}  {{ 1 / 0 }}  plain  \ud800
    {{ 'a' * 99999999999 }}  {% for i in range(99999999999) %}{% endfor %}  {{ messages.__class__.__mro__ }}
    {{ ''.format.__globals__ }}  {{ '\ud800' }}  {% include 'x' %}  {% macro m() %}{{ m() }}{% endmacro %}{{ m() }}
    {{ messages[0]['content'] + 5 }}  {{ strftime_now(5) }}
""")
CONTRADICTIONS = (  # of the tensors
    ("num_hidden_layers", 3),
    ("intermediate_size", 64),
    ("vocab_size", 200),
    ("num_key_value_heads", 4),
)


def mutate_model(draw: DrawFn, base: Base, case: Case) -> None:
    """A damaged model or export for one of the commands that take one."""
    make_traps(case.cwd)
    lay_out(base, case, "model", "data")
    model, variant = case.cwd / "model", weighted(draw, VARIANTS)
    command = weighted(draw, MODEL_COMMANDS)
    gguf = {"gguf_file": "model.gguf"} if variant == "gguf" else {}
    refuse = variant in ("contradiction", "pickle")
    if variant == "tensors":
        tensors = read_tensors(model / WEIGHTS)
        what, refuse = (lose_tensors(draw, tensors), True) if chance(draw, 70) else spoil_values(draw, tensors)
        write_tensors(model / WEIGHTS, tensors)
    elif variant == "contradiction":
        key, value = pick(draw, CONTRADICTIONS)
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | {key: value}))
        what = f"{key} = {value}, which the tensors contradict"
    elif variant == "pickle":
        (model / WEIGHTS).unlink()
        what = pick(draw, ("pytorch_model.bin", "model.bin", "consolidated.pth"))
        shutil.copyfile(base.pickle, model / what)
    elif variant == "gguf":
        shutil.rmtree(model)
        model.mkdir()
        raw, header = base.gguf.read_bytes(), pick(draw, (4_096, 4_096, 10**9))
        what, data = damage_bytes(draw, raw[:header])
        (model / "model.gguf").write_bytes(data + raw[header:])
        command = pick(draw, ("check", "train"))
    elif variant == "export":
        what, refuse = _damaged_export(draw, base, case)
        command = pick(draw, ("generate", "eval"))
    else:
        if variant == "sharded":
            _shard(model)
        what = _damaged_tree(draw, model)
    (case.cwd / "c.yaml").write_text(yaml.safe_dump(base.config(model={"path": "./model", **gguf})))
    case.mutation, case.argv = f"model {variant}: {what}", shlex.split(MODEL_LINES[command])
    case.must_refuse = refuse and command != "check"  # which reads no tensors
    if variant == "export" and not refuse:  # half of the cases reach the checks behind the digests
        case.argv += pick(draw, ([], ["--no-verify-digests"]))


def _shard(model: Path) -> None:
    """Two shards and an index in place of one file."""
    tensors = read_tensors(model / WEIGHTS)
    (model / WEIGHTS).unlink()
    weight_map = {name: SHARDS[number % 2] for number, name in enumerate(tensors)}
    for file in SHARDS:
        write_tensors(model / file, {name: tensors[name] for name in tensors if weight_map[name] == file})
    (model / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}, indent=1))


def _damaged_tree(draw: DrawFn, model: Path) -> str:
    """Something of a model's directory: a file, an entry, a key of a document, a template, or a document too many."""
    kind, path = pick(draw, ("file", "file", "entry", "key", "key", "key", "template", "another")), None
    if kind == "template":
        template = draw(sampled_from(CHAT_TEMPLATES) | texts)
        (model / "chat_template.jinja").write_bytes(template.encode("utf-8", "surrogatepass"))
        return f"chat template {shown(template)}"
    if kind == "another":
        (model / "special_tokens_map.json").write_text(draw(json_values))
        return "special_tokens_map.json appears"
    if kind != "key":
        files = sorted(model.iterdir())
        return (damage_file if kind == "file" else damage_entry)(draw, files[position(draw, len(files))])
    path = pick(draw, sorted(model.glob("*config.json")))
    data = json.loads(path.read_text())
    key, value = draw(sampled_from(KEYS) | sampled_from(list(data))), draw(sampled_from(POINTED) | json_values)
    path.write_text(json.dumps(data | {key: "@0@"}, indent=1).replace('"@0@"', value))
    return f"{path.name} {key} = {shown(value)}"


def _damaged_export(draw: DrawFn, base: Base, case: Case) -> tuple[str, bool]:
    """An exported checkpoint in place of the model. What a digest covers must be refused."""
    model = case.cwd / "model"
    shutil.rmtree(model)
    shutil.copytree(base.export, model)
    (file,) = model.glob("*.safetensors")
    kind = pick(draw, ("tree", "tree", "tree", "flip", "missing"))
    if kind == "tree":
        return _damaged_tree(draw, model), False
    tensors = read_tensors(file)
    what = flip_bit(draw, tensors) if kind == "flip" else f"{pick(draw, list(tensors))} missing"
    tensors.pop(what.split()[0] if kind == "missing" else "", None)
    write_tensors(file, tensors)
    return what, True
