"""Normalize the spelling of answers: characters, spaces, LaTeX commands for typesetting, and delimiters."""

# ruff: noqa: RUF001 (non-ASCII characters that look like ASCII are intended)

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache, partial

_CHARACTERS = {
    **dict.fromkeys("\u2212\u2010\u2011\u2012\u2013\u2014\ufe63", "-"),
    **dict.fromkeys("\u00a0\u2002\u2003\u2004\u2005\u2007\u2009\u200a\u202f\u205f\u3000", " "),
    **dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff", ""),
    **{"×": r"\times ", "÷": "/", "·": r"\cdot ", "⋅": r"\cdot ", "∗": "*", "∕": "/", "⁄": "/", "√": r"\sqrt"},
    **{"π": r"\pi ", "∞": r"\infty ", "±": r"\pm ", "∓": r"\mp ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne "},
    **{"≈": r"\approx ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ", "º": "°", "˚": "°"},
    **{"、": ", ", "。": ". ", "【": "[", "】": "]", "’": "'", "µ": "μ", "\u2126": "Ω", "∘": "°", "ℯ": "e"},
}
_SCRIPTS = (("^", "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻", "0123456789+-"), ("_", "₀₁₂₃₄₅₆₇₈₉", "0123456789"))
_SCRIPT_RULES = [(re.compile(f"[{chars}]+"), mark, str.maketrans(chars, plain)) for mark, chars, plain in _SCRIPTS]
_FRACTIONS = {c: unicodedata.normalize("NFKC", c).replace("\u2044", "/") for c in "¼½¾⅐⅑⅒⅓⅔⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"}
_TABLE = {ord(c): text for c, text in _CHARACTERS.items()} | {
    ord(c): r"\frac{{{}}}{{{}}}".format(*text.split("/")) for c, text in _FRACTIONS.items()
}
_TABLE |= {code: chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)}  # full-width forms


def ascii_math(text: str) -> str:
    r"""Rewrite digits, signs, spaces and fractions of other scripts and fonts as ASCII or LaTeX.

    `\$` becomes U+E000, so that it is not taken for the delimiter of a formula.
    """
    text = text.replace(r"\$", "\ue000")
    if text.isascii():
        return text
    for pattern, mark, table in _SCRIPT_RULES:
        text = pattern.sub(partial(_script, mark, table), text)
    text = text.translate(_TABLE)
    return re.sub(r"[^\W\d_a-zA-Z]|(?![0-9])\d", _digit, text)


def _script(mark: str, table: dict[int, int], match: re.Match[str]) -> str:
    return f"{mark}{{{match[0].translate(table)}}}"


def _digit(match: re.Match[str]) -> str:
    value = unicodedata.decimal(match[0], None)
    return match[0] if value is None else str(value)


