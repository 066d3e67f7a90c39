"""Extract the final answer of a response: after its think block, from a box, a formula or a sentence."""

# ruff: noqa: RUF001 (non-ASCII characters that look like ASCII are intended)

from __future__ import annotations

import re
from collections.abc import Sequence

from qarl.errors import UserError
from qarl.rewards.units import CURRENCY, find

THINK_TAGS = ("<think>", "</think>")

# End-of-turn markers of chat templates. A think tag before one of them is only mentioned in a message.
_TURN = re.compile(r"<[|｜][^|｜<>]*[|｜]>|\[/?INST\]|<(?:start|end)_of_turn>")


def check_tags(tags: Sequence[str] | None) -> None:
    """Check the option `think_tags`.

    Raises:
        UserError: It is neither None nor two different texts.
    """
    if tags is None:
        return
    texts = list(tags) if isinstance(tags, (list, tuple)) else []
    if len(texts) != 2 or not all(isinstance(tag, str) and tag for tag in texts) or texts[0] == texts[1]:
        raise UserError(f'think_tags must be two texts such as ["<think>", "</think>"], or null, got {tags!r}')


def after_thinking(completion: str, prompt: str, tags: Sequence[str] | None) -> str | None:
    """Return the part of a response after its think block.

    Args:
        completion: The response.
        prompt: The prompt; the chat template may open the block at its end.
        tags: Opening and closing tag of a think block; None: the whole response counts.

    Returns:
        The text after the last closing tag, or the whole response if no block was opened; None if the block is not
        closed, so that there is no answer.
    """
    if tags is None:
        return completion
    opening, closing = tags
    _, closed, rest = completion.rpartition(closing)
    if opening in rest or (not closed and leaves_open(prompt, opening, closing)):
        return None
    return rest


def leaves_open(prompt: str, opening: str, closing: str) -> bool:
    """Return whether the last turn of the prompt opens a think block without closing it."""
    _, opened, rest = prompt.rpartition(opening)
    return bool(opened) and closing not in rest and _TURN.search(rest) is None


_BLOCK = re.compile(r"<answer>((?:(?!</?answer>).)*)</answer>", re.DOTALL | re.IGNORECASE)


def answer_block(text: str) -> str | None:
    """Return the content of the last `<answer>` block that is not blank; None if there is none."""
    blocks = [content for content in _BLOCK.findall(text) if content.strip()]
    return blocks[-1] if blocks else None


_BOX = re.compile(r"\\(?:boxed|fbox|framebox)(?![A-Za-z])\s*")
_CUT_BOX = re.compile(r"\\(?:b(?:o(?:xe?)?)?|fb?o?)$")  # the response was cut within the command
_BETWEEN_BOXES = re.compile(r"(?:\\[()\[\],;! ]|[\s$.])*(?:,|;|\band\b|\bor\b)[\s$]*(?:\\[()\[\],;! ]|[\s$])*", re.I)


def final_box(text: str, complete: bool) -> str | None:
    r"""Return the content of the last box of a text.

    Args:
        text: Text that may contain `\boxed{...}`, `\fbox{...}` or `\boxed 5`.
        complete: Return None if the last box is not closed. If False, that box is ignored.

    Returns:
        The content. Boxes separated only by a comma, `and` or `or` are one answer, joined by commas. None if there is
        no box; empty if there is no answer.
    """
    if complete and _CUT_BOX.search(text):
        return ""
    answer: list[str] = []
    begin = len(text)
    for match in reversed(list(_BOX.finditer(text))):
        if match.end() > begin:  # nested in the following box
            continue
        end = _closing_brace(text, match.end())
        if end is None:
            if complete and not answer:
                return ""
            continue
        if answer and _BETWEEN_BOXES.fullmatch(text, end, begin) is None:
            break
        content = text[match.end() : end].strip()
        content = content[1:-1].strip() if content.startswith("{") else content
        if "\\boxed" in content or "\\fbox" in content:
            content = final_box(content, complete) or ""
        if not answer or answer[0] != content:
            answer.insert(0, content)
        begin = match.start()
    return ", ".join(answer) if answer else None


def _closing_brace(text: str, start: int) -> int | None:
    """Return the end of the group at `start`: after its closing brace, or after the word if there is no brace."""
    if not text.startswith("{", start):
        word = re.compile(r"[^\s$\\{}]+").match(text, start)
        return word.end() if word else None
    depth = 0
    for brace in re.compile(r"\\[\\{}]|[{}]").finditer(text, start):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return brace.end()
    return None


_FORMULA = re.compile(
    r"(?<!\\)\$\$(?P<a>(?:\\.|[^$\\])+)\$\$|(?<![\\\d])\$(?P<b>(?:\\.|[^$\\\n])+)\$|\\\((?P<c>(?:(?!\\\().)+?)\\\)|\\\[(?P<d>(?:(?!\\\[).)+?)\\\]",
    re.DOTALL,
)
_SEPARATOR = re.compile(r"\s*(?:,|;|\band\b|\bor\b|,\s*and\b|,\s*or\b)\s*", re.I)
_ANCHOR = re.compile(
    r"\b(?:answer|result|choice|option)s?\b(?:\s+(?:is|are|equals)\b|\s*[:=])[\s:*]*|答案(?:是|为|：|:)\s*", re.I
)
_SENTENCE_END = re.compile(r"[.!?](?=\s|\**\s*$)|\n|。")

