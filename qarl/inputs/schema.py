"""Schemas of files that qarl reads back: required keys, types and ranges, with one-line errors."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from qarl.inputs.files import Unreadable, file_sha256
from qarl.inputs.json import short_json
from qarl.inputs.paths import NAME_BYTES
from qarl.utils.text import visible

T = TypeVar("T", bound=BaseModel)


class Record(BaseModel):
    """Base class of records in files, with strict types and finite numbers.

    Unknown keys are ignored, so that files of later versions of qarl can be read.
    """

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, allow_inf_nan=False)


def _plain_name(name: str) -> str:
    if name in ("", ".", "..") or "/" in name or "\0" in name or len(name.encode("utf-8", "replace")) > NAME_BYTES:
        raise ValueError("must be the name of a file in the same directory")
    return name


FileName = Annotated[str, AfterValidator(_plain_name)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Bytes = Annotated[int, Field(ge=0, lt=2**63)]
STEP_LIMIT = 10**9  # training steps: more than any run takes, and sums of them do not overflow
Step = Annotated[int, Field(ge=0, le=STEP_LIMIT)]
Count = Annotated[int, Field(ge=0, lt=2**53)]
NUMBER_LIMIT = 1e100  # far above any real value; squares and sums of such values stay finite
Number = Annotated[float, Field(ge=-NUMBER_LIMIT, le=NUMBER_LIMIT)]


class FileDigest(Record):
    """Size and SHA-256 of a file."""

    bytes: Bytes
    sha256: Sha256

    @classmethod
    def of(cls, path: Path) -> FileDigest:
        """Read a regular file. Raises NoSuchFile, Unreadable."""
        size, digest = file_sha256(path)
        return cls(bytes=size, sha256=digest)


def checked(model: type[T], value: Any, place: str) -> T:
    """Validate `value` as a `model`. Raises Unreadable with the first invalid key. place: Source of the value."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise Unreadable(place, schema_fault(error)) from None


def schema_fault(error: ValidationError) -> str:
    """Return one line: the first invalid key, its value, what is valid, and the number of further errors."""
    faults = error.errors(include_url=False)
    first = faults[0]
    key = visible(".".join(map(str, first["loc"]))) or "the value"  # a key may be any text
    more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    if first["type"] == "missing":
        return f"{key} is missing{more}"
    message = first["msg"].removeprefix("Value error, ")
    return f"{key} = {short_json(first['input'])}: {message[0].lower()}{message[1:]}{more}"
