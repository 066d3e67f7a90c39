"""Other libraries reading files that qarl did not write."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr

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


@contextmanager
def quiet_loading() -> Iterator[None]:
    """transformers' progress bars and notices stay out of the user's progress view while a model loads."""
    verbosity, bars = transformers.logging.get_verbosity(), transformers.logging.is_progress_bar_enabled()
    with redirect_stderr(io.StringIO()), warnings.catch_warnings(action="ignore"):
        transformers.logging.set_verbosity(logging.CRITICAL)  # what it reports as an error, it raises too
        transformers.logging.disable_progress_bar()
        try:
            yield
        finally:
            transformers.logging.set_verbosity(verbosity)
            if bars:
                transformers.logging.enable_progress_bar()
