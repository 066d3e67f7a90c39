"""A configuration as Python code gives it: a YAML file, a dict, or a `Config`, with values that replace some of it."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qarl.config.config import Config
from qarl.config.load import make_config, read_yaml
from qarl.config.yaml_io import parse_yaml

ConfigSource = str | os.PathLike[str] | Mapping[str, Any] | Config
Overrides = Sequence[str] | Mapping[str, Any]

UNNAMED = "runs/unnamed"  # where a configuration runs that is no file and names no run directory


@dataclass(frozen=True)
class Given:
    """What was given. data: as YAML holds it. place: the file, for messages. overrides: `key.path=value` each."""

    data: Any
    place: str
    overrides: list[str]

    def config(self) -> Config:
        """The configuration. Raises UserError with one line per fault."""
        return make_config(copy.deepcopy(self.data), self.place, self.overrides)


def read_source(source: ConfigSource, overrides: Overrides = ()) -> Given:
    """Read `source`.

    source: a path is read as `qarl train` reads it; a dict has the keys of the YAML, paths and tuples allowed as
    values; a Config is taken with all its values. overrides: `key.path=value` texts, or a dict of key path to value.
    Raises UserError: a file that cannot be read, or is no YAML.
    """
    texts = override_texts(overrides)
    if isinstance(source, (str, os.PathLike)):
        return Given(read_yaml(os.fspath(source), stream=True), os.fspath(source), texts)
    data = parse_yaml(source.to_yaml(), "configuration") if isinstance(source, Config) else _plain(source)
    if isinstance(data, dict) and isinstance(data.get("train"), dict):
        data["train"] = {"run_dir": UNNAMED, **data["train"]}
    return Given(data, "configuration", texts)


def override_texts(overrides: Overrides) -> list[str]:
    """`key.path=value` of each, the value as YAML."""
    if isinstance(overrides, Mapping):
        return [f"{key}={json.dumps(_plain(value), ensure_ascii=False)}" for key, value in overrides.items()]
    return list(overrides)


def _plain(value: Any) -> Any:
    """`value` with what YAML has: dicts, lists and texts in place of other mappings, sequences and paths."""
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value