_IS_AT_END = re.compile(r"\b(?:is|are|equals)\s+([^A-Za-z\s][^\n]{0,60}?)\.?\s*$")
_PROSE = re.compile(r"(?!and\b)[A-Za-z]{3,}|\b(?i:is|it|so|he|we)\b|[\u3040-\u30ff\u4e00-\u9fff][^\n]*\d")
_COMMANDS = re.compile(r"\\text\{[^{}]*\}|\\[A-Za-z]+")

_DIGITS = r"(?:[1-9]\d{0,2}(?:,\d{3})+(?!\d)|[1-9]\d{0,2}(?:[ \u202f]\d{3})+(?![\d/])|\d+)(?:\.\d+)?|\.\d+"
_LITERAL = rf"(?:{_DIGITS})(?:[eE][+-]?\d+)?(?:\s*(?:\\times|[x*×·])\s*10\s*\^\s*\{{?-?\d+\}}?)?"
_ATOM = rf"(?:\d+\s+\d+/\d+(?![\d.])|{_LITERAL}|\\frac\{{-?\d+\}}\{{-?\d+\}})"
_GROUP = rf"(?:{_ATOM}|\(-?\s*{_ATOM}(?:\s*[-+*/×÷^]\s*{_ATOM})*\))"
_NUMBER = re.compile(
    rf"(?:(?<=^)|(?<=[\s=(*:~≈\[，。：{re.escape(CURRENCY)}])|(?<=[^\x00-\x7f]))"
    rf"[-+]?[{re.escape(CURRENCY)}]?-?{_GROUP}(?:\s*[-+*/×÷^]\s*{_GROUP})*"
    rf"(?:_\{{?\d+\}}?)?"
)
_SUFFIX = re.compile(
    r"\s?(?:\\?%|°[CF]?|\\(?:text|mathrm)\{[^{}]*\}|\s?(?P<word>[^\W\d_]+)(?:\s?/\s?[^\W\d_]+)?(?:\^\d)?)"
)


def final_fragment(text: str, complete: bool) -> str | None:
    """Return the final answer within a response, without delimiters.

    In order: the last box; what follows the last "answer is"; the last formula or number, whichever comes later.

    Args:
        text: The response after `spelling.ascii_math`.
        complete: See `final_box`.

    Returns:
        The text, or None if there is none.
    """
    boxed = final_box(text, complete)
    if boxed is not None:
        return boxed or None
    if anchors := list(_ANCHOR.finditer(text)):
        sentence = text[anchors[-1].end() :].lstrip()
        if _FORMULA.match(sentence):
            return joined_formulas(sentence, formulas(sentence), 0, 1)
        end = _SENTENCE_END.search(sentence)
        found = _of_sentence(sentence[: end.start()] if end else sentence)
        if found:
            return found
    return _last(text)


def has_prose(text: str) -> bool:
    """Return whether a text is more than an expression: it has words, or Chinese or Japanese before a digit."""
    return _PROSE.search(_COMMANDS.sub("", text)) is not None


def formulas(text: str) -> list[tuple[int, int, str]]:
    r"""Return start, end and content of each formula in `$...$`, `$$...$$`, `\(...\)` and `\[...\]`."""
    return [(m.start(), m.end(), m["a"] or m["b"] or m["c"] or m["d"]) for m in _FORMULA.finditer(text)]


def joined_formulas(text: str, found: list[tuple[int, int, str]], index: int, step: int) -> str:
    """Return formula `index` and its neighbours in direction `step` that a comma, `and` or `or` connects."""
    parts = [found[index][2]]
    while 0 <= index + step < len(found):
        left, right = sorted((found[index], found[index + step]))
        if _SEPARATOR.fullmatch(text, left[1], right[0]) is None:
            break
        index += step
        parts.insert(len(parts) if step > 0 else 0, found[index][2])
    return ", ".join(parts)


def _of_sentence(text: str) -> str:
    """Return the answer in the text after "the answer is": a formula, a number, or all of a short text."""
    if found := formulas(text):
        number = _NUMBER.search(text, 0, found[0][0])
        return joined_formulas(text, found, 0, 1) if number is None else with_unit(text, number)
    if len(text) <= 60 and not has_prose(text):
        return text
    number = _NUMBER.search(text)
    return with_unit(text, number) if number else text


def _last(text: str) -> str | None:
    """Return the formula or number that ends last."""
    found = formulas(text)
    numbers = list(_NUMBER.finditer(text, found[-1][1] if found else 0))
    if numbers:
        end = _IS_AT_END.search(text, found[-1][1] if found else 0)
        return end[1] if end and not has_prose(end[1]) else with_unit(text, numbers[-1])
    return joined_formulas(text, found, len(found) - 1, -1) if found else None


def with_unit(text: str, number: re.Match[str]) -> str:
    """Return a number in prose with its unit. "in" is a unit only at the end, unlike in "72 in total"."""
    suffix = _SUFFIX.match(text, number.end())
    if suffix is None:
        return number[0]
    word = suffix["word"]
    if word and (find(word) is None or (word == "in" and re.match(r"\s+\w", text[suffix.end() :]))):
        return number[0]
    return number[0] + suffix[0]
