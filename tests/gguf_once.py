"""A GGUF file parsed once: the loaders of a model, of its configuration and of its tokenizer each parse it whole."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def parsed_once() -> Iterator[None]:
    """Meanwhile no file may change. transformers also asks for one list of names again for every module of a model."""
    import gguf

    with pytest.MonkeyPatch.context() as patch:
        for name in ("GGUFReader", "get_tensor_name_map"):
            patch.setattr(gguf, name, functools.cache(getattr(gguf, name)))
        yield
