"""The small files of a model: its architecture, configuration, generation config and stop tokens."""

from __future__ import annotations

import copy
import functools

import transformers
from transformers import AutoConfig, GenerationConfig, PreTrainedTokenizerBase

from qarl.config import ModelConfig
from qarl.config.architecture import FAMILIES, Architecture, UnknownFamily, read_config_json, read_gguf
from qarl.config.model_schema import StopTokens, valid
from qarl.errors import UserError
from qarl.inputs.json import read_json_object
from qarl.inputs.library_errors import foreign_errors, quiet_loading
from qarl.inputs.paths import path_errors
from qarl.policy.source import ModelSource, from_pretrained, kept, locate
from qarl.utils.text import visible


def load_architecture(config: ModelConfig, what: str = "config") -> Architecture | None:
    """Read the model's shape from its config.json or GGUF header. Returns None for a family that qarl does not know.

    Raises UserError if the file is missing or invalid; `what` names it in the message.
    """
    source = locate(config)
    place, file = f"model.path: cannot load the {what} of '{config.path}'", source.gguf_file or "config.json"
    with foreign_errors(place):
        path = source.file(file)
    if path is None:
        raise UserError(f"{place}: there is no {visible(file)}; give a model directory, a hub name, or package:NAME")
    with path_errors(place):
        try:
            return read_gguf(path) if source.gguf_file is not None else read_config_json(path)
        except UnknownFamily:
            return None
        except ValueError as error:  # describes the content, without the path
            raise UserError(f"{place}: {path.name} {error}") from None


def load_model_config(config: ModelConfig) -> transformers.PretrainedConfig:
    """Load config.json, or the same values from a GGUF header. Raises UserError if it cannot be used."""
    source = locate(config)
    load_architecture(config)
    if source.gguf_file is not None:
        return copy.deepcopy(_gguf_config(config, source, source.gguf_path().stat().st_mtime_ns))
    return from_pretrained(config, "config", AutoConfig.from_pretrained, source)


def context_length(config: ModelConfig, place: str, limit: int | None = None) -> int:
    """Return the context length in tokens, at most `limit`.

    Raises UserError, which begins with `place`, if the model's configuration does not state it.
    """
    own: int | None = getattr(load_model_config(config), "max_position_embeddings", None)
    if own is None:
        raise UserError(
            f"{place}: its configuration has no max_position_embeddings; use a model of {', '.join(FAMILIES)}"
        )
    return min(own, limit or own)


@functools.cache  # if the conversion cannot be kept, each call would parse the header for seconds
def _gguf_config(config: ModelConfig, source: ModelSource, modified_ns: int) -> transformers.PretrainedConfig:
    def read(source: ModelSource = source) -> transformers.PretrainedConfig:
        return from_pretrained(config, "config", AutoConfig.from_pretrained, source)

    found = read(kept(source, "config", read))
    found.name_or_path = source.name
    return found


def plain_config(config: transformers.PretrainedConfig) -> transformers.PretrainedConfig:
    """Return the configuration without the `quantization_config` of a quantized checkpoint or a GGUF file."""
    values = {key: value for key, value in config.to_dict().items() if key != "quantization_config"}
    return type(config).from_dict(values)


def load_generation_config(config: ModelConfig) -> GenerationConfig:
    """Load generation_config.json; without one, derive it from the model's configuration.

    Raises UserError for a damaged file, which transformers would ignore along with its stop tokens.
    """
    source = locate(config)
    place = f"model.path: cannot load the generation config of '{config.path}'"
    with foreign_errors(place):
        path = None if source.gguf_file is not None else source.file("generation_config.json")
    if path is None:
        return GenerationConfig.from_model_config(load_model_config(config))
    values = read_json_object(path, nonfinite=True)
    try:
        tokens = valid(StopTokens, values).eos_token_id
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None
    architecture = load_architecture(config, "generation config")
    for token in tokens if isinstance(tokens, list) else [tokens]:
        if token is not None and architecture is not None and token >= architecture.vocab_size:
            size = f"{architecture.vocab_size:,}"
            raise UserError(f"{path}: eos_token_id {token:,} is not one of the model's {size} tokens; restore the file")
    with quiet_loading(), foreign_errors(place):
        return GenerationConfig.from_dict(values)


def stop_token_ids(generation: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The tokens that end a response, according to the generation config and the tokenizer."""
    declared = getattr(generation, "eos_token_id", None)
    return frozenset({*(declared if isinstance(declared, list) else [declared]), tokenizer.eos_token_id} - {None})
