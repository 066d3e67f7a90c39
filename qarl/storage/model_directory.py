"""The files of a Hugging Face model directory other than tensors: tokenizer, chat template, config.json."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from qarl_formats.compressed import quantization_config
from qarl_formats.scheme import Scheme
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase

from qarl.storage.disk import atomic_write_text
from qarl.utils.expert_names import EXPERT_NAMES

RECORD_BYTES = 512  # upper bound for one tensor's entries in headers, index and manifest
DOCUMENT_BYTES = 2**16  # card and configurations
TOKENIZER_CLASS_5, TOKENIZER_CLASS_4 = "TokenizersBackend", "PreTrainedTokenizerFast"  # one class, two names


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, directory: Path) -> None:
    """Write the tokenizer files and the chat template, durably.

    Args:
        tokenizer: The tokenizer to save.
        directory: An existing or new directory.

    Raises:
        OSError: The disk refuses.
    """
    try:
        tokenizer.save_pretrained(directory)
    except Exception as error:  # the tokenizers library raises nothing narrower if the disk refuses
        if "os error" not in str(error):
            raise
        raise OSError(str(error)) from error
    for path in files_in(directory):
        with open(path) as file:
            os.fsync(file.fileno())


def name_older_class(tokenizer: PreTrainedTokenizerBase, directory: Path, base_class: str | None) -> None:
    """Rewrite tokenizer_config.json with names that transformers 4 knows, durably. Exports need it; a sampler does not.

    transformers 5 saves most tokenizers as `TokenizersBackend` with a list `extra_special_tokens`; transformers 4
    refuses both. The class becomes the base's if transformers 5 builds the same tokenizer from it. Otherwise it becomes
    `PreTrainedTokenizerFast`, which both read from tokenizer.json alone.

    Args:
        tokenizer: The tokenizer that `save_tokenizer` wrote.
        directory: Where it wrote it.
        base_class: `tokenizer_class` of the tokenizer_config.json that the tokenizer was loaded from, if there is one.

    Raises:
        OSError: The disk refuses.
    """
    path = directory / "tokenizer_config.json"
    values = json.loads(path.read_text())
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if values.get("tokenizer_class") != TOKENIZER_CLASS_5 or backend is None:
        return
    if isinstance(extra := values.get("extra_special_tokens"), list):
        del values["extra_special_tokens"]
        values["additional_special_tokens"] = extra
    values.setdefault("model_input_names", tokenizer.model_input_names)  # 4's default has token_type_ids
    for name in (base_class, TOKENIZER_CLASS_4):
        if name in (None, TOKENIZER_CLASS_5):
            continue
        values["tokenizer_class"] = name
        atomic_write_text(path, json.dumps(values, indent=2, ensure_ascii=False) + "\n")
        again = AutoTokenizer.from_pretrained(directory)
        if again.backend_tokenizer.to_str() == backend.to_str():
            return
    raise AssertionError(f"{path}: {TOKENIZER_CLASS_4} reads another tokenizer than was saved")


def files_in(directory: Path) -> list[Path]:
    """Return all files below a directory, sorted."""
    return sorted(path for path in directory.rglob("*") if path.is_file())


def config_document(
    config: PreTrainedConfig, dtype: torch.dtype, scheme: Scheme, ignore: list[str], unpacked: bool = False
) -> dict[str, Any]:
    """Return config.json of a checkpoint in `scheme`, for transformers 4 and 5.

    Args:
        config: Configuration of the unquantized model; not changed.
        dtype: Dtype of the tensors that the scheme leaves unquantized.
        scheme: Quantization scheme.
        ignore: Modules that are not quantized. Routers and the gates of shared experts are added; no scheme quantizes
            them.
        unpacked: Store int4 codes one per byte; see `Scheme.tensor_specs`.
    """
    config = type(config).from_dict(config.to_dict())
    config.dtype = dtype
    if not config.architectures:  # GGUF headers do not name the class
        with torch.device("meta"):
            config.architectures = [type(AutoModelForCausalLM.from_config(config)).__name__]
    values = json.loads(config.to_json_string())
    values |= _older_fields(values, config.attribute_map)
    if scheme.quantized:
        experts = EXPERT_NAMES.get(config.model_type)
        if experts is not None:
            ignore = [*ignore, *(entry for entry in experts.unquantized() if entry not in ignore)]
        values["quantization_config"] = quantization_config(scheme, ignore, unpacked)
    return values


def _older_fields(values: Mapping[str, Any], renamed: Mapping[str, str]) -> dict[str, Any]:
    """Return fields that transformers 5 renamed, under the names that transformers 4 reads.

    Without them transformers 4 silently takes its defaults: rope_theta 10000, no scaling, float32, 128 experts.

    Args:
        values: config.json as transformers 5 writes it.
        renamed: Older name to present name, the configuration class's `attribute_map`.
    """
    found = {old: values[new] for old, new in renamed.items() if new in values}
    found["torch_dtype"] = values["dtype"]
    rope = values.get("rope_parameters")
    if isinstance(rope, dict) and "rope_theta" in rope:
        scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
        found["rope_theta"] = rope["rope_theta"]
        found["rope_scaling"] = scaling if scaling.get("rope_type", "default") != "default" else None
    return found
