"""Load a `Config` from a YAML file and overrides. Errors have one line per fault."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from qarl.config.config import Config
from qarl.config.messages import Loc, validated
from qarl.config.overrides import KeyPath, apply_overrides, override_keys
from qarl.config.yaml_io import YAML_BYTES, parse_yaml
from qarl.errors import UserError
from qarl.inputs.files import NoSuchFile, Unreadable, read_text
from qarl.inputs.paths import user_path
from qarl.utils.text import visible

SHORT = YAML_BYTES // 16  # characters of JSON; a shorter configuration stays within YAML's limits with its defaults


def load_config(path: str | Path, overrides: list[str] | None = None) -> Config:
    """Read, override and validate a configuration.

    If train.run_dir is not set, it becomes runs/<stem of path>. The resolved configuration therefore refers to the same
    run when it is copied to another file name.

    Args:
        path: A YAML file or a pipe.
        overrides: `key.path=value` texts; the value is parsed as YAML.

    Raises:
        UserError: One line per fault.
    """
    return make_config(read_yaml(path, stream=True), path, overrides)


def make_config(data: Any, path: str | Path, overrides: list[str] | None = None) -> Config:
    """Like `load_config`, from the parsed content of the file. Modifies `data`."""
    path = Path(path)
    place = visible(str(path))
    if data is None:
        raise UserError(f"{place}: the file is empty; a configuration needs model, data, reward and train")
    if not isinstance(data, dict):
        raise UserError(f"{place}: holds a {type(data).__name__}; must be a mapping of sections (model, quant, ...)")
    if "variants" in data:
        raise UserError(f"{place}: is a study of several runs; give it to `qarl compare`")
    overrides = overrides or []
    apply_overrides(data, overrides)
    train = data.get("train")
    if isinstance(train, dict) and train.get("run_dir") is None:
        train["run_dir"] = f"runs/{path.stem}"
    keys = override_keys(overrides)
    return validate(data, lambda loc: key_place(loc, place, keys))


def validate(data: dict[str, Any], place: Callable[[Loc], str]) -> Config:
    """Validate `data` as a configuration.

    Args:
        data: The parsed YAML.
        place: Returns where the value of a key was given, for messages.

    Raises:
        UserError: One line per fault, or the configuration with its defaults is too large to be read back.
    """
    config = validated(Config, data, place)
    if len(json.dumps(data, default=str)) > SHORT:
        text = config.to_yaml()
        if (length := len(text.encode())) > YAML_BYTES:
            most = f"at most {YAML_BYTES:,} are possible"
            raise UserError(f"{place(())}: takes {length:,} bytes with its defaults; {most}")
        parse_yaml(text, f"{place(())}: with its defaults")
    return config


def read_yaml(path: str | Path, stream: bool = False) -> Any:
    """Parse a YAML file. stream: Allow a pipe. Raises UserError if it cannot be read or is not YAML."""
    file, place = user_path(path, "CONFIG"), visible(str(path))
    try:
        return parse_yaml(read_text(file, YAML_BYTES, stream), place)
    except Unreadable as error:
        fix = "; give the path of a YAML configuration, see configs/" if isinstance(error, NoSuchFile) else ""
        raise UserError(f"{place}: {error.reason}{fix}") from None


def key_place(loc: Loc, file: str, overridden: set[KeyPath]) -> str:
    """Where the value of a key was given: the file, or the command line if an override set it or a section above it."""
    keys = tuple(map(str, loc))
    given = any(all(ours == theirs for ours, theirs in zip(keys, path, strict=False)) for path in overridden)
    return "command line" if keys and given else file
