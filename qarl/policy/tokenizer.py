"""What a tokenizer must be before anything is tokenized with it: its files whole, and its tokens those of the model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from qarl.config.architecture import Architecture
from qarl.errors import UserError
from qarl.inputs.files import read_prefix, read_text
from qarl.inputs.json import json_kind, read_json
from qarl.policy.foreign import foreign_errors

_OBJECTS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.json")
_TEXTS = ("chat_template.jinja", "merges.txt")
_LARGE = ("tokenizer.json", "vocab.json", "tokenizer.model")  # which their readers judge


def check_files(directory: Path) -> None:
    """Raise UserError for a file of the tokenizer that is there and cannot be read: transformers passes over some, and
    with them over the chat template and the end of a response."""
    for name in (*_OBJECTS, *_TEXTS, *_LARGE):
        path = directory / name
        if not path.exists() and not path.is_symlink():
            continue
        if name in _OBJECTS:
            # The length that stands for none is an integer of 31 digits.
            if not isinstance(value := read_json(path, big_integers=True, nonfinite=True), dict):
                raise UserError(f"{path}: holds {json_kind(value)}, expected an object; restore it")
        elif name in _TEXTS:
            read_text(path)
        else:
            read_prefix(path, 1)


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, place: str, architecture: Architecture | None) -> None:
    """Raise UserError for a tokenizer that does not work, or gives tokens that the model lacks.

    place: what the line starts with. architecture: of the model, None where it is not known.
    """
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
    # A token that was added may lie outside: transformers adds some itself, and only a text that spells it has it.
    own = vocabulary.keys() - tokenizer.get_added_vocab().keys() | {tokenizer.bos_token, tokenizer.eos_token}
    ids = {token: vocabulary[token] for token in own if token in vocabulary}
    largest, size = max(ids, key=lambda token: ids[token], default=None), architecture.vocab_size
    if largest is not None and ids[largest] >= size:
        raise UserError(
            f"{place}: it gives {largest!r} the id {ids[largest]:,}, and the model has {size:,} tokens; "
            "use the model's own tokenizer"
        )
