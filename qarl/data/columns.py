"""`data.columns`: maps columns of the source, and fields inside them, to qarl's column names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from qarl.data.values import Row
from qarl.errors import UserError
from qarl.utils.text import first_few, visible

if TYPE_CHECKING:
    from qarl.config.data import DataConfig


def map_columns(rows: list[Row], config: DataConfig, needs_prompt: bool = True) -> list[Row]:
    """Add the columns of `config.columns` ({new name: source column, or path into one}) to the rows.

    A path consists of names separated by dots (`reward_model.ground_truth`), and of indices of list items. If a column
    or field has dots in its own name, that name takes precedence. The value at a path may be None; a path below None
    does not exist.

    Raises:
        UserError: A column or field does not exist, or the result has no `prompt` although it needs one. The message
            gives key, row and alternatives.
    """
    names = list(rows[0])
    if needs_prompt and config.prompt_template is None and "prompt" not in {*names, *config.columns}:
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
    """A path that does not exist. inside: whether its first part exists. The message lists what exists instead."""

    def __init__(self, path: str, message: str) -> None:
        super().__init__(f": `{path}`{message}" if path else message)
        self.inside = bool(path)


def field_of(row: Row, path: str) -> Any:
    """Return the value at `path`, see `map_columns`. Raises NoField."""
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
                raise NoField(done, f" is a list of {len(value)} items and has no `{missing}`; give an item's index")
            what = "null" if value is None else f"{type(value).__name__} ({value!r:.40})"
            raise NoField(done, f" is {visible(what)}, and has no field `{missing}`")
        value = value[int(head)] if isinstance(value, list) else value[head]
        done = f"{done}.{head}" if done else head
        rest = rest[len(head) + 1 :]
    return value


def listed(names: Any) -> str:
    """Format names for a message; a long list is truncated."""
    return first_few([visible(str(name)) for name in names], 20) or "nothing"


def _head(value: Any, path: str) -> str | None:
    """Return the longest prefix of `path`, ending at a dot or its end, that is a field of `value`."""
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
