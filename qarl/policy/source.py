"""Where the files of `model.path` are: in a directory, in the hub's cache, or converted from a GGUF file.

transformers needs tens of seconds for a GGUF file: it indexes the vocabulary in Python for each of configuration,
tokenizer and weights. So each part is converted once to transformers' own format, with float32 weights, and kept
(`qarl.storage.conversions`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from huggingface_hub import constants, hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from qarl.config import ModelConfig
from qarl.config.model import PREFIX, package_gguf
from qarl.errors import UserError
from qarl.inputs.library_errors import foreign_errors, quiet_loading
from qarl.inputs.paths import path_errors, user_path
from qarl.inputs.tensors import INDEX, SINGLE, shard_names
from qarl.storage.conversions import converted
from qarl.storage.tensorfile import safetensors_chunks, write_file
from qarl.utils.versions import version_of

_VERSION = 1  # of the conversion; increase it if `_write` changes, so that older entries are not used
_CONVERTERS = ("transformers", "tokenizers", "gguf")
_SMALL_BYTES = 64 * 2**20  # upper bound for a configuration or a tokenizer

Part = Literal["config", "tokenizer", "model"]
T = TypeVar("T", PreTrainedConfig, PreTrainedTokenizerBase, PreTrainedModel)


@dataclass(frozen=True)
class ModelSource:
    """A located model."""

    name: str  # directory or hub name, for `from_pretrained`
    gguf_file: str | None  # name of the GGUF file in the directory, if the model is one
    revision: str | None = None  # git revision of a hub model

    def file(self, name: str) -> Path | None:
        """Find one file of the model, or return None. Offline, a file that the cache lacks counts as missing.

        Raises huggingface_hub's errors, for example if the hub cannot be reached.
        """
        directory = Path(self.name)
        with path_errors(self.name):
            if directory.is_dir():
                path = directory / name
                # A dangling link counts as a file: whoever reads it reports it.
                return path if path.exists() or path.is_symlink() else None
        try:
            return Path(hf_hub_download(self.name, name, revision=self.revision))
        except LocalEntryNotFoundError:
            if constants.HF_HUB_OFFLINE:
                return None
            raise
        except EntryNotFoundError:
            return None

    def gguf_path(self) -> Path:
        """The GGUF file. Raises UserError if it is missing."""
        assert self.gguf_file is not None, "not a GGUF model"
        if (path := self.file(self.gguf_file)) is None:
            raise UserError(f"model.gguf_file: '{self.gguf_file}' is not in {self.name}")
        return path

    def directory(self) -> Path:
        """The directory that holds the weights. Downloads a hub model; raises the errors of huggingface_hub."""
        directory = Path(self.name)
        if directory.is_dir():
            return directory
        found = self.file(SINGLE) or self.file(INDEX) or self.file("config.json")
        if found is None:
            return directory
        if found.name == INDEX:
            for shard in shard_names(found):
                self.file(shard)
        return found.parent


def locate(config: ModelConfig) -> ModelSource:
    """Resolve `model.path`: a directory, a hub name, or `package:NAME` (an installed package with one GGUF file)."""
    if config.path.startswith(PREFIX):
        file = package_gguf(config)
        return ModelSource(str(file.parent), file.name)
    directory, gguf = user_path(config.path, "model.path"), config.gguf_file
    with path_errors(f"model.path: '{config.path}'"):
        if not directory.is_dir():
            return ModelSource(config.path, gguf, config.revision)
        if gguf is not None and not (directory / user_path(gguf, "model.gguf_file")).is_file():
            raise UserError(f"model.gguf_file: '{gguf}' is not in {config.path}")
    return ModelSource(str(directory), gguf)


def from_pretrained(config: ModelConfig, part: Part, load: Callable[..., Any], source: ModelSource, **more: Any) -> Any:
    """Call a `from_pretrained` of transformers on a source. Raises UserError for any error that it raises."""
    if source.gguf_file is not None:
        more["gguf_file"] = source.gguf_file
    more |= {"revision": config.revision or "main", "trust_remote_code": config.trust_remote_code}
    with quiet_loading(), foreign_errors(f"model.path: cannot load the {part} of '{config.path}'", Path(source.name)):
        return load(source.name, **more)


def kept(source: ModelSource, part: Part, read: Callable[[], T], size: int = _SMALL_BYTES) -> ModelSource:
    """Convert one part of a GGUF model unless that was done before. Returns the directory of the conversion.

    `read` reads the GGUF file; the result takes about `size` bytes on disk. Returns `source` itself if it is not a GGUF
    file, or if its conversion cannot be kept.
    """
    if source.gguf_file is None or (file := source.file(source.gguf_file)) is None:
        return source
    versions = {"qarl": str(_VERSION)} | {name: version_of(name) or "none" for name in _CONVERTERS}
    directory = converted(file, part, versions, read, _write, size)
    return source if directory is None else ModelSource(str(directory), None)


def _write(value: PreTrainedConfig | PreTrainedTokenizerBase | PreTrainedModel, directory: Path) -> None:
    """Write a configuration or a tokenizer; or a model's configuration and parameters, tied ones once."""
    if not isinstance(value, PreTrainedModel):
        value.save_pretrained(directory)
        return
    value.config.save_pretrained(directory)
    tensors = {name: parameter.detach() for name, parameter in value.named_parameters()}
    write_file(directory / SINGLE, safetensors_chunks(tensors))
