"""Sections of the configuration by their keys, as YAML gives them."""

from typing import Any

from pydantic import TypeAdapter

from qarl.config import ObjectiveConfig
from qarl.config.objective import AnyObjective

_OBJECTIVE: TypeAdapter[ObjectiveConfig] = TypeAdapter(AnyObjective)


def objective_config(**keys: Any) -> ObjectiveConfig:
    """Return the `objective` section with these keys; without `name`, the default objective."""
    return _OBJECTIVE.validate_python(keys)
