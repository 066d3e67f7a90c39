"""GGUF files as Hugging Face directories: the parts of one are converted once and kept, see `qarl.storage.conversions`.

transformers reads a GGUF file in tens of seconds: it indexes the vocabulary in Python each time it is asked for the
configuration, the tokenizer or the weights. What it made of the file is kept in its own formats, weights in float32,
and read back as any other model is.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Literal, TypeVar

from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from qarl.policy.hub import ModelSource
from qarl.storage.conversions import converted
from qarl.storage.tensorfile import safetensors_chunks, write_file

VERSION = 1  # of the conversion below: another one makes other entries
_CONVERTERS = ("transformers", "tokenizers", "gguf")
_TEXT_BYTES = 64 * 2**20  # of a tokenizer, far above any

Part = Literal["config", "tokenizer", "model"]
T = TypeVar("T", PreTrainedConfig, PreTrainedTokenizerBase, PreTrainedModel)


def kept(
    source: ModelSource, part: Part, read: Callable[[], T], write: Callable[[T, Path], None], size: int = _TEXT_BYTES
) -> ModelSource:
    """Where a part of a model is read from: `source` itself, or for a GGUF file the directory it was converted to.

    read: of the GGUF file; called where it is not converted yet. write: one of this module's. size: bytes it will take.
    A GGUF file whose conversion cannot be kept is read itself.
    """
    if source.gguf_file is None or (file := source.file(source.gguf_file)) is None:
        return source
    versions = {"qarl": str(VERSION)} | {name: _version(name) for name in _CONVERTERS}
    directory = converted(file, part, versions, read, write, size)
    return source if directory is None else ModelSource(str(directory), None)


def write_config(config: PreTrainedConfig, directory: Path) -> None:
    config.save_pretrained(directory)


def write_tokenizer(tokenizer: PreTrainedTokenizerBase, directory: Path) -> None:
    tokenizer.save_pretrained(directory)


def write_model(model: PreTrainedModel, directory: Path) -> None:
    """The parameters as they are, tied ones once, and the configuration."""
    model.config.save_pretrained(directory)
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    write_file(directory / "model.safetensors", safetensors_chunks(tensors))


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"
