"""The documents of a model directory, damaged or hostile: config.json, generation_config.json and the tokenizer's.

What damages one says what it did and whether every command that reads tensors must refuse it.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from fuzzing.base import Base
from fuzzing.documents import damage_entry, damage_json
from fuzzing.values import TEXTS, json_value, shown

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


def damage_config(rng: random.Random, base: Base, model: Path) -> tuple[str, bool]:
    return damage_keys(rng, model / "config.json"), False


def damage_generation(rng: random.Random, base: Base, model: Path) -> tuple[str, bool]:
    path = model / "generation_config.json"
    if rng.random() < 0.5:
        raw = path.read_bytes()
        place = 1 + int(rng.random() * (len(raw) - 4))
        path.write_bytes(raw[:place])
        return f"generation_config.json truncated at {place}", True
    return damage_keys(rng, path), False


def damage_keys(rng: random.Random, path: Path) -> str:
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


def contradict_tensors(rng: random.Random, base: Base, model: Path) -> tuple[str, bool]:
    path = model / "config.json"
    data = json.loads(path.read_text())
    key = rng.choice(list(CONTRADICTIONS))
    data[key] = int(rng.choice(CONTRADICTIONS[key]))
    data.pop("head_dim", None) if key == "hidden_size" else None
    path.write_text(json.dumps(data))
    return f"config.json {key} = {data[key]}, which the tensors contradict", True


def damage_tokenizer(rng: random.Random, base: Base, model: Path) -> tuple[str, bool]:
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
