"""Configurations given in Python: a YAML file, a dict or a `Config`, with overrides."""

import copy
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qarl.config.config import Config
from qarl.config.load import make_config, read_yaml
from qarl.config.yaml_io import parse_yaml
from qarl.inputs.paths import AnyPath

ConfigSource = AnyPath | Mapping[str, Any] | Config
Overrides = Sequence[str] | Mapping[str, Any]

UNNAMED = "runs/unnamed"  # run directory of a configuration that has neither a file nor train.run_dir


@dataclass(frozen=True)
class Given:
    """A configuration source. data: As parsed YAML. place: File name. overrides: `key.path=value` texts."""

    data: Any
    place: str
    overrides: list[str]

    def config(self) -> Config:
        """Validate. Raises UserError with one line per fault."""
        return make_config(copy.deepcopy(self.data), self.place, self.overrides)


def read_source(source: ConfigSource, overrides: Overrides = ()) -> Given:
    """Read `source`.

    Args:
        source: A path, read as `qarl train` does; a dict with the keys of the YAML, which may also hold paths and
            tuples; or a Config.
        overrides: `key.path=value` texts, or a dict of key path to value.

    Raises:
        UserError: The file cannot be read or is not YAML.
    """
    texts = override_texts(overrides)
    if isinstance(source, (str, os.PathLike)):
        return Given(read_yaml(os.fspath(source), stream=True), os.fspath(source), texts)
    data = parse_yaml(source.to_yaml(), "configuration") if isinstance(source, Config) else _plain(source)
    if isinstance(data, dict) and isinstance(data.get("train"), dict):
        data["train"] = {"run_dir": UNNAMED, **data["train"]}
    return Given(data, "configuration", texts)


def override_texts(overrides: Overrides) -> list[str]:
    """Format overrides as `key.path=value` texts with YAML values."""
    if isinstance(overrides, Mapping):
        return [f"{key}={json.dumps(_plain(value), ensure_ascii=False)}" for key, value in overrides.items()]
    return list(overrides)


def _plain(value: Any) -> Any:
    """Convert mappings, sequences and paths to the dicts, lists and texts of YAML."""
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value
