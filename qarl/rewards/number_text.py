"""Parse numbers into exact values: e-notation, fractions, mixed numbers, powers, units, number bases."""

from __future__ import annotations

import decimal
import re
from fractions import Fraction
from functools import lru_cache

from qarl.rewards.numbers import CONTEXT, NotANumber, Quantity, Value, decimal_of, over, plus, power, times
from qarl.rewards.units import CURRENCY, find, read_unit

_LENGTH = 2_000  # longest text
_DEPTH = 40  # deepest nesting of brackets

_WORDS = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10}
_WORDS |= {"eleven": 11, "twelve": 12, "sixteen": 16}
_BASED = re.compile(
    r"[({]?(?:\\text\{)?(?P<sign>-?)(?P<digits>[0-9A-Z]+(?:\.[0-9A-Z]+)?)\}?[)}]?"
    r"(?:\s*_\s*\{?\s*\(?(?:\\text\{)?\s*(?P<base>\d{1,2}|[a-z]+)\s*\}?\)?\s*\}?"
    r"|\s*\(?(?:\\text\{)?\s*\(?(?:in\s+)?base[ -]+(?P<named>\d{1,2}|[a-z]+)\)?\}?\)?)"
)
_SPACE = re.compile(r"\s+")
_INTEGER = r"[1-9]\d{0,2}(?:,\d{3})+(?!\d)|[1-9]\d{0,2}(?: \d{3})+(?![\d/])|[1-9]\d?(?:,\d\d)+,\d{3}(?!\d)|\d+"
_LITERAL = re.compile(
    rf"(?:(?P<whole>{_INTEGER})(?:\.(?P<part>\d*))?|\.(?P<only>\d+))"
    r"(?:[eE](?P<exponent>[+-]?\d+|\{[+-]?\d+\})(?![\d.]))?"
)
_MIXED = re.compile(r"(?P<whole>\d+)\s+(?P<top>\d+)\s*/\s*(?P<bottom>\d+)(?![\d.])")
_MIXED_FRAC = re.compile(r"(?P<whole>\d+)\s*\{?\\frac\s*\{\s*(?P<top>\d+)\s*\}\s*\{\s*(?P<bottom>\d+)\s*\}\}?")
_EXPONENT = re.compile(r"[+-]?\d+(?:\.\d+)?")
_OPERATOR = re.compile(r"\s*(\\times(?![A-Za-z])|\\cdot(?![A-Za-z])|\\div(?![A-Za-z])|[*/+^-]|\^)\s*")
_MONEY = re.compile(rf"^(?P<sign>[-+]?)\s*(?P<currency>[{re.escape(CURRENCY)}])\s*(?P<rest>.*)$", re.DOTALL)
_PER = re.compile(
    r"\s*(?:/|per\b|\\text\{\s*(?:/|per\b))[^\d=<>]*"
)  # $3 per pound: keep the price, drop what it is for
# 2e-1 may be 0.2 or 2e - 1 with Euler's number; 1e-05, 1.5e-7 and 1E-5 can only be numbers.
_EULER = re.compile(r"(?<![\d.])(\d+)e([+-])([1-9]\d?)(?![\d.])")


@lru_cache(maxsize=4096)
def read(text: str) -> tuple[Quantity, ...]:
    """Parse a quantity.

    Args:
        text: An answer normalized by `spelling.clean`.

    Returns:
        One quantity, or none if the text is not a number with an optional unit.
    """
    if len(text) > _LENGTH or not any(c.isdigit() for c in text):
        return ()
    try:
        based = _based(text)
        return (based or _quantity(text),)
    except (NotANumber, decimal.DecimalException, RecursionError):
        return ()


def maybe_euler(text: str) -> bool:
    """Return whether an exponent in `text` may be Euler's number plus or minus a number: `2e-1`."""
    return _EULER.search(text) is not None


def _based(text: str) -> Quantity | None:
    match = _BASED.fullmatch(text)
    if match is None:
        return None
    name = match["base"] or match["named"]
    base = int(name) if name.isdigit() else _WORDS.get(name, 0)
    named = match["digits"].isalpha() and (len(match["digits"]) == 1 or base <= 10)  # F_{16}: a name
    if not 2 <= base <= 36 or named:
        return None
    whole, _, part = match["digits"].partition(".")
    digits, sign = whole + part, -1 if match["sign"] else 1
    if digits.isdigit():
        # Parsed as decimal digits, because an answer without the base is compared with those.
        return Quantity(Fraction(sign * _integer(digits), 10 ** len(part)), base=base)
    try:
        return Quantity(Fraction(sign * int(digits, base), base ** len(part)), base=base)
    except ValueError:
        raise NotANumber from None


def _quantity(text: str) -> Quantity:
    money = _MONEY.match(text)
    if money is not None:
        text = money["sign"] + money["rest"]
    parser = _Parser(text)
    value = parser.sum(0)
    rest = text[parser.position :]
    unit = read_unit(rest)
    if isinstance(unit, bool):
        if money is None or not _PER.fullmatch(rest):
            raise NotANumber
        unit = None
    if money is not None:
        currency = find(money["currency"])
        assert currency is not None, "every currency sign must be a unit"
        if unit is not None and not unit.dimension:  # $5 million
            value = times(value, unit.factor)
        unit = currency
    return Quantity(value, unit, *parser.decimals())


