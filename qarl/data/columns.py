"""`data.columns`: our names for columns of the source, and for fields inside them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from qarl.errors import UserError
from qarl.utils.text import visible

if TYPE_CHECKING:
    from qarl.config.data import DataConfig

Row = dict[str, Any]

_SHOWN = 20  # names that a message lists


def map_columns(rows: list[Row], config: DataConfig) -> list[Row]:
    """The rows with `config.columns` added: {ours: theirs}, where theirs is a column, or a path into one.

    A path is names with dots between them (`reward_model.ground_truth`), and numbers for items of lists. A column, or a
    field, whose own name has the dots comes first. A field that is null is null.

    Raises UserError naming the key, the row and what is there: no such column or field, or no `prompt` afterwards.
    """
    names = list(rows[0])
    if config.prompt_template is None and "prompt" not in {*names, *config.columns}:
        raise UserError(
            f"data.columns.prompt: `{config.source}` has no column `prompt`; it has: {listed(names)}; "
            "name one as in `columns: {prompt: ...}`, or set data.prompt_template"
        )
    mapped = []
    for index, row in enumerate(rows):
        found = {}
        for ours, theirs in config.columns.items():
            try:
                found[ours] = field_of(row, theirs)
            except NoField as error:
                where = f"row {index} of " if error.inside else ""
                raise UserError(f"data.columns.{ours}: {where}`{config.source}`{error}") from None
        mapped.append({**row, **found})
    return mapped


class NoField(LookupError):
    """A path that leads nowhere. inside: whether its first part is there. The message says what is there instead."""

    def __init__(self, path: str, message: str) -> None:
        super().__init__(f": `{path}`{message}" if path else message)
        self.inside = bool(path)


def field_of(row: Row, path: str) -> Any:
    """The value at `path`, see `map_columns`. Raises NoField."""
    value: Any = row
    done, rest = "", path
    while rest:
        head = _head(value, rest)
        if head is None:
            missing = rest.split(".")[0]
            if isinstance(value, dict):
                kind = "field" if done else "column"
                raise NoField(done, f" has no {kind} `{missing}`; it has: {listed(value)}")
            if isinstance(value, list):
                raise NoField(done, f" is a list of {len(value)} items and has no `{missing}`; give the number of one")
            what = "null" if value is None else f"{type(value).__name__} ({value!r:.40})"
            raise NoField(done, f" is {visible(what)}, and has no field `{missing}`")
        value = value[int(head)] if isinstance(value, list) else value[head]
        done = f"{done}.{head}" if done else head
        rest = rest[len(head) + 1 :]
    return value


def listed(names: Any) -> str:
    """Names for a message, the first of many."""
    names = [visible(str(name)) for name in names]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return (", ".join(names[:_SHOWN]) or "nothing") + more


def _head(value: Any, path: str) -> str | None:
    """The longest start of `path`, up to its end or one of its dots, that is a field of `value`."""
    if isinstance(value, list):
        number = path.split(".")[0]
        return number if number.isascii() and number.isdigit() and int(number[:9]) < len(value) else None
    if not isinstance(value, dict):
        return None
    start = path
    while start not in value:
        start, dot, _ = start.rpartition(".")
        if not dot:
            return None
    return start
