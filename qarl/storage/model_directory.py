"""What a Hugging Face model directory holds beside its tensors: tokenizer, chat template, config.json."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from qarl_formats.compressed import quantization_config
from qarl_formats.scheme import Scheme
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedTokenizerBase

from qarl.experts import EXPERT_NAMES

RECORD_BYTES = 512  # of one tensor's lines in headers, index and manifest, at most
DOCUMENT_BYTES = 2**16  # card and configurations


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, directory: Path) -> None:
    """Tokenizer files and chat template, durably. Raises OSError."""
    try:
        tokenizer.save_pretrained(directory)
    except Exception as error:  # the tokenizers library has no narrower one for a disk that refuses
        if "os error" not in str(error):
            raise
        raise OSError(str(error)) from error
    for path in files_in(directory):
        with open(path) as file:
            os.fsync(file.fileno())


def files_in(directory: Path) -> list[Path]:
    """Every file of a directory and those below it, sorted."""
    return sorted(path for path in directory.rglob("*") if path.is_file())


def config_document(
    config: PreTrainedConfig, dtype: torch.dtype, scheme: Scheme, ignore: list[str], unpacked: bool = False
) -> dict[str, Any]:
    """config.json of a checkpoint in `scheme`. config: of the unquantized model, not changed. unpacked: see
    `qarl_formats.compressed.tensor_specs`. Routers and gates of shared experts, which no scheme quantizes, are ignored
    beside `ignore`."""
    config = type(config).from_dict(config.to_dict())
    config.dtype = dtype
    if not config.architectures:  # GGUF headers do not name the class
        with torch.device("meta"):
            config.architectures = [type(AutoModelForCausalLM.from_config(config)).__name__]
    values = json.loads(config.to_json_string())
    if scheme.quantized:
        experts = EXPERT_NAMES.get(config.model_type)
        if experts is not None:
            ignore = [*ignore, *(entry for entry in experts.unquantized() if entry not in ignore)]
        values["quantization_config"] = quantization_config(scheme, ignore, unpacked)
    return values
