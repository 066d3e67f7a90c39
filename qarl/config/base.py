"""What every section shares: strict types, no unknown keys, and refusals that name the key at fault."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, ClassVar, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from qarl.config.limits import DEPTH, VALUES
from qarl.inputs.paths import path_fault

__all__ = ["Fault", "Field", "Renamed", "Replaced", "Section", "path_faults", "refusal"]


class Fault(NamedTuple):
    """A value that has the right type and still cannot be used.

    key: path of the key below the section that reports it. value: what was given. text: what would be valid.
    """

    key: tuple[str | int, ...]
    value: Any
    text: str


class Renamed(NamedTuple):
    """What a key of an earlier version is called now. values: new names of its values, where those changed."""

    key: str
    values: Mapping[str, str]


class Replaced(NamedTuple):
    """Values of an earlier version that another one replaces. key: full path. values: old value -> new value."""

    key: str
    values: Mapping[str, str]


@cache  # once per process
def notice(text: str) -> None:
    """Log one line about the configuration, on the first rank."""
    if os.environ.get("RANK", "0") == "0":
        logging.getLogger("qarl.config").warning(text)


def refusal(faults: list[Fault]) -> PydanticCustomError:
    """A pydantic error that carries several faults, each with its own key (`faults` in the error's context)."""
    summary = "; ".join(f"{'.'.join(map(str, fault.key))} = {fault.value!r}: {fault.text}" for fault in faults)
    # Doubled braces: pydantic formats the template, and a user's value may contain `{`.
    template = summary.replace("{", "{{").replace("}", "}}")
    return PydanticCustomError("refused", template, {"faults": faults})


def path_faults(key: str, text: str | None) -> Iterator[Fault]:
    """Why a text can be no path, on any machine; a home directory (`~name`) is looked up where the path is used."""
    if text is not None and (fault := path_fault(text, home=False)):
        yield Fault((key,), text, fault)


def value_faults(value: Any, key: tuple[str | int, ...]) -> Iterator[Fault]:
    """Texts that no file can hold, and what is nested or large beyond use, in the values of a section. No recursion.

    A value of a section is a number, text, or lists and mappings of them; sections in it have seen to themselves.
    """
    pending, count = [(key, value, 0)], 0
    while pending:
        here, part, depth = pending.pop()
        count += 1
        if isinstance(part, str):
            if not _encodes(part):
                yield Fault(here, part, "holds a lone surrogate, which is no character; write the character itself")
        elif isinstance(part, int) and not -(2**63) <= part < 2**63:
            yield Fault(here, f"{'-' if part < 0 else ''}2^{part.bit_length()}", "must fit 64 bits")
        elif isinstance(part, (list, tuple, dict)):
            if depth == DEPTH:
                yield Fault(key, "...", f"is nested deeper than {DEPTH} levels")
                return
            for name in part if isinstance(part, dict) else ():
                if not _encodes(name):
                    yield Fault(here, name, "is a key with a lone surrogate, which is no character")
            items = part.items() if isinstance(part, dict) else enumerate(part)
            pending += [((*here, name), child, depth + 1) for name, child in items]
        if count > VALUES:
            yield Fault(key, "...", f"holds more than {VALUES:,} values")
            return


def _encodes(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class Section(BaseModel):
    """One section of the configuration. Immutable: change a value with an override, or `model_copy(update=...)`.

    renamed: what earlier versions called its keys and their values; they are refused with the new names.
    replaced: values that earlier versions had, by key; they are accepted with a notice.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)
    renamed: ClassVar[Mapping[str, Renamed]] = {}
    replaced: ClassVar[Mapping[str, Replaced]] = {}

    def faults(self) -> Iterator[Fault]:
        """Combinations of this section's keys that make no sense."""
        yield from ()

    def resolved(self) -> dict[str, Any]:
        """Values for keys left null whose default depends on other keys of the section."""
        return {}

    @model_validator(mode="before")
    @classmethod
    def _refuse_old_names(cls, data: Any) -> Any:
        faults = []
        for old, (new, values) in cls.renamed.items() if isinstance(data, dict) else ():
            if old in data:
                known = values.get(str(data[old]))
                fix = f"; write {new}: {known}" if known else ""
                faults.append(Fault((old,), data[old], f"is called {new} now{fix}"))
            elif (known := values.get(str(data.get(new)), data.get(new))) != data.get(new):
                faults.append(Fault((new,), data[new], f"is called {known} now"))
        if faults:
            raise refusal(faults)
        return data

    @model_validator(mode="before")
    @classmethod
    def _accept_old_values(cls, data: Any) -> Any:
        for name, (key, values) in cls.replaced.items() if isinstance(data, dict) else ():
            given = data.get(name)
            if isinstance(given, str) and given in values:
                notice(f"{key}: {given} is no longer supported; using {values[given]}, which gives the same results")
                data = data | {name: values[given]}
        return data

    @model_validator(mode="after")
    def _finish(self) -> Section:
        values = [fault for name in type(self).model_fields for fault in value_faults(getattr(self, name), (name,))]
        faults = values or list(self.faults())
        if faults:
            raise refusal(faults)
        self.__dict__.update(self.resolved())  # the section is frozen for its users, not for itself
        return self
