"""Base class of all sections: strict types, no unknown keys, and errors that name the invalid key."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Annotated, Any, ClassVar, NamedTuple

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from qarl.inputs.limits import DEPTH, NAME, VALUES
from qarl.inputs.paths import PATH_BYTES, path_fault

__all__ = ["Fault", "Field", "Name", "PathName", "Renamed", "Section", "notice", "path_faults", "refusal"]


class Fault(NamedTuple):
    """A value that has the right type but is invalid.

    Attributes:
        key: Path of the key, relative to the section that reports the fault.
        value: The given value.
        text: Which values are valid.
    """

    key: tuple[str | int, ...]
    value: Any
    text: str


class Renamed(NamedTuple):
    """New name of a key that an earlier version had. values: old value -> new value, for values that changed too."""

    key: str
    values: Mapping[str, str]


@cache
def notice(text: str) -> None:
    """Log one line about the configuration on the first rank, once per process."""
    if os.environ.get("RANK", "0") == "0":
        logging.getLogger("qarl.config").warning(text)


def refusal(faults: list[Fault]) -> PydanticCustomError:
    """Wrap several faults in one pydantic error. Its context holds them as `faults`."""
    summary = "; ".join(f"{'.'.join(map(str, fault.key))} = {fault.value!r}: {fault.text}" for fault in faults)
    # Doubled braces: pydantic formats the template, and a user's value may contain `{`.
    template = summary.replace("{", "{{").replace("}", "}}")
    return PydanticCustomError("refused", template, {"faults": faults})


def path_faults(key: str, text: str | None) -> Iterator[Fault]:
    """Faults of a text that cannot be a path on any machine. `~name` is only resolved when the path is used."""
    if text is not None and (fault := path_fault(text, home=False)):
        yield Fault((key,), text, fault)


def _valid_path(text: str) -> str:
    if fault := path_fault(text, home=False):
        raise refusal([Fault((), text, fault)])
    return text


Name = Annotated[str, Field(min_length=1, max_length=NAME)]
PathName = Annotated[str, Field(min_length=1, max_length=PATH_BYTES), AfterValidator(_valid_path)]


def value_faults(value: Any, key: tuple[str | int, ...]) -> Iterator[Fault]:
    """Faults of values that cannot be written to a file, or that are too large or too deeply nested.

    A value is a number, a text, or nested lists and mappings of them; nested sections validate themselves. The
    traversal is iterative, so that deep nesting cannot exhaust the stack.
    """
    pending, count = [(key, value, 0)], 0
    while pending:
        here, part, depth = pending.pop()
        count += 1
        if isinstance(part, str):
            if not _encodes(part):
                yield Fault(
                    here, part, "contains a lone surrogate, which is not a character; write the character itself"
                )
        elif isinstance(part, int) and not -(2**63) <= part < 2**63:
            yield Fault(here, f"{'-' if part < 0 else ''}2^{part.bit_length()}", "must fit 64 bits")
        elif isinstance(part, (list, tuple, dict)):
            if depth == DEPTH:
                yield Fault(key, "...", f"is nested deeper than {DEPTH} levels")
                return
            for name in part if isinstance(part, dict) else ():
                if not _encodes(name):
                    yield Fault(here, name, "is a key with a lone surrogate, which is not a character")
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

    Attributes:
        renamed: Keys and values that earlier versions named differently. They are rejected with a hint to the new name.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)
    renamed: ClassVar[Mapping[str, Renamed]] = {}

    def fault(self, key: str, text: str) -> Fault:
        """Return a fault of a key below this section, such as `vllm.process`, with the key's value."""
        keys, value = key.split("."), self
        for name in keys:
            value = getattr(value, name)
        return Fault(tuple(keys), "..." if isinstance(value, Section) else value, text)

    def faults(self) -> Iterator[Fault]:
        """Yield invalid combinations of this section's keys."""
        yield from ()

    def resolved(self) -> dict[str, Any]:
        """Return defaults of null keys that depend on other keys of the section."""
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

    @model_validator(mode="after")
    def _finish(self) -> Section:
        values = [fault for name in type(self).model_fields for fault in value_faults(getattr(self, name), (name,))]
        faults = values or list(self.faults())
        if faults:
            raise refusal(faults)
        self.__dict__.update(self.resolved())  # bypasses `frozen`, which is meant for users of the section
        return self