_RULES = [
    (re.compile(r"\\(?:begin|end)\{(?:align\*?|equation\*?|math)\}"), ""),
    (
        re.compile(r"\\(?:left|right|bigl?|bigr?|Bigl?|Bigr?|displaystyle|textstyle|limits|boldsymbol)(?![A-Za-z])\.?"),
        "",
    ),
    (re.compile(r"\\(?:text)?color\s*\{[^{}]*\}|\\underline(?=\s*\{)"), ""),
    (re.compile(r"\\hspace\*?\{[^{}]*\}"), " "),
    (re.compile(r"\\!\s*"), ""),
    (re.compile(r"(?<=\d)(?:\\[,;:]|~|\\ )\s*(?=\d{3}(?!\d|\s*/|\\,/))"), ""),
    (re.compile(r"(?<=\d)\{,\}\s*(?=\d{3}(?!\d))"), ","),
    (re.compile(r"(?<=\d)\{[.,]\}\s*(?=\d)"), "."),
    (re.compile(r"(?<=\d)'(?=\d{3}(?!\d))"), ""),
    (re.compile(r"\{([,:])\}"), r"\1"),
    (re.compile(r"(?<!\\)\\[,;: >]|~|\\(?:quad|qquad|enspace|thinspace|space)(?![A-Za-z])"), " "),
    (re.compile(r"\\log_(?:e(?![A-Za-z])|\{e\})"), r"\\ln "),
    (re.compile(r"\\[dtc]frac(?![A-Za-z])"), r"\\frac"),
    (
        re.compile(r"\\(?:text(?:bf|it|rm|sf|tt|normal)|mathrm|mathbf|mathit|mathsf|mbox|hbox|operatorname|rm)\s*\{"),
        r"\\text{",
    ),
    (re.compile(r"\\text\s+\{"), r"\\text{"),
    (
        re.compile(
            r"\^\s*(?:\{\s*)?(?:\\circ(?![A-Za-z])|°)(?:\s*\})?|\\degree(?:s|Celsius)?(?![A-Za-z])|\\circ(?=\s*$)"
        ),
        "°",
    ),
    (re.compile(r"\{\s*°\s*\}"), "°"),
    (re.compile(r"(\\(?:sin|cos|tan|cot|sec|csc)\s*[({]?\s*)(\d+(?:\.\d+)?)°"), r"\1{\\frac{\2\\pi}{180}}"),
    (re.compile(r"(?<=\d)\s*\\text\{\s*[eE]\s*\}\s*(?=\{?[-+]?\d)"), "e"),
    (re.compile(r"\\text\{\s*([ei])\s*\}"), r" \1"),  # Euler's number and the imaginary unit
    (re.compile(r"\\frac\s*\{\s*(\\text\{[^{}]*\}\S*?)\s*\}\s*\{\s*(\\text\{[^{}]*\}[^{}]*)\s*\}"), r"\1/\2"),
    (re.compile(r"\\%|\\text\{\s*\\?%\s*\}"), "%"),
    (re.compile(r"\\(?:geq|geqslant)(?![A-Za-z])"), r"\\ge "),
    (re.compile(r"\\(?:leq|leqslant)(?![A-Za-z])"), r"\\le "),
    (re.compile(r"\\neq(?![A-Za-z])"), r"\\ne "),
    (re.compile(r"\\(?:lbrace)(?![A-Za-z])"), r"\\{"),
    (re.compile(r"\\(?:rbrace)(?![A-Za-z])"), r"\\}"),
    (re.compile(r"\\frac\s*(\d|\\pi)\s*(\d)"), r"\\frac{\1}{\2}"),
    (re.compile(r"\\frac\s*(\d|\\pi)\s*\{"), r"\\frac{\1}{"),
    (re.compile(r"(\\sqrt\s*\[\d+\])\s*(\d)"), r"\1{\2}"),
    (re.compile(r"(\\frac\s*\{[^{}]*\})\s*(\d)"), r"\1{\2}"),
    (re.compile(r"\*\*(?=\s*[-({\d])(?<=[\d)}]\*\*)"), "^"),
    (re.compile(r"(?<=[\d)])\s*[xX]\s*(?=10\s*\^)"), r"\\times "),
    (re.compile(r"(?<=[\d ])\\cdotp?(?![A-Za-z])"), r"\\cdot "),
    (re.compile(r"(?:US|AU|CA)\s*(?=[$\ue000])"), ""),
    (re.compile(r"\\text\{\s*([$€£¥\ue000])\s*\}"), r"\1"),
    (re.compile(r"\\(?:pounds|textsterling)(?![A-Za-z])"), "£"),
    (re.compile(r"\\(?:euro|texteuro)(?![A-Za-z])"), "€"),
    (re.compile(r"\\text\{\s*\}"), ""),
]
_MATTERS = re.compile(r"[\\~{}*'xX°\ue000]|US")
_EDGES = " \t\r\n.,;:*`"
_PLAIN_TEXT = re.compile(r"\\text\{\s*([-+]?[.\d][^{}]*?|[A-Z](?:(?:,|\s+and)\s*[A-Z])+)\s*\}$")  # numbers, choices
_REPEATING = re.compile(r"(\d{0,50})\.(\d{0,50})\\overline\s*\{(\d{1,50})\}")


@lru_cache(maxsize=4096)
def clean(text: str) -> str:
    r"""Normalize an answer: `ascii_math` without `$`, `\left`, `\,`, `\displaystyle`, final period or bold marks.

    `\dfrac12` becomes `\frac{1}{2}`, `\mathrm{cm}` becomes `\text{cm}`, `^\circ` becomes `°`, and `12\,000` and
    `12{,}000` become a number.
    """
    text = ascii_math(text).strip()
    text = text.rstrip("\\ \n")
    while len(text) > 2 and (text[0], text[-1]) == ("$", "$") and "$" not in text[1:-1]:
        text = text[1:-1].strip()
    for left, right in ((r"\(", r"\)"), (r"\[", r"\]"), ("$$", "$$")):
        if text.startswith(left) and text.endswith(right) and len(text) >= 4:
            text = text[2:-2].strip()
    if text.count("$") > 1 and not re.search(r"\$\s*\d[^$]*$", text):  # $1$ and $2$
        text = text.replace("$", "")
    if _MATTERS.search(text):
        for pattern, replacement in _RULES:
            text = pattern.sub(replacement, text)
    text = text.replace("\ue000", "$")
    text = _REPEATING.sub(_repeating, text) if r"\overline" in text else text
    text = text.lstrip(" \t\r\n,;:*`").rstrip(_EDGES).strip()
    plain = _PLAIN_TEXT.match(text)
    return plain[1] if plain else text


def _repeating(match: re.Match[str]) -> str:
    r"""Convert `0.1\overline{6}` to a fraction."""
    whole, fixed, period = match[1] or "0", match[2], match[3]
    top = int(whole + fixed + period) - int(whole + fixed)
    return rf"\frac{{{top}}}{{{10 ** len(fixed) * (10 ** len(period) - 1)}}}"
