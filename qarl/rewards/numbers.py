"""Numeric answers: exact values, units, number bases and equality.

Values are fractions, so `1/2^99` differs from `1/2^98`. Beyond `_BITS` they are decimals with 60 digits and a large
exponent, so that every input takes a bounded time.
"""

from __future__ import annotations

import decimal
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

from qarl.rewards.units import Unit

Value = Fraction | Decimal

_BITS = 20_000
CONTEXT = decimal.Context(prec=60, Emax=10**15, Emin=-(10**15), traps=[decimal.Overflow, decimal.InvalidOperation])
CONTEXT.traps[decimal.DivisionByZero] = True


class NotANumber(ValueError):
    """The text is not a purely numeric expression."""


@dataclass(frozen=True)
class Quantity:
    """A number with its unit.

    Attributes:
        value: The number, without the unit's factor.
        unit: The unit, or None.
        digits: Significant digits if written as one decimal number, which may be rounded; else None.
        places: Decimals of that number.
        base: Number base written as a subscript, or None.
        approximate: Whether the value is rounded to floating-point precision.
    """

    value: Value
    unit: Unit | None = None
    digits: int | None = None
    places: int = 0
    base: int | None = None
    approximate: bool = False


def equal(gold: Quantity, answer: Quantity) -> bool:
    """Return whether two quantities are the same answer.

    Units are converted: 5 cm equals 0.05 m. A missing unit is accepted, because the question usually states it; then 50
    % equals 50 and 0.5. A missing number base is accepted only in the answer, not in the ground truth.
    """
    if gold.base != answer.base and answer.base is not None and (gold.base, answer.base) != (None, 10):
        return False
    if gold.unit and answer.unit:
        if gold.unit.dimension != answer.unit.dimension:
            return False
        return _close(_scaled(gold), _scaled(answer))
    if _close(gold, answer):
        return True
    return any(q.unit is not None and not q.unit.dimension for q in (gold, answer)) and _close(
        _scaled(gold), _scaled(answer)
    )


def _scaled(quantity: Quantity) -> Quantity:
    factor = quantity.unit.factor if quantity.unit else Fraction(1)
    if factor == 1:
        return quantity
    return Quantity(times(quantity.value, factor), digits=quantity.digits, places=quantity.places)


def _close(a: Quantity, b: Quantity) -> bool:
    """Return whether values are equal, or one is the other rounded to at least six digits (0.333333 and 1/3)."""
    if a.value == b.value:
        return True
    if not a.value or not b.value or (a.value < 0) != (b.value < 0):
        return False
    difference = _relative(a.value, b.value)
    if difference > Decimal("1e-3"):
        return False
    if a.approximate or b.approximate or max(a.digits or 0, b.digits or 0) >= 15:  # floats from a data file
        return difference <= Decimal("1e-12") or _rounds(a, b) or _rounds(b, a)
    huge = isinstance(a.value, Decimal) or isinstance(b.value, Decimal)
    return (huge and difference <= Decimal("1e-40")) or _rounds(a, b) or _rounds(b, a)


def _rounds(short: Quantity, exact: Quantity) -> bool:
    """Return whether `short` is `exact` rounded to its number of digits.

    `short` needs six digits, and six decimals to be the rounding of another decimal number: $1,234,567.9 does not equal
    $1,234,567.89.
    """
    if short.digits is None or max(short.digits, short.places) < 6 or short.digits < 4:
        return False
    if exact.digits is not None and (short.places < 6 or exact.digits <= short.digits):
        return False
    magnitude = decimal_of(short.value).adjusted() - short.digits + 1
    half = CONTEXT.multiply(Decimal("0.5000001"), CONTEXT.scaleb(Decimal(1), magnitude))
    return abs(CONTEXT.subtract(decimal_of(short.value), decimal_of(exact.value))) <= half


def _relative(a: Value, b: Value) -> Decimal:
    x, y = decimal_of(a), decimal_of(b)
    if abs(x.adjusted() - y.adjusted()) > 2:
        return Decimal(1)
    if isinstance(a, Fraction) and isinstance(b, Fraction):  # exact: the difference may be below 60 digits
        return decimal_of(abs(a - b) / abs(a))
    return abs(CONTEXT.divide(CONTEXT.subtract(x, y), x))


def decimal_of(value: Value) -> Decimal:
    if isinstance(value, Decimal):
        return value
    return CONTEXT.divide(Decimal(value.numerator), Decimal(value.denominator))


def _bounded(value: Fraction) -> Value:
    return value if max(value.numerator.bit_length(), value.denominator.bit_length()) <= _BITS else decimal_of(value)


def times(a: Value, b: Value) -> Value:
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return _bounded(a * b)
    return CONTEXT.multiply(decimal_of(a), decimal_of(b))


def plus(a: Value, b: Value) -> Value:
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return _bounded(a + b)
    return CONTEXT.add(decimal_of(a), decimal_of(b))


def over(a: Value, b: Value) -> Value:
    if not b:
        raise NotANumber
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return _bounded(a / b)
    return CONTEXT.divide(decimal_of(a), decimal_of(b))


def power(base: Value, exponent: Value) -> Value:
    if not isinstance(exponent, Fraction) or exponent.denominator != 1 or (not base and exponent <= 0):
        raise NotANumber
    n = exponent.numerator
    if isinstance(base, Fraction):
        bits = max(base.numerator.bit_length(), base.denominator.bit_length())
        if bits * abs(n) <= _BITS or abs(base) == 1 or not base:
            return Fraction(base ** (n % 2 if abs(base) == 1 else n))
    if n.bit_length() > 60:
        raise NotANumber
    size = CONTEXT.power(abs(decimal_of(base)), n)
    return -size if base < 0 and n % 2 else size
