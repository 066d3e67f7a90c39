"""The built-in reward `math`. The only module that imports math-verify, which takes over a second."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Sequence
from decimal import Decimal, DecimalException
from functools import lru_cache, partial, wraps
from typing import Any

import math_verify
from latex2sympy2_extended import NormalizationConfig
from math_verify import grader, parser
from math_verify.errors import TimeoutException
from sympy import Expr, Float, I

from qarl.errors import UserError
from qarl.rewards.builtin import final_answer, ground_truths
from qarl.rewards.equality import same
from qarl.rewards.number_text import read
from qarl.rewards.numbers import Quantity, equal
from qarl.rewards.responses import (
    THINK_TAGS,
    after_thinking,
    answer_block,
    check_tags,
    final_box,
    final_fragment,
    formulas,
    has_prose,
    joined_formulas,
)
from qarl.rewards.spelling import ascii_math, clean

# Units are parsed here, because math-verify would treat the variable in `5m` as a unit.
_EXTRACTION = [
    math_verify.LatexExtractionConfig(
        normalization_config=NormalizationConfig(units=False, malformed_operators=True, nits=True)
    ),
    math_verify.ExprExtractionConfig(),
]
_REPEAT_S = 0.5  # seconds between checks of an expired time limit
_PRECISION = 50  # digits of constants such as sqrt(2)
_LENGTH = 2_000  # longest expression passed to math-verify
_HUGE = re.compile(r"\^\s*\{?\s*[-+]?\s*\d{7,}|\d[eE][-+]?\d{5,}|\d{4,}!|!!")
_E_NOTATION = re.compile(r"(?<![\w.])(\d+\.?\d*|\.\d+)[eE]\{?([-+]?\d+)\}?(?![\w.])")
_MIXED = re.compile(r"(?<![\d.}])(\d+)\s*(\\frac\{\d+\}\{\d+\})")
_LAST_LINE = re.compile(r"####[ \t]*([^\n]*?)\s*$")


def _timeout(timeout_seconds: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that limits the CPU time of a function, in place of `math_verify.utils.timeout`.

    math-verify's own decorator limits the wall time, so that scores would depend on the load of the machine. It also
    raises only once, which has no effect inside a weakref callback or a finalizer, where Python ignores exceptions.
    This one raises repeatedly until the function ends.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def limited(*args: Any, **options: Any) -> Any:
            begin = time.thread_time()

            def expired(*_: object) -> None:
                if time.thread_time() - begin >= timeout_seconds:
                    raise TimeoutException("Operation timed out!")

            previous = signal.signal(signal.SIGALRM, expired)
            signal.setitimer(signal.ITIMER_REAL, timeout_seconds, _REPEAT_S)
            try:
                try:
                    return function(*args, **options)
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
            finally:  # again, because the time may have expired at the beginning of the first `finally`
                signal.setitimer(signal.ITIMER_REAL, 0)
                signal.signal(signal.SIGALRM, previous)

        return limited

    return decorate


parser.timeout = grader.timeout = _timeout


def math(
    completions: list[str],
    prompts: list[str],
    *,
    column: str = "answer",
    timeout_s: int = 2,
    think_tags: Sequence[str] | None = THINK_TAGS,
    complete_box: bool = True,
    **columns: list,
) -> list[float]:
    r"""Score 1 if the response's final answer is mathematically equal to the ground truth, else 0.

    docs/rewards.md defines the final answer and equality. Numbers, lists and units are compared here, other
    expressions by math-verify.

    Args:
        completions: Responses.
        prompts: Their prompts.
        column: Data column of the ground truths: numbers, LaTeX, or texts with `\boxed{}`, `$...$` or `####`.
        timeout_s: Limit of CPU time per call of math-verify in whole seconds; on timeout the answer is wrong. Uses
            SIGALRM, so this must run in the main thread.
        think_tags: Score only the text after a think block with these tags, see `after_thinking`; None: the whole
            response.
        complete_box: Score 0 if the last box is not closed. If False, that box is ignored.
        columns: Data columns.

    Returns:
        One score per response.

    Raises:
        ValueError: A ground truth is null, empty, or cannot be parsed.
    """
    if timeout_s < 1:
        raise UserError(f"timeout_s must be at least 1 (second), got {timeout_s!r}")
    check_tags(think_tags)
    symbolic = partial(_symbolic, timeout_s)
    scores = []
    for completion, prompt, answer in zip(completions, prompts, ground_truths(columns, column), strict=True):
        gold = _gold(answer)
        actual = after_thinking(completion, prompt, think_tags)
        fragment = None if actual is None else _fragment(actual, "####" in str(answer), complete_box)
        scores.append(float(fragment is not None and same(gold, fragment, symbolic)))
    return scores


def _gold(answer: object) -> str:
    """Return the ground truth as one expression.

    Raises:
        ValueError: It is empty.
    """
    if isinstance(answer, float):  # uppercase, so that an exponent is not read as Euler's number
        return repr(answer).upper()
    text = ascii_math(final_answer(answer))
    box = final_box(text, complete=False)
    found = formulas(text) if box is None else []
    gold = box or (joined_formulas(text, found, len(found) - 1, -1) if found else text)
    if not clean(gold):
        raise ValueError(f"there is no answer in the ground truth {str(answer)[-60:]!r}")
    return gold


def _fragment(response: str, marked: bool, complete_box: bool) -> str | None:
    """Return the final answer of a response. `marked`: the ground truth follows `####`, as in GSM8K."""
    text = ascii_math(response)
    if marked and "####" in text:
        text = text.rpartition("####")[2]
        if "\\boxed" not in text and "\\fbox" not in text:
            text = text.strip().partition("\n")[0]
    elif "\\boxed" not in text:
        text = answer_block(text) or text
        text = line[1] if (line := _LAST_LINE.search(text)) is not None else text
    text = text.strip()
    if len(text) <= 200 and "\n" not in text and "\\boxed" not in text and "\\fbox" not in text:
        if not has_prose(text):  # the whole text is an expression
            return text
        return final_fragment(text, complete_box) or text
    return final_fragment(text, complete_box)


def _symbolic(timeout_s: int, gold: str, answer: str) -> bool:
    """Compare two expressions with math-verify, or to 50 digits if they are real or complex numbers.

    Raises:
        ValueError: math-verify cannot parse the ground truth.
    """
    if max(len(gold), len(answer)) > _LENGTH or any(_HUGE.search(text) for text in (gold, answer)):
        return False
    return any(_equal(g, a, timeout_s) for g in _spellings(gold) for a in _spellings(answer))


def _spellings(text: str) -> list[str]:
    """Return the readings of an expression: e-notation as a product, and also unchanged if e may be Euler's number.

    math-verify reads every e as Euler's number.
    """
    text = _MIXED.sub(r"(\1+\2)", text.replace("$", ""))
    product = _E_NOTATION.sub(r"(\1 \\times 10^{\2})", text)
    return [text] if product == text else [product, text] if re.search(r"\de[-+][1-9]", text) else [product]


def _equal(gold: str, answer: str, timeout_s: int) -> bool:
    wanted, actual = _constant(gold, timeout_s), _constant(answer, timeout_s)
    if len(wanted) == len(actual) > 0:
        return all(map(equal, wanted, actual))
    target = _parse(gold, timeout_s)
    if not target:
        raise ValueError(f"math-verify finds no answer in the ground truth {gold[-60:]!r}")
    return math_verify.verify(list(target), list(_parse(answer, timeout_s)), timeout_seconds=timeout_s)


@lru_cache(maxsize=1024)
def _parse(text: str, timeout_s: int) -> tuple:
    return tuple(math_verify.parse(rf"\boxed{{{text}}}", _EXTRACTION, parsing_timeout=timeout_s))


@lru_cache(maxsize=1024)
def _constant(text: str, timeout_s: int) -> tuple[Quantity, ...]:
    """Return the value of an expression: its real part, and its imaginary part unless that is 0.

    Empty if the expression has variables. The variable `i` counts as the imaginary unit.
    """
    if found := read(text):
        return found
    parsed = _parse(text, timeout_s)
    if not parsed or not isinstance(parsed[0], Expr) or {str(name) for name in parsed[0].free_symbols} - {"i"}:
        return ()
    unit, rounded = dict.fromkeys(parsed[0].free_symbols, I), parsed[0].has(Float)
    try:
        parts = _timeout(timeout_s)(lambda: parsed[0].subs(unit).doit().evalf(_PRECISION).as_real_imag())()
        if not all(part.is_Float or part.is_Integer or part.is_Rational for part in parts):
            return ()
        real, imaginary = (Quantity(Decimal(str(part.evalf(_PRECISION))), approximate=rounded) for part in parts)
        return (real, imaginary) if imaginary.value else (real,)
    except (TimeoutException, DecimalException, ArithmeticError, AttributeError, TypeError, ValueError):
        return ()
