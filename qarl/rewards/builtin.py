"""Built-in rewards that need only the standard library.

Each has TRL's signature; keyword-only parameters are options of the configuration. Functions check options and columns
before completions, so a call without completions validates the configuration.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, Literal

from qarl.errors import UserError
from qarl.rewards.responses import THINK_TAGS, after_thinking, answer_block, check_tags, leaves_open

# One think block, then one answer block. A plain `.*?` would also match several blocks.
ONE_ANSWER = r"<think>(?:(?!</?think>|</?answer>).)*</think>\s*<answer>(?:(?!</?think>|</?answer>).)*</answer>"


def column_values(columns: dict[str, list], name: str) -> list:
    """Return one data column.

    Raises:
        UserError: The column does not exist; lists the existing ones.
    """
    if name not in columns:
        known = ", ".join(sorted(columns.keys() - {"completion_ids"}))  # not a data column
        raise UserError(f"no data column `{name}`; available: {known or 'none'}")
    return columns[name]


def ground_truths(columns: dict[str, list], name: str, objects: bool = False) -> list:
    """Return one data column of answers. objects: an answer may be an object, such as the tests of a program.

    Raises:
        ValueError: An answer is null, NaN or an object, so that every response would score 0.
    """
    answers = column_values(columns, name)
    for answer in answers:
        if answer is None or answer != answer:  # NaN differs from itself
            raise ValueError(f"the data's column `{name}` has no answer in this row ({answer or 'null'})")
        if isinstance(answer, dict) and not objects:
            fields = ", ".join(map(str, answer))
            raise ValueError(
                f"the data's column `{name}` has no answer in this row; name one of {fields} in data.columns"
            )
    return answers


def final_answer(answer: Any) -> str:
    """Return the ground truth as text: what follows the last `####` (GSM8K), or the whole value, stripped.

    A list of answers (OlympiadBench) becomes "a, b", which `math` compares as a set.
    """
    if isinstance(answer, list):
        answer = ", ".join(str(part) for part in answer)
    return str(answer).rpartition("####")[2].strip()


def exact(
    completions: list[str],
    prompts: list[str],
    *,
    column: str = "answer",
    strip: bool = True,
    casefold: bool = False,
    think_tags: Sequence[str] | None = THINK_TAGS,
    **columns: list,
) -> list[float]:
    """Score 1 if the response equals the text of `column`, else 0.

    Args:
        completions: Responses.
        prompts: Their prompts.
        column: Data column of the answers.
        strip: Ignore surrounding white space.
        casefold: Ignore case.
        think_tags: Score only the text after a think block with these tags, see `after_thinking`; None: the whole
            response.
        columns: Data columns.

    Returns:
        One score per response.
    """
    check_tags(think_tags)

    def normal(text: str) -> str:
        text = text.strip() if strip else text
        return text.casefold() if casefold else text

    answers = ground_truths(columns, column)
    answer_part = [after_thinking(c, p, think_tags) for c, p in zip(completions, prompts, strict=True)]
    return [float(s is not None and normal(s) == normal(str(a))) for s, a in zip(answer_part, answers, strict=True)]


def regex(
    completions: list[str],
    prompts: list[str],
    *,
    pattern: str,
    group: int | str | None = None,
    column: str = "answer",
    think_tags: Sequence[str] | None = THINK_TAGS,
    **columns: list,
) -> list[float]:
    """Score 1 if the pattern is found in the response, or if one of its groups is the right answer, else 0.

    Args:
        completions: Responses.
        prompts: Their prompts.
        pattern: Regular expression for `re.search`; write flags inline, such as `(?s)`.
        group: Number or name of the group that must equal `final_answer` of `column`, both stripped. None: any match
            scores 1.
        column: Data column of the answers.
        think_tags: With `group`, score only the text after a think block with these tags, see `after_thinking`. None,
            or a pattern that contains one of the tags: the whole response.
        columns: Data columns.

    Returns:
        One score per response.
    """
    compiled = compile_pattern(pattern)
    check_tags(think_tags)
    if group is None:
        return [float(compiled.search(completion) is not None) for completion in completions]
    if group not in {0, *range(1, compiled.groups + 1), *compiled.groupindex}:
        raise UserError(f"group {group!r} is not in the pattern {pattern!r}")
    answers = ground_truths(columns, column)
    tags = tags_for(pattern, think_tags)
    scores = []
    for completion, prompt, answer in zip(completions, prompts, answers, strict=True):
        answer_part = after_thinking(completion, prompt, tags)
        match = None if answer_part is None else compiled.search(answer_part)
        scores.append(float(match is not None and (match[group] or "").strip() == final_answer(answer)))
    return scores


def choice(
    completions: list[str],
    prompts: list[str],
    *,
    column: str = "answer",
    think_tags: Sequence[str] | None = THINK_TAGS,
    **columns: list,
) -> list[float]:
    """Score 1 if the response chooses the letter in the column, else 0; see `chosen_letter`.

    Args:
        completions: Responses.
        prompts: Their prompts.
        column: Data column of the letters, as created by `data.choices`.
        think_tags: Score only the text after a think block with these tags, see `after_thinking`; None: the whole
            response.
        columns: Data columns.

    Returns:
        One score per response.

    Raises:
        ValueError: A ground truth is null or not a letter (b, B, B. or (B)).
    """
    check_tags(think_tags)
    scores = []
    for completion, prompt, answer in zip(completions, prompts, ground_truths(columns, column), strict=True):
        letter = _LETTER.fullmatch(str(answer))
        if letter is None:
            raise ValueError(f"the data's column `{column}` is {answer!r:.60}, expected a letter; see data.choices")
        answer_part = after_thinking(completion, prompt, think_tags)
        scores.append(float(answer_part is not None and chosen_letter(answer_part) == letter[1].upper()))
    return scores


_ANSWER_IS = re.compile(
    r"(?i:answer\**\s*(?:is|:)\s*(?:option\b|choice\b)?)[\s:*$`\"]*(?:\\\(|\\boxed\{|\\text(?:bf)?\{)*\(?"
    r"(?!I(?:'|\s+(?:think|believe|would|will|can|am|have|know|guess|choose|pick|select)\b))([A-Z])\b"
)
_LETTER = re.compile(r"\s*\(?([A-Za-z])[).:]?\s*")
_IN_BRACKETS = re.compile(r"(?:\(|\\boxed\{(?:\\text\{)?\(?)([A-Z])[)}]")
_OPTION = re.compile(r"\W*([A-Z])[.):]\s")
_ALONE = re.compile(r"^\W*([A-Z])\W*$", re.MULTILINE)


def chosen_letter(text: str) -> str | None:
    """Return the option that a response chooses, as in lm-evaluation-harness; None if it chooses none.

    In order: the first "answer is (X)" (its filter for MMLU-Pro), also as "**Answer**: X", "answer is option X" or in
    LaTeX; the last letter in brackets or in a box (its flexible filter for GPQA); the last line that consists of a
    single letter. If there is an `<answer>` block, only the last one counts, and it may begin with the letter
    ("B. blue").
    """
    block = answer_block(text)
    text = block or text
    if first := _ANSWER_IS.search(text):
        return first[1]
    for pattern in (_IN_BRACKETS, _ALONE):
        if found := pattern.findall(text):
            return str(found[-1])
    option = _OPTION.match(block) if block else None
    return option[1] if option else None


def tags_for(pattern: str | None, think_tags: Sequence[str] | None) -> Sequence[str] | None:
    """Return the think tags, or None if the user's pattern contains one and so handles think blocks itself."""
    mentions = pattern is not None and think_tags is not None and any(tag in pattern for tag in think_tags)
    return None if mentions else think_tags


