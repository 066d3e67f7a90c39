"""From `model.path` to a Hugging Face model with float32 weights, and its tokenizer."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from qarl.config import ModelConfig
from qarl.config.package_model import PREFIX, UnusableModel, package_gguf
from qarl.errors import UserError


@dataclass(frozen=True)
class ModelSource:
    """Where a model is: what `from_pretrained` takes as name, and the GGUF file inside it, if any."""

    name: str
    gguf_file: str | None


def locate(config: ModelConfig) -> ModelSource:
    """Resolve `model.path`: a directory, a hub name, or `package:NAME` (an installed package with one GGUF file)."""
    if config.path.startswith(PREFIX):
        try:
            file = package_gguf(config)
        except UnusableModel as error:
            raise UserError(f"model.{error.key}: '{error.value}': {error.text}") from error
        return ModelSource(str(file.parent), file.name)
    gguf = config.gguf_file
    if gguf is not None and Path(config.path).is_dir() and not (Path(config.path) / gguf).is_file():
        raise UserError(f"model.gguf_file: '{gguf}' is not in {config.path}")
    return ModelSource(config.path, gguf)


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """The tokenizer that belongs to the model. Raises UserError with the reason if there is none."""
    source = locate(config)
    with quiet_loading():
        return _load(config, "tokenizer", AutoTokenizer.from_pretrained, source)


def load_model(config: ModelConfig) -> PreTrainedModel:
    """The causal LM with float32 weights on the CPU, in eval mode. GGUF files are dequantized.

    Raises UserError when there is no model, it cannot be read, or it is a quantized checkpoint.
    """
    source = locate(config)
    if source.gguf_file is None and getattr(load_model_config(config), "quantization_config", None) is not None:
        raise UserError(f"model.path: '{config.path}' is a quantized checkpoint; train from the unquantized model")
    with quiet_loading():
        model = _load(config, "model", AutoModelForCausalLM.from_pretrained, source, dtype=torch.float32)
        if source.gguf_file is not None:
            model = _plain(model)
    return model.float().eval()


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
    """The model's own config.json, or the same read from a GGUF header."""
    source = locate(config)
    if source.gguf_file is not None:
        return copy.deepcopy(_gguf_config(config, source))
    with quiet_loading():
        return _load(config, "config", AutoConfig.from_pretrained, source)


@functools.cache  # parsing the header takes seconds
def _gguf_config(config: ModelConfig, source: ModelSource) -> transformers.PretrainedConfig:
    with quiet_loading():
        return _load(config, "config", AutoConfig.from_pretrained, source)


def load_generation_config(config: ModelConfig) -> GenerationConfig:
    """The model's generation config; where it has none, what its configuration implies."""
    source = locate(config)
    if source.gguf_file is None:
        with quiet_loading(), contextlib.suppress(OSError, ValueError):
            return GenerationConfig.from_pretrained(source.name, revision=config.revision or "main")
    return GenerationConfig.from_model_config(load_model_config(config))


def stop_token_ids(generation: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The tokens that end a response by the model's own account: of its generation config and its tokenizer."""
    declared = getattr(generation, "eos_token_id", None)
    return frozenset({*(declared if isinstance(declared, list) else [declared]), tokenizer.eos_token_id} - {None})


def _load(config: ModelConfig, what: str, loader, source: ModelSource, **kwargs):
    if source.gguf_file is not None:
        kwargs["gguf_file"] = source.gguf_file
    try:
        return loader(source.name, revision=config.revision or "main", trust_remote_code=config.trust_remote_code,
                      **kwargs)  # fmt: skip
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError, StrictDataclassError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"model.path: cannot load the {what} of '{config.path}': {reason}") from error


class quiet_loading:
    """transformers' progress bars and notices stay out of the user's progress view while a model loads."""

    def __enter__(self) -> None:
        self.stderr = contextlib.redirect_stderr(io.StringIO())
        self.stderr.__enter__()
        self.verbosity = transformers.logging.get_verbosity()
        self.bars = transformers.logging.is_progress_bar_enabled()
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        self.warnings = warnings.catch_warnings()
        self.warnings.__enter__()
        warnings.simplefilter("ignore")

    def __exit__(self, *exc) -> None:
        transformers.logging.set_verbosity(self.verbosity)
        if self.bars:
            transformers.logging.enable_progress_bar()
        self.warnings.__exit__(*exc)
        self.stderr.__exit__(*exc)
