"""Multiple-choice rows: lettered options in a seeded random order, and the letter of the correct one."""

from __future__ import annotations

import random
import string
from typing import TYPE_CHECKING, Any

from qarl.data.columns import NoField, field_of
from qarl.data.values import Row
from qarl.errors import UserError

if TYPE_CHECKING:
    from qarl.config.data import ChoicesConfig, DataConfig

LETTERS = string.ascii_uppercase


def letter_choices(rows: list[Row], config: DataConfig) -> list[Row]:
    """Add the columns `choices` ("A. first\\nB. second") and `answer` (the letter of the right option) to each row.

    Raises:
        UserError: A row lacks a column, has fewer than two or more than 26 options, or no correct one.
    """
    section = config.choices
    assert section is not None, "there are no choices"
    return [
        row | _lettered(row, index, section, f"data.choices: row {index} of `{config.source}`")
        for index, row in enumerate(rows)
    ]


def _lettered(row: Row, index: int, section: ChoicesConfig, place: str) -> Row:
    try:
        found = [field_of(row, column) for column in section.options]
        right = None if section.right is None else field_of(row, section.right)
        labels = None if section.labels is None else field_of(row, section.labels)
    except NoField as error:
        raise UserError(f"{place}{error}") from None
    given = found[0] if len(found) == 1 else found
    if not isinstance(given, (list, tuple)) or None in given:
        names = ", ".join(section.options)
        raise UserError(f"{place}: `{names}` must be a list of options without null; or name one column per option")
    options = [str(option) for option in given]
    if not 2 <= len(options) <= len(LETTERS):
        raise UserError(f"{place}: has {len(options)} options; 2 to {len(LETTERS)} are possible")
    correct = 0 if section.right is None else _index_of(right, options, labels, place)
    order = list(range(len(options)))
    if section.shuffle_seed is not None:
        random.Random(f"choices-{section.shuffle_seed}-{index}").shuffle(order)
    lines = [f"{LETTERS[position]}. {options[option].strip()}" for position, option in enumerate(order)]
    return {"choices": "\n".join(lines), "answer": LETTERS[order.index(correct)]}


def _index_of(right: Any, options: list[str], labels: Any, place: str) -> int:
    """Return the index of the correct option, given as a label, a letter, an index, or the text of the option."""
    names = [str(label) for label in labels] if isinstance(labels, list) else list(LETTERS[: len(options)])
    if len(names) != len(options):
        raise UserError(f"{place}: has {len(options)} options and {len(names)} labels")
    if str(right) in names:  # before the index: 1 is the first option if the labels are 1, 2, 3
        return names.index(str(right))
    if isinstance(right, int) and not isinstance(right, bool) and 0 <= right < len(options):
        return right
    if str(right) in options:
        return options.index(str(right))
    raise UserError(f"{place}: the right option {right!r} is not one of its options")
