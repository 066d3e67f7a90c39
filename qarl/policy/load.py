"""Load the model and the tokenizer of `model.path`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from qarl.config import ModelConfig, QuantConfig
from qarl.config.architecture import Architecture
from qarl.config.weight_files import EMBEDDING, HEAD, require_gguf, stored_format
from qarl.errors import UserError
from qarl.inputs.files import read_prefix, read_text
from qarl.inputs.json import json_kind, read_json
from qarl.inputs.library_errors import foreign_errors, quiet_loading
from qarl.inputs.paths import path_errors
from qarl.inputs.tensors import StoredTensor, require_index
from qarl.policy.experts import take_apart
from qarl.policy.load_config import load_architecture, load_generation_config, load_model_config, plain_config
from qarl.policy.modules import check_family
from qarl.policy.skeleton import ATTENTION, check_rotary, skeleton
from qarl.policy.source import ModelSource, from_pretrained, kept, locate
from qarl.policy.stored_weights import StoredWeights
from qarl.utils.text import first_few

_ROWS = 4096  # rows of an embedding that are compared at a time
_JSON_FILES = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.json")
_TEXT_FILES = ("chat_template.jinja", "merges.txt")
_LARGE_FILES = ("tokenizer.json", "vocab.json", "tokenizer.model")  # their readers check the content
_GGUF_MARKS = ("quantization_config", "_is_quantized", "quantization_method", "is_quantized", "hf_quantizer")


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """Load the model's tokenizer.

    Raises UserError if there is none, it does not work, or it has tokens that the model lacks.
    """

    def read(source: ModelSource) -> PreTrainedTokenizerBase:
        return from_pretrained(config, "tokenizer", AutoTokenizer.from_pretrained, source)

    source = locate(config)
    architecture = load_architecture(config, "tokenizer")
    if source.gguf_file is None:
        with path_errors(f"model.path: '{config.path}'"):
            _check_tokenizer_files(Path(source.name))
    tokenizer = read(kept(source, "tokenizer", lambda: read(source)))
    tokenizer.name_or_path = source.name
    with quiet_loading():
        _check_tokenizer(tokenizer, f"model.path: cannot use the tokenizer of '{config.path}'", architecture)
    return tokenizer


def saved_tokenizer_class(config: ModelConfig) -> str | None:
    """`tokenizer_class` of the model's tokenizer_config.json, if the file has it."""
    path = locate(config).file("tokenizer_config.json")
    name = None if path is None else json.loads(path.read_bytes()).get("tokenizer_class")
    return name if isinstance(name, str) else None


def _check_tokenizer_files(directory: Path) -> None:
    """Raise UserError for a damaged file. transformers ignores some of them, and with them the chat template or the
    token that ends a response."""
    for name in (*_JSON_FILES, *_TEXT_FILES, *_LARGE_FILES):
        path = directory / name
        if not path.exists() and not path.is_symlink():
            continue
        if name in _JSON_FILES:
            # transformers writes an unlimited length as an integer of 31 digits.
            if not isinstance(value := read_json(path, big_integers=True, nonfinite=True), dict):
                raise UserError(f"{path}: holds {json_kind(value)}, expected an object; restore it")
        elif name in _TEXT_FILES:
            read_text(path)
        else:
            read_prefix(path, 1)


def _check_tokenizer(tokenizer: PreTrainedTokenizerBase, place: str, architecture: Architecture | None) -> None:
    """Raise UserError for a tokenizer that does not work, or has tokens that the model lacks."""
    with foreign_errors(place):
        vocabulary = tokenizer.get_vocab()
        tokenizer("A word.", verbose=False)
        end = tokenizer.eos_token_id
    if not vocabulary:
        raise UserError(f"{place}: it has no tokens; restore its files")
    templates = tokenizer.chat_template
    templates = list(templates.values()) if isinstance(templates, Mapping) else [templates]
    if not all(template is None or isinstance(template, str) for template in templates):
        raise UserError(f"{place}: its chat_template is {str(templates[0])[:60]}, expected text; restore it")
    if end is not None and not isinstance(end, int):
        raise UserError(f"{place}: its eos_token is {str(tokenizer.eos_token)[:60]}, expected one token; restore it")
    if architecture is None:
        return
    # Added tokens may have ids outside the model's vocabulary: transformers adds some itself, and they occur only in
    # text that spells them.
    own = vocabulary.keys() - tokenizer.get_added_vocab().keys() | {tokenizer.bos_token, tokenizer.eos_token}
    token = max(own & vocabulary.keys(), key=lambda token: vocabulary[token], default=None)
    if token is not None and vocabulary[token] >= architecture.vocab_size:
        raise UserError(
            f"{place}: {token[:60]!r} has the id {vocabulary[token]:,}, but the model has only "
            f"{architecture.vocab_size:,} tokens; use the model's own tokenizer"
        )


