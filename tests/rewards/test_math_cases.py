"""The reward `math`: a table of cases with the right score, and generators of each kind.

Right answers must score 1 in every notation, and wrong ones 0.
"""

# ruff: noqa: RUF001 (characters that look like ASCII are meant)

import random
import time
import weakref
from decimal import Decimal
from fractions import Fraction

import math_verify
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from math_cases import BOXED, RESPONSES

from qarl.errors import UserError
from qarl.rewards.mathematics import math

FORMS = [r"Adding up, $\boxed{%s}$.", r"So we get \fbox{%s}", "work\n#### %s", "The answer is %s."]
few = settings(max_examples=40, deadline=None, derandomize=True)


def score(gold: object, response: str, prompt: str = "p", **options) -> float:
    return math([response], [prompt], answer=[gold], **options)[0]


def scores(gold: object, answer: str, forms: list[str] = FORMS) -> set[float]:
    return {score(gold, form % answer) for form in forms}


@pytest.mark.parametrize(
    ("form", "rows"),
    [*((r"so \boxed{%s}", rows) for rows in BOXED.values()), *(("%s", rows) for rows in RESPONSES.values())],
    ids=[*BOXED, *RESPONSES],
)
def test_answers_have_their_score(form, rows):
    cases = [(gold, answer, right) for gold, right, *answers in rows for answer in answers]
    assert [case for case in cases if score(case[0], form % case[1]) != case[2]] == []


def test_each_ground_truth_is_its_own_answer():
    """Except where the text of the ground truth is a formula, which a box does not hold."""
    golds = {str(gold) for rows in BOXED.values() for gold, *_ in rows if not isinstance(gold, list)}
    plain = [gold for gold in golds if "####" not in gold and "$" not in gold.replace(r"\$", "")]
    assert [gold for gold in sorted(plain) if score(gold, rf"\boxed{{{gold}}}") != 1.0] == []


def notations(mantissa: Decimal, exponent: int) -> list[str]:
    shifted = mantissa.scaleb(1)
    return [
        rf"{mantissa}\times 10^{{{exponent}}}",
        rf"{mantissa} \cdot 10^{{{exponent}}}",
        rf"{mantissa}e{exponent}",
        rf"{mantissa}E{exponent:+03d}",
        rf"{mantissa}e{exponent:+d}",
        rf"{mantissa} × 10^{{{exponent}}}",
        rf"{mantissa}*10^({exponent})",
        rf"{shifted:f}\times 10^{{{exponent - 1}}}",
        rf"10^{{{exponent}}} \times {mantissa}",
    ]


mantissas = st.decimals(-9, 9, places=3).filter(lambda m: abs(m) >= 1 and m != m.to_integral_value())


@few
@given(mantissas, st.integers(-40, 40).filter(bool), st.integers(0, 8), st.integers(0, 8), st.integers(-5, 5))
def test_e_notation(mantissa, exponent, gold_form, answer_form, off):
    gold = notations(mantissa, exponent)[gold_form]
    assert scores(gold, notations(mantissa, exponent)[answer_form]) == {1.0}
    assert scores(float(f"{mantissa}e{exponent}"), notations(mantissa, exponent)[answer_form]) == {1.0}
    if off:
        assert scores(gold, notations(mantissa, exponent + off)[answer_form]) == {0.0}
    assert scores(gold, notations(-mantissa, exponent)[answer_form]) == {0.0}
    assert scores(gold, notations(mantissa + Decimal("0.001"), exponent)[answer_form]) == {0.0}
    assert scores(gold, rf"{mantissa} \cdot e \cdot {exponent}", FORMS[:3]) == {0.0}


@few
@given(st.integers(1, 99), st.integers(1, 12), st.integers(1, 12), st.booleans(), st.integers(0, 5))
def test_mixed_numbers(whole, top, rest, negative, form):
    bottom, sign = top + rest, "-" if negative else ""
    value = (-1 if negative else 1) * (whole + Fraction(top, bottom))
    answer = [
        f"{sign}{whole} {top}/{bottom}",
        rf"{sign}{whole}\frac{{{top}}}{{{bottom}}}",
        rf"{sign}{whole}\tfrac{{{top}}}{{{bottom}}}",
        rf"{sign}{whole} \dfrac{{{top}}}{{{bottom}}}",
        rf"{sign}{whole}\,\frac{{{top}}}{{{bottom}}}",
        f"{value.numerator}/{value.denominator}",
    ][form]
    assert scores(f"{value.numerator}/{value.denominator}", answer) == {1.0}
    assert scores(answer, rf"\frac{{{value.numerator}}}{{{value.denominator}}}") == {1.0}
    for wrong in (Fraction(whole), value + 1, Fraction(top, bottom), whole * Fraction(top, bottom)):
        if wrong != value:
            assert scores(f"{wrong.numerator}/{wrong.denominator}", answer) == {0.0}