def length(
    completions: list[str],
    prompts: list[str],
    *,
    unit: Literal["chars", "words", "tokens"] = "chars",
    target: float | None = None,
    max: float | None = None,
    **columns: list,
) -> list[float]:
    """Return the negative length of each completion, optionally relative to `max` or `target`.

    With length n: -n by default; -min(n, max) / max, in [-1, 0], with `max`; -|n - target| / target with `target`.

    Args:
        completions: Responses.
        prompts: Their prompts.
        unit: `chars`, `words` (separated by white space) or `tokens` (including a stop token).
        target: Preferred length.
        max: Length at which the penalty is full.
        columns: Data columns.

    Returns:
        One score per response.
    """
    if target is not None and max is not None:
        raise UserError("give target or max, not both")
    for name, value in (("target", target), ("max", max)):
        if value is not None and not 0 < value < math.inf:
            raise UserError(f"{name} must be positive, got {value!r}")
    if unit == "tokens":
        sizes = [len(ids) for ids in column_values(columns, "completion_ids")]
    else:
        sizes = [len(completion) if unit == "chars" else len(completion.split()) for completion in completions]
    if target is not None:
        return [-abs(size - target) / target for size in sizes]
    if max is not None:
        return [-min(size, max) / max for size in sizes]
    return [-float(size) for size in sizes]


def overlong(completions: list[str], prompts: list[str], *, max: int, buffer: int, **columns: list) -> list[float]:
    """Soft penalty for long completions (DAPO, Yu et al. 2025, equation 13).

    With n tokens: 0 up to max - buffer, then (max - buffer - n) / buffer, and -1 from max on. Use it with
    `rollout.max_response_length: max`; DAPO uses a maximum of 20,480 and a buffer of 4,096.

    Args:
        completions: Responses.
        prompts: Their prompts.
        max: Number of tokens at which the penalty is full.
        buffer: Number of tokens before `max` over which the penalty grows.
        columns: Data columns.

    Returns:
        One score per response.
    """
    for name, value in (("max", max), ("buffer", buffer)):
        if value < 1:
            raise UserError(f"{name} must be a positive number of tokens, got {value!r}")
    if buffer > max:
        raise UserError(f"buffer ({buffer}) must be at most max ({max})")
    sizes = [len(ids) for ids in column_values(columns, "completion_ids")]
    return [-sorted((0.0, (size - (max - buffer)) / buffer, 1.0))[1] for size in sizes]  # clamped to [-1, 0]


def format(
    completions: list[str],
    prompts: list[str],
    *,
    pattern: str = ONE_ANSWER,
    **columns: list,
) -> list[float]:
    """Score 1 if `pattern` matches the whole stripped completion (`re.fullmatch`; `.` matches newlines), else 0.

    Args:
        completions: Responses.
        prompts: Their prompts.
        pattern: Regular expression. Default: one think block, then one answer block; a `<think>` that the chat template
            writes at the end of the prompt counts as part of the completion.
        columns: Data columns.

    Returns:
        One score per response.
    """
    compiled = compile_pattern(pattern, re.DOTALL)
    own = pattern == ONE_ANSWER
    begun = [THINK_TAGS[0] if own and leaves_open(prompt, *THINK_TAGS) else "" for prompt in prompts]
    responses = [begin + completion.strip() for begin, completion in zip(begun, completions, strict=True)]
    return [float(compiled.fullmatch(response) is not None) for response in responses]


def compile_pattern(pattern: str, flags: int = 0) -> re.Pattern[str]:
    """Compile an option's regular expression. Raises UserError."""
    try:
        return re.compile(pattern, flags)
    except re.error as error:
        raise UserError(f"pattern {pattern!r} is not a regular expression: {error}") from error
