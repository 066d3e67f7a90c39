"""Units of answers: dimensions and scale factors, so that `5 cm` equals `0.05 m` and differs from `5 km`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

# A dimension is a sorted tuple of (base, exponent). Bases are those of the SI, plus separate bases for units without a
# constant conversion factor: currencies, angles in degrees, temperatures in degrees.
Dimension = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Unit:
    """A unit: `factor` times the coherent unit of `dimension`. Percent and `million` have an empty dimension."""

    factor: Fraction
    dimension: Dimension = ()


def _unit(factor: str | int | Fraction, dimension: str = "") -> Unit:
    """Build a unit from a factor and a dimension such as "kg m s-2"."""
    powers = re.findall(r"([A-Za-z$°]+)(-?\d+)?", dimension)
    return Unit(Fraction(factor), tuple(sorted((base, int(power or 1)) for base, power in powers)))


# Symbol, names, factor, dimension; names are also combined with prefixes.
_PREFIXED: list[tuple[str, str, str | int, str]] = [
    ("m", "meter meters metre metres", 1, "m"),
    ("g", "gram grams gramme grammes", "1/1000", "kg"),
    ("s", "second seconds", 1, "s"),
    ("A", "ampere amperes amp amps", 1, "A"),
    ("K", "kelvin kelvins", 1, "K"),
    ("mol", "mole moles", 1, "mol"),
    ("cd", "candela", 1, "cd"),
    ("N", "newton newtons", 1, "kg m s-2"),
    ("J", "joule joules", 1, "kg m2 s-2"),
    ("W", "watt watts", 1, "kg m2 s-3"),
    ("Pa", "pascal pascals", 1, "kg m-1 s-2"),
    ("Hz", "hertz", 1, "s-1"),
    ("C", "coulomb coulombs", 1, "A s"),
    ("V", "volt volts", 1, "kg m2 s-3 A-1"),
    ("F", "farad farads", 1, "kg-1 m-2 s4 A2"),
    ("Ω", "ohm ohms", 1, "kg m2 s-3 A-2"),
    ("T", "tesla teslas", 1, "kg s-2 A-1"),
    ("Wb", "weber webers", 1, "kg m2 s-2 A-1"),
    ("H", "henry henries", 1, "kg m2 s-2 A-2"),
    ("L", "l liter liters litre litres", "1/1000", "m3"),
    ("eV", "electronvolt electronvolts", "1.602176634e-19", "kg m2 s-2"),
    ("bar", "bars", 100000, "kg m-1 s-2"),
    ("pc", "parsec parsecs", "3.0856775814913673e16", "m"),
    ("cal", "calorie calories", "4.184", "kg m2 s-2"),
    ("Wh", "", 3600, "kg m2 s-2"),
]
_PLAIN: list[tuple[str, str | int, str]] = [
    ("% percent percents percentage pct", "1/100", ""),
    ("‰ permille", "1/1000", ""),
    ("thousand 千", 1000, ""),
    ("万 萬", 10**4, ""),
    ("million millions", 10**6, ""),
    ("亿 億", 10**8, ""),
    ("billion billions", 10**9, ""),
    ("trillion trillions", 10**12, ""),
    ("° deg degree degrees 度", 1, "angle"),
    ("rad radian radians", 1, "radian"),
    ("°C ℃ celsius", 1, "celsius"),
    ("°F ℉ fahrenheit", 1, "fahrenheit"),
    ("min mins minute minutes 分钟", 60, "s"),
    ("sec secs 秒", 1, "s"),
    ("h hr hrs hour hours 小时", 3600, "s"),
    ("d day days 天 日", 86400, "s"),
    ("wk week weeks", 604800, "s"),
    ("month months 月", 1, "month"),
    ("yr yrs year years 年", 1, "year"),
    ("in inch inches", "0.0254", "m"),
    ("ft foot feet", "0.3048", "m"),
    ("yd yds yard yards", "0.9144", "m"),
    ("mi mile miles", "1609.344", "m"),
    ("米", 1, "m"),
    ("千米 公里", 1000, "m"),
    ("分米", "1/10", "m"),
    ("厘米", "1/100", "m"),
    ("毫米", "1/1000", "m"),
    ("平方米", 1, "m2"),
    ("平方厘米", "1/10000", "m2"),
    ("平方公里 平方千米", 10**6, "m2"),
    ("立方米", 1, "m3"),
    ("立方厘米", "1/1000000", "m3"),
    ("acre acres", "4046.8564224", "m2"),
    ("ha hectare hectares", 10000, "m2"),
    ("cc", "1/1000000", "m3"),
    ("gal gallon gallons", "0.003785411784", "m3"),
    ("升", "1/1000", "m3"),
    ("毫升", "1/1000000", "m3"),
    ("t ton tons tonne tonnes 吨", 1000, "kg"),
    ("千克 公斤", 1, "kg"),
    ("克", "1/1000", "kg"),
    ("lb lbs", "0.45359237", "kg"),
    ("oz ounce ounces", "0.028349523125", "kg"),
    ("mph", "0.44704", "m s-1"),
    ("kmh kph kmph", "5/18", "m s-1"),
    ("atm", 101325, "kg m-1 s-2"),
    ("$ USD dollar dollars buck bucks 美元", 1, "usd"),
    ("¢ cent cents", "1/100", "usd"),
    ("€ EUR euro euros 欧元", 1, "eur"),
    ("£ GBP", 1, "gbp"),
    ("¥ 元 CNY RMB yuan", 1, "yuan"),  # ¥ is the sign of both yuan and yen
    ("円 JPY yen 日元", 1, "yuan"),
    ("₹ INR Rs rupee rupees", 1, "inr"),
    ("₩ 원 KRW won", 1, "krw"),
    ("₽ RUB ruble rubles", 1, "rub"),
    ("₿ BTC", 1, "btc"),
    ("₺ TRY", 1, "lira"),
    ("₫ VND", 1, "vnd"),
    ("₪ ILS", 1, "ils"),
    ("฿ THB baht", 1, "thb"),
    ("CHF", 1, "chf"),
]
CURRENCY = "$€£¥₹₩₽₿₺₫₪฿¢"
_SYMBOL_PREFIXES = {"": 0, "f": -15, "p": -12, "n": -9, "u": -6, "μ": -6, "µ": -6, "m": -3, "c": -2, "d": -1}
_SYMBOL_PREFIXES |= {"h": 2, "k": 3, "M": 6, "G": 9, "T": 12}
_NAME_PREFIXES = {"": 0, "femto": -15, "pico": -12, "nano": -9, "micro": -6, "milli": -3, "centi": -2, "deci": -1}
_NAME_PREFIXES |= {"kilo": 3, "mega": 6, "giga": 9, "tera": 12}


def _table() -> dict[str, Unit]:
    found: dict[str, Unit] = {}
    for symbol, names, factor, dimension in _PREFIXED:
        unit = _unit(factor, dimension)
        short = [symbol, "l"] if symbol == "L" else [symbol]
        long = [name for name in names.split() if name != "l"]
        for words, prefixes in ((short, _SYMBOL_PREFIXES), (long, _NAME_PREFIXES)):
            for prefix, power in prefixes.items():
                scaled = Unit(unit.factor * Fraction(10) ** power, unit.dimension)
                found |= {prefix + word: scaled for word in words}
    for plain, factor, dimension in _PLAIN:
        found |= dict.fromkeys(plain.split(), _unit(factor, dimension))
    return found


UNITS = _table()
_CURRENCIES = {unit.dimension[0][0] for unit in map(UNITS.__getitem__, [*"$€£¥₹₩₽₿₺₫₪฿", "CHF"])}
_LOWER = {name: unit for name, unit in UNITS.items() if len(name) > 3 and name.islower()}
_NOT_UNITS = {"sqrt", "log", "sin", "cos", "tan", "exp", "theta", "alpha", "beta", "infty", "infinity", "and", "inf"}
_TOKEN = re.compile(r"(?P<word>°[CF]?|[^\W\d_]+|[%‰¢$€£¥₹₩₽])\.?(?:\s?\^?\s?(?P<power>-?\d+))?|(?P<op>[*·/()\s,.-]+)")
_LATEX = re.compile(r"\\(?:text|mathrm)\s*\{([^{}]*)\}")
_PHRASES = [
    (re.compile(r"\b(?:square|sq\.?|平方)\s*([A-Za-z]+)"), r"\1^2"),
    (re.compile(r"\b(?:cubic|cu\.?)\s*([A-Za-z]+)"), r"\1^3"),
    (re.compile(r"([A-Za-z]+)\s+squared\b"), r"\1^2"),
    (re.compile(r"([A-Za-z]+)\s+cubed\b"), r"\1^3"),
    (re.compile(r"\bper\b"), "/"),
    (re.compile(r"°\s+(?=[CF]\b)|\bdegrees?\s+(?=[CF]\b|[Cc]elsius|[Ff]ahrenheit)"), "°"),
    (re.compile(r"°(?=[Cc]elsius|[Ff]ahrenheit)"), ""),
]


@lru_cache(maxsize=4096)
def read_unit(text: str) -> Unit | bool | None:
    """Parse the unit after a number.

    Args:
        text: Everything after the number, normalized by `spelling.clean`.

    Returns:
        The unit; None if there is none, or if it is a count noun (`12 apples`); False if the text is something else,
        such as a variable.
    """
    if not text.strip():
        return None
    body = re.sub(r"\s*\^\s*\{\s*(-?\d+)\s*\}", r"^\1", text)
    body = re.sub(r"\\mu(?![A-Za-z])\s*(\\text\s*\{\s*)?", r"\1μ", body.replace(r"\Omega", "Ω"))
    marked = _LATEX.search(body) is not None
    body = _LATEX.sub(r" \1 ", body)
    body = re.sub(r"\\cdot\b|\\times\b", "*", body)
    if "\\" in body or "{" in body or "=" in body or "_" in body:
        return False
    for pattern, replacement in _PHRASES:
        body = pattern.sub(replacement, body)
    spaced = marked or text[0].isspace()
    return _product(body, spaced, marked)


def _product(body: str, spaced: bool, marked: bool) -> Unit | bool | None:
    r"""Return the product of the units in `body`. `spaced`: a space or `\text` separates it from the number."""
    powers: dict[str, int] = {}
    factor, known, sign = Fraction(1), False, 1
    position = 0
    while position < len(body):
        match = _TOKEN.match(body, position)
        if match is None:
            return False
        position = match.end()
        if match["op"] is not None:
            if not known and set(match["op"]) & set("*/-" if marked else "*/()-"):
                return False
            sign = -1 if "/" in match["op"] else sign if match["op"].strip() else 1 if sign == 1 else sign
            continue
        word, power = match["word"], sign * int(match["power"] or 1)
        unit = find(word)
        if unit is None or (word == "in" and body[position:].strip(" .")):  # "72 in total"
            if word.lower() in _NOT_UNITS or not (marked or (spaced and len(word) > 2) or not word.isascii()):
                return False
            continue
        if len(word) == 1 and word.isascii() and word.isalpha() and not (spaced or known):  # 5m: a variable
            return False
        known = True
        factor *= unit.factor**power
        for base, exponent in unit.dimension:
            powers[base] = powers.get(base, 0) + exponent * power
    if not known:
        return None
    if money := [
        base for base in powers if base in _CURRENCIES
    ]:  # 5 dollars per hour: keep the price, drop what it is for
        return Unit(factor if len(powers) == 1 else Fraction(1), ((money[0], 1),))
    return Unit(factor, tuple(sorted((b, p) for b, p in powers.items() if p)))


def find(word: str) -> Unit | None:
    """Return a unit by its symbol, or by its name in any case; None if there is none."""
    return UNITS.get(word) or _LOWER.get(word.lower())
