"""From `model.path` to a Hugging Face model with float32 weights, and its tokenizer."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import logging
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from qarl.config import ModelConfig
from qarl.config.architecture import Architecture, UnknownFamily, read_config_json, read_gguf
from qarl.config.model_schema import StopTokens, valid
from qarl.config.package_model import PREFIX, UnusableModel, package_gguf
from qarl.config.weights import EMBEDDING, HEAD, quantized_checkpoint, require_gguf, require_weights
from qarl.errors import UserError
from qarl.inputs.json import read_json_object
from qarl.inputs.paths import path_errors, user_path
from qarl.inputs.tensors import StoredTensor, shown_names
from qarl.policy.experts import take_apart
from qarl.policy.foreign import foreign_errors
from qarl.policy.gguf import kept, write_config, write_model, write_tokenizer
from qarl.policy.hub import ModelSource
from qarl.policy.modules import check_family
from qarl.policy.skeleton import ATTENTION, check_rotary
from qarl.policy.tokenizer import check_files, check_tokenizer

_ROWS = 4096  # of an embedding, compared at a time


def locate(config: ModelConfig) -> ModelSource:
    """Resolve `model.path`: a directory, a hub name, or `package:NAME` (an installed package with one GGUF file)."""
    if config.path.startswith(PREFIX):
        try:
            file = package_gguf(config)
        except UnusableModel as error:
            raise UserError(f"model.{error.key}: '{error.value}': {error.text}") from error
        return ModelSource(str(file.parent), file.name)
    directory, gguf = user_path(config.path, "model.path"), config.gguf_file
    with path_errors(f"model.path: '{config.path}'"):
        if not directory.is_dir():
            return ModelSource(config.path, gguf, config.revision)
        if gguf is not None and not (directory / user_path(gguf, "model.gguf_file")).is_file():
            raise UserError(f"model.gguf_file: '{gguf}' is not in {config.path}")
    return ModelSource(str(directory), gguf)


def load_architecture(config: ModelConfig) -> Architecture | None:
    """The model's shape as its config.json or GGUF header gives it; None for a family that is not known.

    Raises UserError when there is no such file, or it says what no model can be.
    """
    return _architecture(config, locate(config), "config")


def _architecture(config: ModelConfig, source: ModelSource, what: str) -> Architecture | None:
    place = f"model.path: cannot load the {what} of '{config.path}'"
    file = source.gguf_file or "config.json"
    with foreign_errors(place):  # of huggingface_hub
        path = source.file(file)
    if path is None:
        raise UserError(f"{place}: there is no {file}; give a model directory, a hub name, or package:NAME")
    try:
        with path_errors(place):
            return read_gguf(path) if source.gguf_file is not None else read_config_json(path)
    except UnknownFamily:
        return None
    except ValueError as error:
        raise UserError(f"{place}: {path.name} {error}") from None


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """The tokenizer that belongs to the model.

    Raises UserError with the reason if there is none, it does not work, or it has tokens that the model lacks.
    """
    source = locate(config)
    architecture = _architecture(config, source, "tokenizer")
    if source.gguf_file is None:
        with path_errors(f"model.path: '{config.path}'"):
            check_files(Path(source.name))
    held = kept(source, "tokenizer", lambda: _read_tokenizer(config, source), write_tokenizer)
    tokenizer = _read_tokenizer(config, held)
    tokenizer.name_or_path = source.name
    with quiet_loading():
        check_tokenizer(tokenizer, f"model.path: cannot use the tokenizer of '{config.path}'", architecture)
    return tokenizer


def _read_tokenizer(config: ModelConfig, source: ModelSource) -> PreTrainedTokenizerBase:
    with quiet_loading():
        return _load(config, "tokenizer", AutoTokenizer.from_pretrained, source)


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
    with quiet_loading():
        model, info = _load(
            config,
            "model",
            AutoModelForCausalLM.from_pretrained,
            source,
            dtype=torch.float32,
            output_loading_info=True,
            attn_implementation=ATTENTION,
        )
        if source.gguf_file is not None:
            model = _plain(model)
    _require_loaded(config, info)
    return model


def _kept_model(config: ModelConfig, source: ModelSource) -> ModelSource:
    """Where the weights are read from; see `kept`. The names and shapes in a GGUF file have been proved."""
    if source.gguf_file is None:
        return source
    architecture = _architecture(config, source, "model")
    size = 4 * architecture.parameters if architecture is not None else 0
    return kept(source, "model", lambda: _read_model(config, source), write_model, size)


def model_weights(config: ModelConfig) -> dict[str, StoredTensor] | None:
    """The safetensors files' tensors of an unquantized model, proved to be those of its configuration: a GGUF file's
    those that it was converted to, and None where its conversion cannot be kept.

    Raises UserError as `load_model` does. Reads headers, and the values of an output layer that should be tied.
    """
    source = locate(config)
    model_config, architecture = load_model_config(config), _architecture(config, source, "model")
    check_family(model_config)
    assert architecture is not None, f"{model_config.model_type} can be run and has no list of its tensors"
    if source.gguf_file is not None:
        require_gguf(_gguf_file(source), architecture)
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


def load_model_config(config: ModelConfig) -> transformers.PretrainedConfig:
    """The model's own config.json, or the same read from a GGUF header. Raises UserError when it cannot be used."""
    source = locate(config)
    _architecture(config, source, "config")
    if source.gguf_file is not None:
        return copy.deepcopy(_gguf_config(config, source, _gguf_file(source).stat().st_mtime_ns))
    return _read_config(config, source)


