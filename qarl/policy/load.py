"""From `model.path` to a Hugging Face model with float32 weights, and its tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from qarl.config import ModelConfig
from qarl.config.weights import EMBEDDING, HEAD, quantized_checkpoint, require_gguf, require_weights
from qarl.errors import UserError
from qarl.inputs.paths import path_errors
from qarl.inputs.tensors import StoredTensor, require_index, shown_names
from qarl.policy.experts import take_apart
from qarl.policy.foreign import foreign_errors, quiet_loading
from qarl.policy.gguf import kept, write_model, write_tokenizer
from qarl.policy.hub import ModelSource
from qarl.policy.load_config import (
    architecture_of,
    ask_transformers,
    gguf_file_of,
    load_generation_config,
    load_model_config,
    locate,
)
from qarl.policy.modules import check_family
from qarl.policy.skeleton import ATTENTION, check_rotary
from qarl.policy.tokenizer import check_files, check_tokenizer

_ROWS = 4096  # of an embedding, compared at a time


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """The tokenizer that belongs to the model.

    Raises UserError with the reason if there is none, it does not work, or it has tokens that the model lacks.
    """
    source = locate(config)
    architecture = architecture_of(config, source, "tokenizer")
    if source.gguf_file is None:
        with path_errors(f"model.path: '{config.path}'"):
            check_files(Path(source.name))
    held = kept(source, "tokenizer", lambda: _read_tokenizer(config, source), write_tokenizer)
    tokenizer = _read_tokenizer(config, held)
    tokenizer.name_or_path = source.name
    with quiet_loading():
        check_tokenizer(tokenizer, f"model.path: cannot use the tokenizer of '{config.path}'", architecture)
    return tokenizer


def saved_tokenizer_class(config: ModelConfig) -> str | None:
    """`tokenizer_class` of the model's tokenizer_config.json; None if it has no such file or entry."""
    path = locate(config).file("tokenizer_config.json")
    name = None if path is None else json.loads(path.read_bytes()).get("tokenizer_class")
    return name if isinstance(name, str) else None


def _read_tokenizer(config: ModelConfig, source: ModelSource) -> PreTrainedTokenizerBase:
    return ask_transformers(config, "tokenizer", AutoTokenizer.from_pretrained, source)


def load_model(config: ModelConfig) -> PreTrainedModel:
    """The causal LM with float32 weights on the CPU, in eval mode. GGUF files are dequantized.

    Raises UserError when there is no model, it cannot be read, its weights are not those of its configuration (which
    names them), or it is a quantized checkpoint.
    """
    source = locate(config)
    model_config = load_model_config(config)
    own_code = config.trust_remote_code and "AutoModelForCausalLM" in (getattr(model_config, "auto_map", None) or {})
    if not own_code:
        model_weights(config)
    generation = load_generation_config(config)  # transformers passes over a damaged one
    model = _read_model(config, _kept_model(config, source))
    model.name_or_path = model.config.name_or_path = source.name
    if not own_code:
        check_rotary(model)
    model.generation_config = generation
    model = model.float().eval()
    take_apart(model)
    return model


def _read_model(config: ModelConfig, source: ModelSource) -> PreTrainedModel:
    with path_errors(f"model.path: '{config.path}'"):
        require_index(Path(source.name))
    model, info = ask_transformers(
        config,
        "model",
        AutoModelForCausalLM.from_pretrained,
        source,
        dtype=torch.float32,
        output_loading_info=True,
        attn_implementation=ATTENTION,
    )
    if source.gguf_file is not None:
        with quiet_loading():
            model = _plain(model)
    _require_loaded(config, info)
    return model


def _kept_model(config: ModelConfig, source: ModelSource) -> ModelSource:
    """Where the weights are read from; see `kept`. The names and shapes in a GGUF file have been proved."""
    if source.gguf_file is None:
        return source
    architecture = architecture_of(config, source, "model")
    size = 4 * architecture.parameters if architecture is not None else 0
    return kept(source, "model", lambda: _read_model(config, source), write_model, size)


def model_weights(config: ModelConfig) -> dict[str, StoredTensor] | None:
    """The safetensors files' tensors of an unquantized model, proved to be those of its configuration: a GGUF file's
    those that it was converted to, and None where its conversion cannot be kept.

    Raises UserError as `load_model` does. Reads headers, and the values of an output layer that should be tied.
    """
    source = locate(config)
    model_config, architecture = load_model_config(config), architecture_of(config, source, "model")
    check_family(model_config)
    assert architecture is not None, f"{model_config.model_type} can be run and has no list of its tensors"
    if source.gguf_file is not None:
        require_gguf(gguf_file_of(source), architecture)
        source = _kept_model(config, source)
        return None if source.gguf_file is not None else require_weights(Path(source.name), architecture)
    if getattr(model_config, "quantization_config", None) is not None:
        raise UserError(quantized_checkpoint(config))
    with foreign_errors(f"model.path: cannot load the model of '{config.path}'"):  # of huggingface_hub
        directory = source.directory()
    with path_errors(f"model.path: '{config.path}'"):
        found = require_weights(directory, architecture)
    if architecture.tied_embeddings and HEAD in found:
        require_tied(found[EMBEDDING], found[HEAD])
    return found


def require_tied(embedding: StoredTensor, head: StoredTensor) -> None:
    """Raise UserError unless the two have the same values: transformers would untie them, and say nothing."""
    with (
        foreign_errors(f"{head.file}: cannot be read"),
        safe_open(embedding.file, framework="pt") as one,
        safe_open(head.file, framework="pt") as other,
    ):
        mine, theirs = one.get_slice(EMBEDDING), other.get_slice(HEAD)
        same = all(
            torch.equal(mine[start : start + _ROWS].float(), theirs[start : start + _ROWS].float())
            for start in range(0, embedding.shape[0], _ROWS)
        )
    if not same:
        raise UserError(
            f"{head.file}: {HEAD} is not {EMBEDDING}, as tie_word_embeddings says; set that to false in "
            "config.json, or remove one of them"
        )


def _require_loaded(config: ModelConfig, info: Mapping[str, Any]) -> None:
    """The second wall: what transformers itself says of the names, after the mapping of a GGUF file's."""
    for key in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if names := sorted(map(str, info[key])):
            what = key.removesuffix("_keys")
            raise UserError(
                f"model.path: '{config.path}': {len(names):,} weights are {what} ({shown_names(names)}); "
                "restore the model's own files"
            )


def _plain(model: PreTrainedModel) -> PreTrainedModel:
    """The same weights in a model that does not count as quantized: GGUF loading leaves that mark behind."""
    model_config = type(model.config).from_dict(
        {key: value for key, value in model.config.to_dict().items() if key != "quantization_config"}
    )
    with torch.device("meta"):
        plain = type(model)(model_config)
    plain.load_state_dict(model.state_dict(), assign=True)
    plain.tie_weights()
    for (name, buffer), (_, source) in zip(plain.named_buffers(), model.named_buffers(), strict=True):
        if buffer.is_meta:  # rotary frequencies are not in the state dict
            owner, _, leaf = name.rpartition(".")
            setattr(plain.get_submodule(owner), leaf, source)
    plain.generation_config = model.generation_config
    return plain