class _Parser:
    """Recursive-descent parser of `text`. `position` is the end of the longest numeric prefix."""

    def __init__(self, text: str) -> None:
        self.text, self.position = text, 0
        self._literals: list[tuple[int, int]] = []  # (digits, decimals) of each decimal number
        self._powers_of_ten = True  # whether all other factors are powers of ten

    def decimals(self) -> tuple[int | None, int]:
        """Return digits and decimals if the expression is one decimal number, optionally times a power of ten."""
        one = len(self._literals) == 1 and self._powers_of_ten
        return self._literals[0] if one else (None, 0)

    def sum(self, depth: int) -> Value:
        if depth > _DEPTH:
            raise NotANumber
        value = self._product(depth)
        while (operator := self._operator("+-")) is not None:
            self._powers_of_ten = False
            term = self._product(depth)
            value = plus(value, times(term, Fraction(-1)) if operator == "-" else term)
        return value

    def _product(self, depth: int) -> Value:
        value = self._signed(depth)
        while True:
            before = self.position
            operator = self._operator("*/")
            if operator is None:
                if not self.text.startswith("(", self._skip()):
                    self.position = before
                    return value
                self.position = self._skip()
            try:
                factor = self._signed(depth)
            except NotANumber:
                self.position = before  # the rest is not a factor, but may be a unit
                return value
            if factor not in (1, 10) and not self._is_power_of_ten(factor):
                self._powers_of_ten = self._powers_of_ten and self._is_power_of_ten(value)
            value = over(value, factor) if operator == "/" else times(value, factor)

    @staticmethod
    def _is_power_of_ten(value: Value) -> bool:
        if isinstance(value, Fraction) and max(value.numerator, value.denominator) < 10:
            return value == 1
        return decimal_of(value).normalize(CONTEXT).as_tuple().digits == (1,)

    def _signed(self, depth: int) -> Value:
        self.position = self._skip()
        sign = self.text[self.position : self.position + 1]
        if sign in ("-", "+"):
            self.position += 1
            if depth > _DEPTH:
                raise NotANumber
            value = self._signed(depth + 1)
            return times(value, Fraction(-1)) if sign == "-" else value
        value = self._atom(depth)
        if self.text.startswith("^", self._skip()):
            self.position = self._skip() + 1
            self._powers_of_ten = self._powers_of_ten and value == 10
            return power(value, self._exponent(depth))
        return value

    def _exponent(self, depth: int) -> Value:
        self.position = self._skip()
        match = _EXPONENT.match(self.text, self.position)
        if depth > _DEPTH or (match is not None and len(match[0]) > 40):
            raise NotANumber
        if match is not None:
            self.position = match.end()
            value: Value = Fraction(match[0])
            if self.text.startswith("^", self.position):  # 2^3^2, right to left
                self.position += 1
                return power(value, self._exponent(depth + 1))
            return value
        literals, powers = list(self._literals), self._powers_of_ten  # the exponent's own decimals do not count
        value = self._atom(depth)
        self._literals, self._powers_of_ten = literals, powers
        return value

    def _atom(self, depth: int) -> Value:
        text, start = self.text, self._skip()
        self.position = start
        for left, right in (("(", ")"), ("{", "}"), ("[", "]")):
            if text.startswith(left, start):
                self.position = start + 1
                value = self.sum(depth + 1)
                self._expect(right)
                return value
        if text.startswith("\\frac", start):
            self.position = start + 5
            self._expect("{")
            top = self.sum(depth + 1)
            self._expect("}")
            self._expect("{")
            bottom = self.sum(depth + 1)
            self._expect("}")
            self._powers_of_ten = False
            return over(top, bottom)
        return self._number()

    def _number(self) -> Value:
        for pattern in (_MIXED_FRAC, _MIXED):
            if match := pattern.match(self.text, self.position):
                self.position = match.end()
                self._powers_of_ten = False
                units, top, bottom = (Fraction(_integer(match[name])) for name in ("whole", "top", "bottom"))
                return plus(units, over(top, bottom))
        match = _LITERAL.match(self.text, self.position)
        if match is None:
            raise NotANumber
        self.position = match.end()
        whole = re.sub(r"[ ,]", "", match["whole"] or "")
        part = match["part"] or match["only"] or ""
        value: Value = Fraction(_integer(whole + part or "0"), 10 ** len(part))
        exponent = int((match["exponent"] or "0").strip("{}")) if len(match["exponent"] or "") < 18 else 10**18
        if "." in match[0] or match["exponent"]:
            self._literals.append((max(1, len((whole + part).lstrip("0"))), max(0, len(part) - exponent)))
        return times(value, power(Fraction(10), Fraction(exponent))) if exponent else value

    def _operator(self, kinds: str) -> str | None:
        match = _OPERATOR.match(self.text, self.position)
        if match is None:
            return None
        kind = {"\\times": "*", "\\cdot": "*", "\\div": "/"}.get(match[1], match[1])
        if kind not in kinds:
            return None
        self.position = match.end()
        return kind

    def _skip(self) -> int:
        match = _SPACE.match(self.text, self.position)
        return match.end() if match else self.position

    def _expect(self, character: str) -> None:
        self.position = self._skip()
        if not self.text.startswith(character, self.position):
            raise NotANumber
        self.position += 1


def _integer(digits: str) -> int:
    if len(digits) > 4000:  # CPython refuses to convert longer integers
        raise NotANumber
    return int(digits)
