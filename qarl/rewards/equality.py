"""Compare two final answers: numbers, lists, sets, tuples, intervals, equations, texts.

`numbers` compares numbers, structures are compared element by element, and the caller provides a computer algebra
system for everything else.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple, TypeGuard

from qarl.rewards.number_text import maybe_euler, read
from qarl.rewards.numbers import equal
from qarl.rewards.spelling import clean
from qarl.rewards.units import find, read_unit

# (gold, answer) -> whether they are equal, for expressions normalized by `spelling.clean` that are not numbers
Symbolic = Callable[[str, str], bool]

_DEPTH = 6
_ITEMS = 64  # longest list that is compared in any order
_OPEN, _CLOSE = "([{", ")]}"
_AND = re.compile(
    r"\s*,?\s*\\text\{\s*,?\s*(?:and|or)\s*,?\s*\}\s*|,?\s+(?:and|or)\s+|\s*\\(?:vee|lor|land)(?![A-Za-z])\s*"
)
_GROUPED = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?:,\d{3})+(?!\d|,\d)")
_NAME = re.compile(
    r"(?:\\text\{[^{}]*\}|\\?[A-Za-z]+|[A-Za-z][A-Za-z ]*)(?:_(?:\{[^{}]*\}|\w))?'*(?:\([^()]*\))?"
    r"|\(\s*[A-Za-z](?:\s*,\s*[A-Za-z])+\s*\)|\\angle\s*[A-Z]+"
)
_MATRIX = re.compile(r"\\begin\{([bpvBV]?matrix|array)\}(?:\{[lcr|]*\})?(.*?)\\end\{\1\}", re.DOTALL)
_CHOICE = re.compile(r"\(?\s*([A-Z])\s*\)?(?:[.:)]|\s*$).*", re.DOTALL)
_CLOCK = re.compile(r"([01]?\d|2[0-4])(?:\s*:\s*([0-5]\d))?\s*(?:([AP])\.?\s?M\.?)?", re.I)
_TEXT = re.compile(r"\\text\{([^{}]*)\}")
_INFINITY = re.compile(r"([-+]?)\s*(?:\\infty|\\text\{\s*inf(?:inity)?\s*\}|inf(?:inity)?|oo)", re.I)
_SPACES = re.compile(r"\s+")
_NO_SPACES = re.compile(r"(?<!\d)\s+|\s+(?!\d)")  # 2 1/2 is not 21/2
_UNIT_AT_END = re.compile(
    r"(?P<unit>(?:\s*\\text\{[^{}]*\}(?:\^(?:\{-?\d\}|\d))?(?:\s*/\s*)?)+|°|\s+[A-Za-z]{1,6}(?:\^(?:\{-?\d\}|\d))?(?:/[a-z]+)?)$"
)


def same(gold: str, answer: str, symbolic: Symbolic, depth: int = 0) -> bool:
    """Return whether two answers are equal.

    Not symmetric in what may be omitted: see `numbers.equal` and docs/rewards.md.

    Args:
        gold: Ground truth.
        answer: Final answer of a response.
        symbolic: Compares expressions that are not numbers, structures or texts.
        depth: Nesting depth in a structure.
    """
    gold, answer = clean(gold), clean(answer)
    if not gold or not answer or depth > _DEPTH:
        return False
    if _NO_SPACES.sub("", gold) == _NO_SPACES.sub("", answer):
        return True
    numbers = read(gold), read(answer)
    if numbers[0] and numbers[0][0].base and "_" not in answer:
        digits = gold.partition("_")[0]
        if digits.isalnum() and not digits.isdigit():  # FF_{16}, whose value is 255
            return digits == answer
    if all(numbers):
        if equal(numbers[0][0], numbers[1][0]):
            return True
        if maybe_euler(gold) or maybe_euler(answer):
            return symbolic(gold, answer)
        if not any(_GROUPED.fullmatch(text) for text in (gold, answer)):
            return False
    for compare in (_infinities, _clocks, _matrices, _collections, _equations, _texts):
        found = compare(gold, answer, symbolic, depth)
        if found is not None:
            return found
    return not all(numbers) and _expressions(gold, answer, symbolic)


def _infinities(gold: str, answer: str, symbolic: Symbolic, depth: int) -> bool | None:
    signs = [_INFINITY.fullmatch(text) for text in (gold, answer)]
    if signs[0] is None and signs[1] is None:
        return None
    return None not in signs and len({match[1].replace("+", "") for match in signs if match}) == 1


def _clocks(gold: str, answer: str, symbolic: Symbolic, depth: int) -> bool | None:
    """Compare times of day. 2:5 and 2:15 are ratios, unlike 2:05 and 4:30, which no one would write as a ratio."""
    wanted, actual = (_CLOCK.fullmatch(_TEXT.sub(r"\1", text)) for text in (gold, answer))
    if wanted is None or not (wanted[2] or wanted[3]):
        return None
    hour, minute, half = int(wanted[1]), wanted[2] or "00", wanted[3] or (actual and actual[3])
    if half is None and minute[0] != "0" and math.gcd(hour, int(minute)) == 1:
        return None
    if actual is None or not (actual[2] or actual[3]) or (hour, minute) != (int(actual[1]), actual[2] or "00"):
        return False
    return None in (wanted[3], actual[3]) or wanted[3].upper() == actual[3].upper()


def _matrices(gold: str, answer: str, symbolic: Symbolic, depth: int) -> bool | None:
    matches = [_MATRIX.fullmatch(text) for text in (gold, answer)]
    if matches[0] is None or matches[1] is None:
        return None
    rows = [[row.split("&") for row in re.split(r"\\\\", match[2].strip().rstrip("\\"))] for match in matches if match]
    shapes = [[len(row) for row in matrix] for matrix in rows]
    cells = [[cell for row in matrix for cell in row] for matrix in rows]
    return shapes[0] == shapes[1] and _ordered(cells[0], cells[1], symbolic, depth)


class _Parts(NamedTuple):
    """An answer as a collection.

    Attributes:
        kind: `list` (in any order), `tuple` (or interval), `set`, or `union` of intervals.
        brackets: Brackets of a tuple or an interval.
        items: Possible ways to split it: the comma in `100,200` may separate thousands or items.
    """

    kind: str
    brackets: str
    items: list[list[str]]


@lru_cache(maxsize=1024)
def _parts(text: str) -> _Parts | None:
    """Parse a text as a collection; None if it is a single expression."""
    text = _AND.sub(", ", text)
    unions = split(text, (r"\cup",))
    if len(unions) > 1:
        return _Parts("union", "", [unions])
    inner, brackets = _unwrapped(text)
    if brackets == "{}":
        return _Parts("set", brackets, _items(inner) if inner.strip() else [[]])
    if brackets:
        items = [found for found in _items(inner) if len(found) > 1]
        return _Parts("tuple", brackets, items) if items else None
    if text in (r"\emptyset", r"\varnothing"):
        return _Parts("set", "{}", [[]])
    items = [found for found in _items(text) if len(found) > 1]
    return _Parts("list", "", items) if items else None


def _unwrapped(text: str) -> tuple[str, str]:
    """Return the text within enclosing brackets and the brackets, or the text and an empty string."""
    for left, right, name in ((r"\{", r"\}", "{}"), (r"\langle", r"\rangle", "()")):
        if text.startswith(left) and text.endswith(right) and len(text) >= len(left + right):
            return text[len(left) : -len(right)], name
    if len(text) > 1 and text[0] in _OPEN and text[-1] in _CLOSE and text[-2] != "\\":
        depth = 0
        for index, character in enumerate(text):
            depth += (character in _OPEN) - (character in _CLOSE)
            if depth == 0 and index < len(text) - 1:
                return text, ""
        if depth == 0 and text[0] + text[-1] not in ("{]", "{)", "(}", "[}"):
            braces = text[0] == "{" and "," not in text
            return (text[1:-1], text[0] + text[-1]) if not braces else (text, "")
    return text, ""


def _items(text: str) -> list[list[str]]:
    ways = [[item for part in split(grouped, (",", ";")) for item in _signs(part)] for grouped in _groupings(text)]
    ways = [[item.replace("\ue001", ",").strip() for item in way] for way in ways]
    return [way for i, way in enumerate(ways) if way not in ways[:i]]


def _groupings(text: str) -> list[str]:
    """Return the text with hidden thousands separators, and unchanged, with commas between items.

    Leaves out the second reading if an item would begin with 0, as in 5,000.
    """
    hidden = _GROUPED.sub(lambda match: match[0].replace(",", "\ue001"), text)
    return [hidden] if "\ue0010" in hidden else [hidden, text]


def _signs(text: str) -> list[str]:
    r"""Return both values of an expression with `\pm`."""
    if r"\pm" not in text and r"\mp" not in text:
        return [text]
    return [re.sub(r"\\pm(?![A-Za-z])", plus, re.sub(r"\\mp(?![A-Za-z])", minus, text)) for plus, minus in ("+-", "-+")]


def split(text: str, separators: tuple[str, ...]) -> list[str]:
    """Split at separators outside of brackets; return one part if brackets do not match."""
    parts, depth, begin, index = [], 0, 0, 0
    while index < len(text):
        character = text[index]
        if depth == 0 and (separator := next((s for s in separators if text.startswith(s, index)), None)):
            parts.append(text[begin:index])
            begin = index = index + len(separator)
            continue
        depth = max(0, depth + (character in _OPEN) - (character in _CLOSE))
        index += 1
    parts.append(text[begin:])
    return parts if depth == 0 and all(part.strip() for part in parts) else [text]


def _collections(gold: str, answer: str, symbolic: Symbolic, depth: int) -> bool | None:
    wanted, actual = _parts(gold), _parts(answer)
    if wanted is None and actual is None:
        return None
    if _single(wanted) and (actual is None or read(answer)):  # 5,123 may also be a list
        return same(wanted.items[0][0], answer, symbolic, depth + 1)
    if _single(actual) and (wanted is None or read(gold)):
        return same(gold, actual.items[0][0], symbolic, depth + 1)
    if wanted is None or actual is None:
        return _collection_and_single(gold, wanted, answer, actual, symbolic, depth)
    compare = _comparison(wanted, actual)
    if compare is None:
        return False
    found = any(compare(g, a, symbolic, depth) for g in wanted.items for a in actual.items)
    return True if found else None if wanted.kind == actual.kind == "union" else False


def _single(parts: _Parts | None) -> TypeGuard[_Parts]:
    return parts is not None and parts.kind == "set" and len(parts.items[0]) == 1


def _collection_and_single(
    gold: str, wanted: _Parts | None, answer: str, actual: _Parts | None, symbolic: Symbolic, depth: int
) -> bool | None:
    r"""Compare a collection with a single expression: `x = 1, 2` and `x = 12`. None if not comparable."""
    parts = wanted or actual
    assert parts is not None, "one of the answers must be a collection"
    if parts.kind in ("tuple", "set", "union") and any(
        len(_sides(text)) > 1 or r"\in" in text for text in (gold, answer)
    ):
        return None
    if parts.kind == "list" and len(parts.items) == 1 and all(len(_sides(text)) == 1 for text in (gold, answer)):
        return False
    text = gold if wanted else answer
    if parts.kind == "list" and len(split(text, ("=",))) <= 2 and read(_sides(text)[-1]):
        return None  # the comma separates thousands: x = 5,000
    return None if parts.kind in ("tuple", "union") and re.search("[<>]|\\\\[lg]e", gold + answer) else False


def _comparison(wanted: _Parts, actual: _Parts) -> Callable[[list[str], list[str], Symbolic, int], bool] | None:
    """Return the function that compares the items of two collections; None if they cannot be equal."""
    kinds = {wanted.kind, actual.kind}
    if kinds == {"set"}:
        return _mutual
    if kinds == {"tuple"}:
        longer = all(len(items) > 2 for items in [*wanted.items, *actual.items])
        return _ordered if longer or wanted.brackets == actual.brackets else None
    if kinds == {"tuple", "list"}:
        return _ordered if "(" in wanted.brackets + actual.brackets or wanted.brackets == "[]" else None
    return None if len(kinds) > 1 and kinds & {"tuple", "union"} else _unordered


def _ordered(gold: list[str], answer: list[str], symbolic: Symbolic, depth: int) -> bool:
    return len(gold) == len(answer) and all(same(g, a, symbolic, depth + 1) for g, a in zip(gold, answer, strict=True))


def _unordered(gold: list[str], answer: list[str], symbolic: Symbolic, depth: int) -> bool:
    """Compare as multisets. Names that only the ground truth has (`x=1, y=2`) fix the order."""
    if len(gold) != len(answer):
        return False
    names = [_sides(text)[0] for text in gold if len(_sides(text)) == 2]
    unnamed = all(len(_sides(text)) == 1 for text in answer)
    if (len(set(names)) == len(gold) and unnamed) or len(gold) > _ITEMS:
        return _ordered(gold, answer, symbolic, depth)
    left = list(answer)
    for item in gold:
        index = next((i for i, other in enumerate(left) if same(item, other, symbolic, depth + 1)), None)
        if index is None:
            return False
        del left[index]
    return True


def _mutual(gold: list[str], answer: list[str], symbolic: Symbolic, depth: int) -> bool:
    """Compare as sets; repeated elements do not count."""
    if len(gold) > _ITEMS or len(answer) > _ITEMS:
        return _ordered(gold, answer, symbolic, depth)
    return all(any(same(g, a, symbolic, depth + 1) for a in answer) for g in gold) and all(
        any(same(g, a, symbolic, depth + 1) for g in gold) for a in answer
    )


@lru_cache(maxsize=1024)
def _sides(text: str) -> tuple[str, ...]:
    """Return the sides of an equation, a variable first; a single part if there is no equation."""
    marked = re.sub(r"\\(?:approx|simeq|equiv)(?![A-Za-z])", "=", text)
    if re.search(r"[<>!:]=|[<>]|\\(?:le|ge|ne)(?![A-Za-z])|==", marked):
        return (text,)
    sides = [side.strip() for side in split(marked, ("=",))]
    if len(sides) == 2 and _NAME.fullmatch(sides[1]) and not _NAME.fullmatch(sides[0]):
        sides.reverse()
    if len(sides) > 2:
        sides = [sides[0], sides[-1]]
    return tuple(sides)


def _equations(gold: str, answer: str, symbolic: Symbolic, depth: int) -> bool | None:
    membership = [re.sub(r"^\s*[A-Za-z]\s*\\in(?![A-Za-z])\s*", "", text) for text in (gold, answer)]
    if membership != [gold, answer]:
        return same(membership[0], membership[1], symbolic, depth + 1)
    wanted, actual = _sides(gold), _sides(answer)
    if len(wanted) == len(actual) == 1:
        return None
    if len(wanted) == 1:
        return same(gold, actual[1], symbolic, depth + 1)
    if len(actual) == 1:
        return same(wanted[1], answer, symbolic, depth + 1) if _NAME.fullmatch(wanted[0]) else False
    if all(_NAME.fullmatch(sides[0]) for sides in (wanted, actual)):
        names = [_SPACES.sub("", sides[0]) for sides in (wanted, actual)]
        if names[0] == names[1]:
            return same(wanted[1], actual[1], symbolic, depth + 1)
        if read(wanted[1]) or read(actual[1]):  # x = 5 and y = 5
            return False
    return symbolic(gold, answer)


def _texts(gold: str, answer: str, symbolic: Symbolic, depth: int) -> bool | None:
    r"""Compare words, such as `\text{even}`, and letters of a choice, such as (C)."""
    plain = [_SPACES.sub(" ", _TEXT.sub(r"\1", text)).strip() for text in (gold, answer)]
    choice = re.fullmatch(r"\(?([A-Z])\)?", plain[0].replace(" ", ""))
    if choice is not None:
        match = _CHOICE.fullmatch(plain[1])
        return True if match is not None and match[1] == choice[1] else None
    if plain[0] != gold or re.fullmatch(r"[A-Za-z][A-Za-z' -]{2,}", gold):
        if plain[0].casefold() == plain[1].casefold():
            return True
        words = [re.sub(r"[\W_]+", "", text).casefold() for text in plain]
        if words[0] and words[0] == words[1] and not any(c.isdigit() for c in words[0]):
            return True
        if re.fullmatch(r"\\text\{[^{}]*[A-Za-z]{3,}[^{}]*\}", gold):
            return False
    return None


def _expressions(gold: str, answer: str, symbolic: Symbolic) -> bool:
    """Compare expressions with roots, variables or functions. Their units must not differ."""
    (left, wanted), (right, actual) = _without_unit(gold), _without_unit(answer)
    if wanted is not None and actual is not None and wanted != actual:
        return False
    return symbolic(left, right)


def _without_unit(text: str) -> tuple[str, object]:
    match = _UNIT_AT_END.search(text)
    if match is None or match.start() == 0:
        return text, None
    word = re.match(r"\s+([A-Za-z]+)", match["unit"])
    if word is not None and find(word[1]) is None:
        return text, None
    unit = read_unit(match["unit"])
    if isinstance(unit, bool):
        return text, None
    return text[: match.start()].strip(), unit