# Of each unit its spellings, and its size in the first unit of its group.
UNITS = [
    [("m", "meters", 1), ("cm", "centimeters", "1/100"), ("km", "kilometers", 1000), ("ft", "feet", "0.3048")],
    [("kg", "kilograms", 1), ("g", "grams", "1/1000"), ("lb", "lbs", "0.45359237")],
    [("h", "hours", 3600), ("min", "minutes", 60), ("days", "day", 86400)],
    [("J", "joules", 1), ("eV", "electronvolts", "1.602176634e-19"), ("kJ", "kilojoules", 1000)],
    [("L", "liters", 1), ("mL", "milliliters", "1/1000")],
    [("m^2", "square meters", 1), ("cm^2", "square centimeters", "1/10000")],
    [("m/s", "meters per second", 1), ("km/h", "kilometers per hour", "5/18")],
]
KNOWN = [(group, *unit) for group, units in enumerate(UNITS) for unit in units]


@few
@given(st.integers(1, 999), st.sampled_from(KNOWN), st.sampled_from(KNOWN))
def test_units(value, one, other):
    gold, answers = rf"{value}\text{{ {one[1]}}}", [f"{value} {other[1]}", rf"{value}\,\mathrm{{{other[2]}}}"]
    same = one[0] == other[0] and Fraction(one[3]) == Fraction(other[3])
    assert {score(gold, rf"\boxed{{{answer}}}") for answer in answers} == {float(same)}
    assert scores(gold, str(value)) == scores(str(value), f"{value} {one[2]}") == {1.0}
    assert scores(gold, f"{value + 1} {one[1]}") == scores(gold, str(value + 1)) == {0.0}
    if one[0] == other[0]:
        converted = value * Fraction(one[3]) / Fraction(other[3])
        text = rf"\frac{{{converted.numerator}}}{{{converted.denominator}}}\text{{ {other[1]}}}"
        assert score(gold, rf"\boxed{{{text}}}") == 1.0


@few
@given(st.integers(2, 16), st.integers(2, 16), st.integers(8, 9999))
def test_number_bases(base, other, value):
    digits, left = "", value
    while left:
        digits, left = "0123456789ABCDEF"[left % base] + digits, left // base
    gold = f"{digits}_{{{base}}}"
    assert score(gold, rf"\boxed{{{gold}}}") == 1.0
    if base != other:
        assert score(gold, rf"\boxed{{{digits}_{{{other}}}}}") == 0.0
    if digits.isdigit():
        assert score(gold, rf"\boxed{{{digits}}}") == 1.0
        assert base == 10 or value < base or score(gold, rf"\boxed{{{value}}}") == 0.0


@few
@given(st.lists(st.integers(-4, 4), min_size=2, max_size=5), st.randoms(use_true_random=False))
def test_lists(items, rng):
    def said(values: list[int], form: str = "%s") -> float:
        return score(", ".join(map(str, items)), rf"\boxed{{{form % ', '.join(map(str, values))}}}")

    shuffled = rng.sample(items, len(items))
    assert said(shuffled) == 1.0
    extra = rng.choice(items)
    assert said([*shuffled, extra]) == said(shuffled[1:]) == 0.0
    changed = [shuffled[0] + 1, *shuffled[1:]]
    assert said(changed) == 0.0
    ordered = [
        score(f"({', '.join(map(str, items))})", rf"\boxed{{({', '.join(map(str, v))})}}") for v in (items, shuffled)
    ]
    assert ordered == [1.0, float(items == shuffled)]


@few
@given(st.integers(1000, 10**12), st.sampled_from([",", r"\,", "{,}", r",\!", " ", r"\ ", "\u202f", "\u00a0"]))
def test_thousands_separators(value, separator):
    answer = f"{value:,}".replace(",", separator)
    assert scores(str(value), answer) == scores(answer, f"{value}.") == scores(rf"\${answer}", rf"\${value}") == {1.0}
    assert scores(str(value), f"{value + 1:,}".replace(",", separator)) == {0.0}
    full_width = answer.translate({ord(d): ord(d) + 0xFEE0 for d in "0123456789"})
    assert score(str(value), rf"\boxed{{{full_width}}}") == 1.0


@few
@given(st.integers(1, 400), st.integers(1, 400), st.integers(2, 9))
def test_small_numbers_compare_by_their_ratio(a, b, base):
    for power in (
        f"1/{base}^{{%s}}",
        rf"\frac{{1}}{{{base}^{{%s}}}}",
        f"{base}^{{-%s}}",
        rf"\sqrt{{2}}\cdot {base}^{{-%s}}",
    ):
        assert score(power % a, rf"\boxed{{{power % b}}}") == float(a == b)


THINKING = [r"maybe \boxed{%s}", "the answer is %s.", r"no: \boxed{%s", "hm", "$%s$", "#### %s"]


