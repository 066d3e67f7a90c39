"""From a YAML file and overrides to a `Config`, or to one line per fault."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from qarl.config.config import Config
from qarl.config.messages import Loc, fault_lines
from qarl.config.overrides import KeyPath, apply_overrides, override_keys
from qarl.config.yaml_io import parse_yaml
from qarl.errors import UserError


def load_config(path: str | Path, overrides: list[str] | None = None) -> Config:
    """Read, override and validate a configuration.

    path: a YAML file. overrides: `key.path=value`, the value read as YAML. A run directory that is not given becomes
    runs/<stem of path>, and stands in the result, so that a copy of it elsewhere still names the same run.
    Raises UserError with one line per fault.
    """
    path = Path(path)
    data = read_yaml(path)
    if data is None:
        raise UserError(f"{path}: the file is empty; a configuration needs model, data, reward and train")
    if not isinstance(data, dict):
        raise UserError(f"{path}: holds a {type(data).__name__}; must be a mapping of sections (model, quant, ...)")
    if "variants" in data:
        raise UserError(f"{path}: is a study of several runs; give it to `qarl compare`")
    overrides = overrides or []
    apply_overrides(data, overrides)
    train = data.get("train")
    if isinstance(train, dict) and train.get("run_dir") is None:
        train["run_dir"] = f"runs/{path.stem}"
    keys = override_keys(overrides)
    return validate(data, lambda loc: key_place(loc, str(path), keys))


def validate(data: dict[str, Any], place: Callable[[Loc], str]) -> Config:
    """The configuration that `data` describes. place: where a key's value was given, for messages.

    Raises UserError with one line per fault.
    """
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        raise UserError("\n".join(fault_lines(error, Config, data, place))) from None


def read_yaml(path: str | Path) -> Any:
    """What a YAML file holds. Raises UserError where it cannot be read or is not YAML."""
    return parse_yaml(_read(Path(path)), str(path))


def key_place(loc: Loc, file: str, overridden: set[KeyPath]) -> str:
    """Where the value of a key was given: the file, or the command line."""
    return "command line" if any(loc[: len(path)] == path for path in overridden) else file


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; give the path of a YAML configuration, see configs/") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text (byte {error.start}); give a YAML configuration") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}; give a YAML file") from None
