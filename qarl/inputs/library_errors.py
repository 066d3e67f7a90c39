"""Errors and output of libraries that read files which qarl did not write."""

import io
import logging
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path

import transformers
from huggingface_hub.errors import LocalEntryNotFoundError

from qarl.errors import UserError
from qarl.inputs.json import flatten, read_json_object

DOCUMENTS = ("config.json", "generation_config.json", "tokenizer_config.json")


@contextmanager
def foreign_errors(place: str, directory: Path | None = None) -> Iterator[None]:
    """Turn any error that a library raises while reading a file into a one-line UserError.

    This is the only place for a broad `except`. transformers, tokenizers, jinja and gguf validate little, so a damaged
    file can raise any exception, even `Exception` itself. Keep qarl's own code out of the block.

    Args:
        place: Start of the message: the file.
        directory: A model's directory. If the library's message is only a key or value, the files in it are searched
            for that, and the message names the one that contains it.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{place}: {_reason(error, directory)}") from error


def _reason(error: Exception, directory: Path | None) -> str:
    """Describe an error in a sentence. The text of a KeyError is only a key; that of a TypeError is about code."""
    if isinstance(error, LocalEntryNotFoundError):  # its own text does not mention directories
        return "no such directory, not in the hub's local cache, and the hub does not answer; check name and connection"
    text = " ".join(str(error).split())[:300]
    plain = isinstance(error, (OSError, ValueError, RuntimeError, ImportError)) or type(error) is Exception
    if plain and text:
        return text
    library = _library(error)
    if not isinstance(error, KeyError):
        described = f"{type(error).__name__}: {text}".rstrip(": ")
        return f"{library} cannot use the files ({described}); restore the model's own files"
    key = error.args[0] if error.args else ""
    if " " in str(key):  # transformers raises KeyError with whole sentences
        return " ".join(str(key).split())[:300]
    found = [] if directory is None else [entry for name in DOCUMENTS for entry in _entries(directory / name, key)]
    if found:
        return f"{found[0]}, which {library} does not know; correct it, or restore the file"
    return f"{library} needs the entry {key!r}, which the files do not have; restore the model's own files"


def _library(error: Exception) -> str:
    """Return the name of the package whose code raised an error."""
    frames = list(traceback.walk_tb(error.__traceback__))
    names = [str(frame.f_globals.get("__name__", "")).partition(".")[0] for frame, _ in frames]
    return next((name for name in reversed(names) if name not in ("", "qarl")), "a library")


def _entries(path: Path, value: object) -> list[str]:
    """Return `FILE: KEY = "value"` for each entry of a JSON file that has this value."""
    try:
        document = read_json_object(path, big_integers=True, nonfinite=True)
    except UserError:
        return []
    return [f'{path.name}: {key} = "{value}"' for key, found in flatten(document).items() if found == value]


@contextmanager
def quiet_loading() -> Iterator[None]:
    """Hide the progress bars and notices of transformers while a model loads."""
    verbosity, bars = transformers.logging.get_verbosity(), transformers.logging.is_progress_bar_enabled()
    with redirect_stderr(io.StringIO()), warnings.catch_warnings(action="ignore"):
        transformers.logging.set_verbosity(logging.CRITICAL)  # whatever it logs as an error it also raises
        transformers.logging.disable_progress_bar()
        try:
            yield
        finally:
            transformers.logging.set_verbosity(verbosity)
            if bars:
                transformers.logging.enable_progress_bar()