@few
@given(st.randoms(use_true_random=False), st.booleans())
def test_only_what_follows_the_think_block_counts(rng: random.Random, by_prompt):
    inside = " ".join(part.replace("%s", "12") for part in rng.choices(THINKING, k=3))
    prompt, opened = ("x<think>\n", "") if by_prompt else ("x", "<think>")
    assert score("12", opened + inside, prompt) == 0.0
    assert score("12", f"{opened}{inside}</think>", prompt) == 0.0
    for form in FORMS:
        assert score("12", f"{opened}{inside}</think>\n{form % 12}", prompt) == 1.0
        assert score("12", f"{opened}{inside}</think>\n{form % 13}", prompt) == 0.0
    assert score("12", rf"{opened}{inside} \boxed{{12}}", prompt, think_tags=None) == 1.0


@few
@given(st.integers(10, 10**6), st.randoms(use_true_random=False))
def test_a_box_that_is_not_closed_is_no_answer(value, rng: random.Random):
    whole = rf"\boxed{{\frac{{{value}}}{{1}}}}"
    cut = whole[: rng.randrange(len(r"\boxed{"), len(whole))]
    before = rf"First \boxed{{{value}}}. No, "
    assert score(value, before + whole) == 1.0
    assert score(value, before + cut) == score(value, cut) == 0.0
    assert score(value, before + cut, complete_box=False) == 1.0


@pytest.mark.parametrize(
    ("prompt", "right"),
    [
        ("Think in <think> and </think>.", 1.0),
        ("Begin with <think>.<|im_end|>\n<|im_start|>assistant\n", 1.0),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", 1.0),
        ("<|im_start|>assistant\n<think>\n", 0.0),
        ("<|im_start|>assistant\n<think>\nLet me see.", 0.0),
    ],
)
def test_prompts_that_open_a_think_block(prompt, right):
    assert score("12", r"\boxed{12}", prompt) == right
    assert score("12", r"so</think> \boxed{12}", prompt) == 1.0


def test_other_think_tags():
    tags = ["[THINK]", "[/THINK]"]
    assert score("12", r"[THINK]\boxed{12}", think_tags=tags) == 0.0
    assert score("12", r"[THINK]\boxed{13}[/THINK]\boxed{12}", think_tags=tags) == 1.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"think_tags": "<think>"}, "think_tags must be two texts"),
        ({"think_tags": ["<think>"]}, "think_tags must be two texts"),
        ({"think_tags": ["a", "a"]}, "think_tags must be two texts"),
        ({"complete_box": "no"}, "complete_box must be true or false"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(UserError, match=message):
        math([], [], answer=[], **options)


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("1/2^99999999", r"1/2^{99999998}"),
        ("2^{99999999}", r"3^{99999999}"),
        ("1e999999999", r"1e999999998"),
        ("1e99999999999999999999", "1"),
        ("1", "9^{9^{9^{9^9}}}"),
        (r"\sqrt{2^{99999999}}", r"\sqrt{3^{99999999}}"),
        ("9" * 5000, "9" * 4999 + "8"),
        ("(" * 3000 + "1" + ")" * 3000, "2"),
        (r"\frac{" * 500 + "1" + "}{2}" * 500, "2"),
        (", ".join(map(str, range(300))), ", ".join(map(str, range(1, 301)))),
        (r"\{" * 200, r"\}" * 200),
        ("1" + "^2" * 2000, "1"),
        ("-" * 5000 + "1", "2"),
        ("1 " * 4000, "1," * 4000),
        (r"\boxed{" * 2000, "12"),
        ("x" + "=x" * 3000, "y" + "=y" * 3000),
    ],
)
def test_work_is_bounded(gold, answer):
    started = time.process_time()
    try:
        assert score(gold, rf"\boxed{{{answer}}}", timeout_s=1) == 0.0
    except ValueError as error:
        assert "ground truth" in str(error)
    assert time.process_time() - started < 6.0


def spin(seconds: float) -> None:
    """Use so much CPU time."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_the_time_limit_holds_if_python_drops_its_first_exception(monkeypatch):
    """Python ignores exceptions in a weakref callback."""

    class Dead:
        pass

    def hang(*_: object, **__: object) -> list[object]:
        dead = Dead()
        _reference = weakref.ref(dead, lambda _: spin(1.5))
        del dead
        spin(10)
        return []

    monkeypatch.setattr("math_verify.parser.extract_target_from_pred", hang)
    started = time.thread_time()
    with pytest.raises(ValueError, match="ground truth"):
        score("x+7y", r"\boxed{x-7y}", timeout_s=1)
    assert time.thread_time() - started < 9


def test_the_time_limit_does_not_count_waiting(monkeypatch):
    """So that scores do not depend on the load of the machine."""
    real = math_verify.parser.extract_target_from_pred

    def waits(*arguments: object, **options: object) -> object:
        time.sleep(1.2)
        return real(*arguments, **options)

    monkeypatch.setattr("math_verify.parser.extract_target_from_pred", waits)
    assert score("x+8y", r"\boxed{8y+x}", timeout_s=1) == 1.0
