"""From `model.path` to what a model says of itself: where it is, its shape, its configuration, what ends a response."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoConfig, GenerationConfig, PreTrainedTokenizerBase

from qarl.config import ModelConfig
from qarl.config.architecture import Architecture, UnknownFamily, read_config_json, read_gguf
from qarl.config.model_schema import StopTokens, valid
from qarl.config.package_model import PREFIX, UnusableModel, package_gguf
from qarl.errors import UserError
from qarl.inputs.json import read_json_object
from qarl.inputs.paths import path_errors, user_path
from qarl.policy.foreign import foreign_errors, quiet_loading
from qarl.policy.gguf import kept, write_config
from qarl.policy.hub import ModelSource
from qarl.text import visible


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
    return architecture_of(config, locate(config), "config")


def architecture_of(config: ModelConfig, source: ModelSource, what: str) -> Architecture | None:
    """`load_architecture` of a model that was located. what: is being loaded, which errors name."""
    place = f"model.path: cannot load the {what} of '{config.path}'"
    file = source.gguf_file or "config.json"
    with foreign_errors(place):  # of huggingface_hub
        path = source.file(file)
    if path is None:
        raise UserError(f"{place}: there is no {visible(file)}; give a model directory, a hub name, or package:NAME")
    with path_errors(place):
        try:
            return read_gguf(path) if source.gguf_file is not None else read_config_json(path)
        except UnknownFamily:
            return None
        except ValueError as error:  # its message is about the content, not about the path
            raise UserError(f"{place}: {path.name} {error}") from None


def load_model_config(config: ModelConfig) -> transformers.PretrainedConfig:
    """The model's own config.json, or the same read from a GGUF header. Raises UserError when it cannot be used."""
    source = locate(config)
    architecture_of(config, source, "config")
    if source.gguf_file is not None:
        return copy.deepcopy(_gguf_config(config, source, gguf_file_of(source).stat().st_mtime_ns))
    return _read_config(config, source)


@functools.cache  # parsing the header takes seconds where its conversion cannot be kept; changed: when the file was
def _gguf_config(config: ModelConfig, source: ModelSource, changed: int) -> transformers.PretrainedConfig:
    found = _read_config(config, kept(source, "config", lambda: _read_config(config, source), write_config))
    found.name_or_path = source.name
    return found


def _read_config(config: ModelConfig, source: ModelSource) -> transformers.PretrainedConfig:
    return ask_transformers(config, "config", AutoConfig.from_pretrained, source)


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
    architecture = architecture_of(config, source, "generation config")
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


def gguf_file_of(source: ModelSource) -> Path:
    """The GGUF file of a source that is one. Raises UserError where it is not there."""
    assert source.gguf_file is not None, "a source without a GGUF file"
    file = source.file(source.gguf_file)
    if file is None:
        raise UserError(f"model.gguf_file: '{source.gguf_file}' is not in {source.name}")
    return file


def ask_transformers(
    config: ModelConfig, what: str, loader: Callable[..., Any], source: ModelSource, **kwargs: Any
) -> Any:
    """What a `from_pretrained` makes of a source. Raises UserError for whatever it raises, which names `what`."""
    if source.gguf_file is not None:
        kwargs["gguf_file"] = source.gguf_file
    with quiet_loading(), foreign_errors(f"model.path: cannot load the {what} of '{config.path}'", Path(source.name)):
        return loader(
            source.name, revision=config.revision or "main", trust_remote_code=config.trust_remote_code, **kwargs
        )
