"""The reward `math`: a table of cases with the right score, think blocks, unfinished boxes, and bounds of its work."""

import random
import time

import math_verify
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from math_cases import BOXED, RESPONSES

from qarl.errors import UserError
from qarl.rewards.mathematics import math

few = settings(max_examples=40, deadline=None, derandomize=True)


def score(gold: object, response: str, prompt: str = "p", **options) -> float:
    return math([response], [prompt], answer=[gold], **options)[0]


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


def test_options_are_checked():
    with pytest.raises(UserError, match="think_tags must be two texts"):
        math([], [], answer=[], think_tags="<think>")


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("1/2^99999999", r"1/2^{99999998}"),
        ("1", "9^{9^{9^{9^9}}}"),
        ("(" * 3000 + "1" + ")" * 3000, "2"),
        (", ".join(map(str, range(300))), ", ".join(map(str, range(1, 301)))),
    ],
)
def test_work_is_bounded(gold, answer):
    started = time.process_time()
    try:
        assert score(gold, rf"\boxed{{{answer}}}", timeout_s=1) == 0.0
    except ValueError as error:
        assert "ground truth" in str(error)
    assert time.process_time() - started < 6.0


def test_the_time_limit_does_not_count_waiting(monkeypatch):
    """So that scores do not depend on the load of the machine."""
    real = math_verify.parser.extract_target_from_pred

    def waits(*arguments: object, **options: object) -> object:
        time.sleep(1.2)
        return real(*arguments, **options)

    monkeypatch.setattr("math_verify.parser.extract_target_from_pred", waits)
    assert score("x+8y", r"\boxed{8y+x}", timeout_s=1) == 1.0
