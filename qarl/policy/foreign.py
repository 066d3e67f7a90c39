"""Other libraries reading files that qarl did not write."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import transformers

from qarl.errors import UserError


@contextmanager
def foreign_errors(place: str) -> Iterator[None]:
    """Turn whatever a library raises over a file into one line. place: what the line starts with; it names the file.

    The one place for a broad `except`: transformers, tokenizers, jinja and gguf check little of what they read, so a
    damaged file ends in any exception at all (tokenizers raises `Exception` itself), and each of them says the same to
    the user: this file cannot be used. qarl's own code does not belong inside.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{place}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())[:300]
    plain = isinstance(error, (OSError, ValueError, RuntimeError, ImportError)) or type(error) is Exception
    return text if plain and text else f"{type(error).__name__}: {text}".rstrip(": ")


class quiet_loading:
    """transformers' progress bars and notices stay out of the user's progress view while a model loads."""

    def __enter__(self) -> None:
        self.stderr = contextlib.redirect_stderr(io.StringIO())
        self.stderr.__enter__()
        self.verbosity = transformers.logging.get_verbosity()
        self.bars = transformers.logging.is_progress_bar_enabled()
        transformers.logging.set_verbosity(logging.CRITICAL)  # what it reports as an error, it raises too
        transformers.logging.disable_progress_bar()
        self.warnings = warnings.catch_warnings()
        self.warnings.__enter__()
        warnings.simplefilter("ignore")

    def __exit__(self, *exc: Any) -> None:
        transformers.logging.set_verbosity(self.verbosity)
        if self.bars:
            transformers.logging.enable_progress_bar()
        self.warnings.__exit__(*exc)
        self.stderr.__exit__(*exc)
