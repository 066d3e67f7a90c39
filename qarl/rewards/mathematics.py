"""The built-in reward `math`. The one module that imports math-verify (over a second)."""

from __future__ import annotations

import math_verify

from qarl.errors import UserError
from qarl.rewards.builtin import final_answer, ground_truths

_DELIMITERS = ("$", r"\boxed", r"\(", r"\[")


def math(
    completions: list[str],
    prompts: list[str],
    *,
    column: str = "answer",
    timeout_s: int = 2,
    **columns: list,
) -> list[float]:
    """1 if the completion's final answer equals the ground truth mathematically, else 0 (math-verify).

    The ground truth is `final_answer` of `column`: a number, LaTeX, or a text with `\\boxed{}` or `$...$` in it. Where
    it is written with `####`, a completion may be too, and what follows its last `####` counts.
    timeout_s: whole seconds for each of parsing and comparing one completion; past them it scores 0. math-verify
    keeps that limit with SIGALRM, so this runs in a main thread only.

    Raises ValueError for a ground truth that is not there (null) or cannot be parsed.
    """
    if type(timeout_s) is not int or timeout_s < 1:
        raise UserError(f"timeout_s must be a whole number of seconds, at least 1, got {timeout_s!r}")
    scores = []
    for completion, answer in zip(completions, ground_truths(columns, column), strict=True):
        gold = _parse_gold(answer, timeout_s)
        # math-verify knows no `####`: of a GSM8K solution it may take a number before it.
        text = final_answer(completion) if "####" in str(answer) else completion
        candidate = math_verify.parse(text, parsing_timeout=timeout_s)
        scores.append(float(math_verify.verify(gold, candidate, timeout_seconds=timeout_s)))
    return scores


def _parse_gold(answer: object, timeout_s: int) -> list:
    text = final_answer(answer)
    if not any(delimiter in text for delimiter in _DELIMITERS):
        text = rf"\boxed{{{text}}}"  # else plain `x^2 + 1` is taken for the last number in it
    gold = math_verify.parse(text, parsing_timeout=timeout_s)
    if not gold:
        raise ValueError(f"math-verify finds no answer in the ground truth {str(answer)[-60:]!r}")
    return gold
