"""What every section shares: strict types, no unknown keys, and refusals that name the key at fault."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

__all__ = ["Fault", "Field", "Section", "refusal"]


class Fault(NamedTuple):
    """A value that has the right type and still cannot be used.

    key: path of the key below the section that reports it. value: what was given. text: what would be valid.
    """

    key: tuple[str | int, ...]
    value: Any
    text: str


def refusal(faults: list[Fault]) -> PydanticCustomError:
    """A pydantic error that carries several faults, each with its own key (`faults` in the error's context)."""
    summary = "; ".join(f"{'.'.join(map(str, fault.key))} = {fault.value!r}: {fault.text}" for fault in faults)
    # Doubled braces: pydantic formats the template, and a user's value may contain `{`.
    template = summary.replace("{", "{{").replace("}", "}}")
    return PydanticCustomError("refused", template, {"faults": faults})


class Section(BaseModel):
    """One section of the configuration. Immutable: change a value with an override, or `model_copy(update=...)`."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)

    def faults(self) -> Iterator[Fault]:
        """Combinations of this section's keys that make no sense."""
        yield from ()

    def resolved(self) -> dict[str, Any]:
        """Values for keys left null whose default depends on other keys of the section."""
        return {}

    @model_validator(mode="after")
    def _finish(self) -> Section:
        faults = list(self.faults())
        if faults:
            raise refusal(faults)
        self.__dict__.update(self.resolved())  # the section is frozen for its users, not for itself
        return self
