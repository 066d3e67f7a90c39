"""Values and digests of a base model's small files, which a run records and compares when it resumes.

`qarl.training.run_identity` digests the weights.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase

from qarl.config import ModelConfig
from qarl.config.model_schema import ConfigJson
from qarl.inputs.files import file_sha256
from qarl.inputs.json import short_json
from qarl.inputs.paths import path_errors
from qarl.policy.load_config import stop_token_ids
from qarl.storage.input_files import input_name
from qarl.storage.saved_state import Inputs, ModelFiles, PolicyState
from qarl.utils.text import first_few

CONFIG, GENERATION = "config.json", "generation_config.json"
# Fields of a resolved configuration that do not change a policy's forward. A new field of transformers counts as one
# that does, until it is added here.
_NO_FORWARD = {
    *("_name_or_path", "architectures", "auto_map", "transformers_version", "quantization_config"),
    *("dtype", "torch_dtype"),  # of the files; model.dtype decides
    *("id2label", "label2id", "num_labels", "problem_type", "return_dict", "is_encoder_decoder"),
    *("initializer_range", "use_cache", "attention_dropout", "pretraining_tp", "chunk_size_feed_forward"),
    *("output_attentions", "output_hidden_states", "output_router_logits"),
    *("router_aux_loss_coef", "router_jitter_noise"),  # objective.router_aux_coef decides; noise is refused
    *("bos_token_id", "eos_token_id", "pad_token_id"),  # the generation config and the tokenizer decide
    *("use_sliding_window", "max_window_layers"),  # transformers resolves both into sliding_window and layer_types
}
_TOKENIZER_FILES = ("tokenizer*", "vocab*", "merges*", "*.model", "tekken.json", "added_tokens.json")
# Fields of a generation config that only affect what `generate` of transformers returns.
_NO_GENERATION = {
    *("_from_model_config", "transformers_version", "_commit_hash", "use_cache", "return_dict_in_generate"),
    *("output_attentions", "output_hidden_states", "output_scores", "output_logits"),
}


def model_files(config: PreTrainedConfig, generation: GenerationConfig) -> ModelFiles:
    """The relevant values of config.json and generation_config.json, as transformers resolves them."""
    return {CONFIG: config_values(config), GENERATION: generation_values(generation)}


def config_values(config: PreTrainedConfig) -> dict[str, Any]:
    """The fields of a resolved configuration that change the forward, with dotted keys (`rope_parameters.rope_theta`).

    Two spellings of one architecture give the same values: an older `rope_scaling` and `rope_parameters`, an implicit
    and an explicit `head_dim`. Keys that neither the model's class nor qarl knows are left out.
    """
    known = {field.name for field in dataclasses.fields(config)} | ConfigJson.model_fields.keys()
    values = {key: value for key, value in config.to_dict().items() if key in known - _NO_FORWARD}
    heads = values["num_attention_heads"]
    values["head_dim"] = values.get("head_dim") or values["hidden_size"] // heads
    values["num_key_value_heads"] = values.get("num_key_value_heads") or heads
    values["model_type"] = config.model_type
    return dict(sorted(_plain(values)))


def generation_values(generation: GenerationConfig) -> dict[str, Any]:
    """The fields of a generation config that are set; stop tokens are sorted."""
    values = {key: value for key, value in generation.to_dict().items() if key not in _NO_GENERATION}
    if isinstance(stop := values.get("eos_token_id"), list):
        values["eos_token_id"] = sorted(set(stop)) if len(set(stop)) > 1 else stop[0] if stop else None
    return dict(sorted(_plain(values)))


def model_digests(
    config: ModelConfig, generation: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase
) -> dict[str, str]:
    """SHA-256 of a model's tokenizer by part: vocabulary, stop tokens, chat template, and `tokenizer` for the rest.

    With `trust_remote_code`, `code` is that of the model's own Python files.
    """
    code = {"code": digest_of(_files_digests(tokenizer, ("*.py",)))} if config.trust_remote_code else {}
    return {
        **code,
        "vocabulary": digest_of(sorted(tokenizer.get_vocab().items())),
        "stop tokens": digest_of(sorted(stop_token_ids(generation, tokenizer))),
        "tokenizer": digest_of(_tokenizer_parts(tokenizer)),
        "chat template": digest_of(tokenizer.chat_template),
    }


def changed_inputs(then: PolicyState, now: Inputs) -> list[tuple[str, str]]:
    """Find the inputs that differ from those of a checkpoint: (kind in `checkpoint.allow_changed`, description).

    Values and parts of the model that `then` lacks are not compared, because an older version of qarl wrote it; nor are
    kinds that `now` lacks.
    """
    changed = []
    for file, values in now.files.items():
        differences = value_differences(then.model_files.get(file, values), values)
        if differences:
            changed.append(("model", f"model.path: {file}: {first_few(differences, 4)}"))
    for kind, here in now.digests.items():
        there = then.inputs.get(kind, here)
        names = [part for part in here if part in there] if kind == "model" else {**there, **here}
        changed += [(kind, input_name(kind, part)) for part in names if there.get(part) != here.get(part)]
    return changed


def value_differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """`rms_norm_eps (now 1e-05, was 1e-06)` for each field that differs.

    A missing field equals false: another version of transformers may have fewer fields.
    """
    return [
        f"{key} (now {_short(now.get(key))}, was {_short(then.get(key))})"
        for key in sorted(then.keys() | now.keys())
        if _set(then.get(key)) != _set(now.get(key))
    ]


def digest_of(value: object) -> str:
    """SHA-256 of a JSON value."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def _tokenizer_parts(tokenizer: PreTrainedTokenizerBase) -> list[Any]:
    """Everything that affects encoding and decoding. Padding and truncation do not: qarl never uses them.

    A tokenizer without a Rust backend cannot be serialized to JSON, so its files are digested.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    parts = _files_digests(tokenizer, _TOKENIZER_FILES) if backend is None else json.loads(backend.to_str())
    kept = {key: value for key, value in parts.items() if key not in ("version", "padding", "truncation")}
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}
    options = {
        name: getattr(tokenizer, name, None) for name in ("clean_up_tokenization_spaces", "split_special_tokens")
    }
    return [_present(kept), _present(special), _present(options)]


def _files_digests(tokenizer: PreTrainedTokenizerBase, patterns: Iterable[str]) -> dict[str, str]:
    """SHA-256 of files of a local model by name. Empty for a hub model, which its revision identifies."""
    directory = Path(tokenizer.name_or_path)
    files = {path for pattern in patterns for path in directory.glob(pattern) if path.is_file()}
    with path_errors(str(directory)):
        return {path.name: file_sha256(path)[1] for path in sorted(files)}


def _present(value: Any) -> Any:
    """Drop keys that are null or false: a later version of a library writes more of them."""
    if isinstance(value, dict):
        return {key: _present(item) for key, item in sorted(value.items()) if item is not None and item is not False}
    if isinstance(value, list) and value and isinstance(value[0], dict):  # skips the 150,000 merges
        return [_present(item) for item in value]
    return value


def _plain(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Flatten to dotted keys and JSON values, whole floats as integers. Leaves out null and empty lists, as if the file
    did not have them."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _plain(value, f"{prefix}{key}.")
        elif value is not None and value != []:
            plain = value if isinstance(value, bool | int | float | str | list) else str(value)
            yield f"{prefix}{key}", int(plain) if isinstance(plain, float) and plain.is_integer() else plain


def _set(value: Any) -> Any:
    return None if value is False else value  # 0 stays: it may be a token


def _short(value: Any) -> str:
    return "not set" if value is None else short_json(value)