@functools.cache  # parsing the header takes seconds where its conversion cannot be kept; changed: when the file was
def _gguf_config(config: ModelConfig, source: ModelSource, changed: int) -> transformers.PretrainedConfig:
    found = _read_config(config, kept(source, "config", lambda: _read_config(config, source), write_config))
    found.name_or_path = source.name
    return found


def _read_config(config: ModelConfig, source: ModelSource) -> transformers.PretrainedConfig:
    with quiet_loading():
        return _load(config, "config", AutoConfig.from_pretrained, source)


def load_generation_config(config: ModelConfig) -> GenerationConfig:
    """The model's generation config; where it has none, what its configuration implies.

    Raises UserError for one that is there and damaged: it says which tokens end a response.
    """
    source = locate(config)
    if source.gguf_file is not None:
        return GenerationConfig.from_model_config(load_model_config(config))
    place = f"model.path: cannot load the generation config of '{config.path}'"
    with foreign_errors(place):  # of huggingface_hub
        path = source.file("generation_config.json")
    if path is None:
        return GenerationConfig.from_model_config(load_model_config(config))
    values = read_json_object(path, nonfinite=True)
    try:
        tokens = valid(StopTokens, values).eos_token_id
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None
    architecture = _architecture(config, source, "generation config")
    for token in tokens if isinstance(tokens, list) else [tokens]:
        if token is not None and architecture is not None and token >= architecture.vocab_size:
            raise UserError(
                f"{path}: eos_token_id {token:,} is not one of the model's {architecture.vocab_size:,} "
                "tokens; restore the file"
            )
    with quiet_loading(), foreign_errors(place):
        return GenerationConfig.from_dict(values)


def stop_token_ids(generation: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The tokens that end a response by the model's own account: of its generation config and its tokenizer."""
    declared = getattr(generation, "eos_token_id", None)
    return frozenset({*(declared if isinstance(declared, list) else [declared]), tokenizer.eos_token_id} - {None})


def _gguf_file(source: ModelSource) -> Path:
    assert source.gguf_file is not None, "a source without a GGUF file"
    file = source.file(source.gguf_file)
    if file is None:
        raise UserError(f"model.gguf_file: '{source.gguf_file}' is not in {source.name}")
    return file


def _load(config: ModelConfig, what: str, loader: Callable[..., Any], source: ModelSource, **kwargs: Any) -> Any:
    if source.gguf_file is not None:
        kwargs["gguf_file"] = source.gguf_file
    with foreign_errors(f"model.path: cannot load the {what} of '{config.path}'"):
        return loader(
            source.name, revision=config.revision or "main", trust_remote_code=config.trust_remote_code, **kwargs
        )


class quiet_loading:
    """transformers' progress bars and notices stay out of the user's progress view while a model loads."""

    def __enter__(self) -> None:
        self.stderr = contextlib.redirect_stderr(io.StringIO())
        self.stderr.__enter__()
        self.verbosity = transformers.logging.get_verbosity()
        self.bars = transformers.logging.is_progress_bar_enabled()
        transformers.logging.set_verbosity(logging.CRITICAL)  # what it reports as an error, it raises too
        transformers.logging.disable_progress_bar()
        self.warnings = warnings.catch_warnings()
        self.warnings.__enter__()
        warnings.simplefilter("ignore")

    def __exit__(self, *exc: Any) -> None:
        transformers.logging.set_verbosity(self.verbosity)
        if self.bars:
            transformers.logging.enable_progress_bar()
        self.warnings.__exit__(*exc)
        self.stderr.__exit__(*exc)
