"""Sections of the configuration by their keys, as YAML gives them."""

from typing import Any

from pydantic import TypeAdapter

from qarl.config import ObjectiveConfig
from qarl.config.objective import AnyObjective

_OBJECTIVE: TypeAdapter[ObjectiveConfig] = TypeAdapter(AnyObjective)


def objective_config(**keys: Any) -> ObjectiveConfig:
    """The `objective` section of these keys; the default objective without a name."""
    return _OBJECTIVE.validate_python(keys)
