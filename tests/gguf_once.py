"""A GGUF file parsed once: the loaders of a model, of its configuration and of its tokenizer each parse it whole."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def parsed_once() -> Iterator[None]:
    """Meanwhile no file may change. transformers also asks for one list of names again for every module of a model."""
    import gguf
    from transformers import modeling_gguf_pytorch_utils as loading

    def parsed(value: Any, types: list[int]) -> Any:
        """A file's vocabulary is 100,000 strings, each an array that nobody changes: one object for all times."""
        if (found := values.get(id(value))) is None:
            found = values[id(value)] = value, parse(value, types)
        return found[1]

    values: dict[int, tuple[Any, Any]] = {}
    parse = loading._gguf_parse_value
    with pytest.MonkeyPatch.context() as patch:
        for name in ("GGUFReader", "get_tensor_name_map"):
            patch.setattr(gguf, name, functools.cache(getattr(gguf, name)))
        patch.setattr(loading, "_gguf_parse_value", parsed)
        yield