def load_model(config: ModelConfig, quant: QuantConfig | None = None) -> PreTrainedModel:
    """Load the causal LM with float32 weights on the CPU, in eval mode.

    GGUF files are dequantized, and so are quantized checkpoints; see `StoredWeights` for their values.

    Args:
        config: The `model` section.
        quant: The `quant` section of a run that starts from the model.

    Raises:
        UserError: The model is missing or unreadable, or its tensors are not those that its configuration needs (the
            message names them).
    """
    source = locate(config)
    model_config = load_model_config(config)
    own_code = config.trust_remote_code and "AutoModelForCausalLM" in (getattr(model_config, "auto_map", None) or {})
    weights = None if own_code else model_weights(config, quant)
    if own_code and source.gguf_file is None and stored_format(Path(source.name)) is not None:
        raise UserError(
            f"model.path: '{config.path}' is quantized and has its own code; give a model of a supported family, or "
            "one that is not quantized"
        )
    generation = load_generation_config(config)  # before transformers, which ignores a damaged one
    if weights is not None and weights.format is not None:
        model = _filled(skeleton(plain_config(model_config)), weights)
    else:
        model = _read_model(config, _converted(config, source))
    model.name_or_path = model.config.name_or_path = source.name
    if not own_code:
        check_rotary(model)
    model.generation_config = generation
    model = model.float().eval()
    take_apart(model)
    return model


def _filled(model: PreTrainedModel, weights: StoredWeights) -> PreTrainedModel:
    """Give a skeleton its parameters. Tied ones stay tied."""
    made = {parameter: nn.Parameter(weights.read(name)) for name, parameter in model.named_parameters()}
    for module in model.modules():
        for leaf, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, leaf, made[parameter])
    return model


def model_weights(config: ModelConfig, quant: QuantConfig | None = None) -> StoredWeights | None:
    """Find every parameter of a model in its safetensors files, or in those of a converted GGUF file.

    Reads only headers, and the values of an output layer that should be tied.

    Returns:
        The parameters. None for a GGUF file whose conversion cannot be kept.

    Raises:
        UserError: As `load_model`.
    """
    source = locate(config)
    model_config, architecture = load_model_config(config), load_architecture(config, "model")
    check_family(model_config)
    assert architecture is not None, f"{model_config.model_type} can be run and has no list of its tensors"
    if source.gguf_file is not None:
        require_gguf(source.gguf_path(), architecture)
        source = _converted(config, source)
        return None if source.gguf_file is not None else StoredWeights(Path(source.name), architecture)
    with foreign_errors(f"model.path: cannot load the model of '{config.path}'"):
        directory = source.directory()
    with path_errors(f"model.path: '{config.path}'"):
        found = StoredWeights(directory, architecture, quant)
    if architecture.tied_embeddings and HEAD in found.files:
        require_tied(found.files[EMBEDDING], found.files[HEAD])
    return found


def require_tied(embedding: StoredTensor, head: StoredTensor) -> None:
    """Raise UserError if the values differ: transformers would silently untie the two."""
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
            f"{head.file}: {HEAD} differs from {EMBEDDING}, but config.json sets tie_word_embeddings; set it to false, "
            "or remove one of the tensors"
        )


def _converted(config: ModelConfig, source: ModelSource) -> ModelSource:
    """Return the source to read weights from: a GGUF file's conversion if it can be kept, else the source itself."""
    if source.gguf_file is None:
        return source
    architecture = load_architecture(config, "model")
    size = 4 * architecture.parameters if architecture is not None else 0
    return kept(source, "model", lambda: _read_model(config, source), size)


def _read_model(config: ModelConfig, source: ModelSource) -> PreTrainedModel:
    place = f"model.path: '{config.path}'"
    with path_errors(place):
        require_index(Path(source.name))
    more = {"dtype": torch.float32, "output_loading_info": True, "attn_implementation": ATTENTION}
    model, info = from_pretrained(config, "model", AutoModelForCausalLM.from_pretrained, source, **more)
    if source.gguf_file is not None:
        for name in _GGUF_MARKS:  # the weights were dequantized, but the model still counts as quantized
            vars(model).pop(name, None)
            vars(model.config).pop(name, None)
    _require_loaded(place, info)
    return model


def _require_loaded(place: str, info: Mapping[str, Any]) -> None:
    """Raise UserError if transformers missed or ignored weights. Also checks its mapping of a GGUF file's names."""
    for key in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if names := sorted(map(str, info[key])):
            raise UserError(
                f"{place}: {len(names):,} weights are {key.removesuffix('_keys')} ({first_few(names)}); "
                "restore the model's own files"
            )
