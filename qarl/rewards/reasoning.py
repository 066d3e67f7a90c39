"""The built-in reward `reasoning_gym`: each task's own scorer. The only reward module that imports the package."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from qarl.errors import UserError
from qarl.rewards.builtin import column_values, compile_pattern, tags_for
from qarl.rewards.responses import THINK_TAGS, after_thinking, check_tags

try:
    from reasoning_gym import create_dataset
except ImportError as error:
    raise UserError("needs the package reasoning-gym; pip install 'qarl[tasks]'") from error


def reasoning_gym(
    completions: list[str],
    prompts: list[str],
    *,
    pattern: str | None = None,
    column: str = "entry",
    think_tags: Sequence[str] | None = THINK_TAGS,
    **columns: list,
) -> list[float]:
    """Return the task's score of the answer, usually in [0, 1].

    Args:
        completions: Responses.
        prompts: Their prompts.
        pattern: Regular expression whose last match has the answer in its first group, such as
            `<answer>(.*?)</answer>`; `.` matches newlines. No match scores 0. None: the answer is the whole response.
        column: Data column of the entries of `reasoning-gym:NAME` data.
        think_tags: Score only the text after a think block with these tags, see `after_thinking`. None, or a pattern
            that contains one of the tags: the whole response.
        columns: Data columns.

    Returns:
        One score per response.
    """
    check_tags(think_tags)
    compiled = None if pattern is None else compile_pattern(pattern, re.DOTALL)
    if compiled is not None and compiled.groups < 1:
        raise UserError(f"pattern {pattern!r} needs a group around the answer")
    tags = tags_for(pattern, think_tags)
    entries = column_values(columns, column)
    for entry in entries:
        _check_entry(entry, column)
    scores = []
    for completion, prompt, entry in zip(completions, prompts, entries, strict=True):
        answer = _last_match(compiled, after_thinking(completion, prompt, tags))
        if answer is None:
            scores.append(0.0)
            continue
        metadata = entry["metadata"]
        score = _scorer(metadata["source_dataset"], json.dumps(metadata.get("source_options", {}), sort_keys=True))
        scores.append(float(score(answer.strip(), entry)))
    return scores


def _check_entry(entry: Any, column: str) -> None:
    """Check that a value is a reasoning-gym entry that names its task.

    Raises:
        UserError: It is not.
    """
    metadata = entry.get("metadata") if isinstance(entry, dict) else None
    if not isinstance(metadata, dict) or not isinstance(metadata.get("source_dataset"), str):
        raise UserError(
            f"column {column!r}: a value has no `metadata.source_dataset`, which names the task that scores it; use "
            "entries of reasoning-gym data, or another reward"
        )


def _last_match(pattern: re.Pattern[str] | None, text: str | None) -> str | None:
    """Return the first group of the last match, or the whole text without a pattern; None if there is no answer."""
    if pattern is None or text is None:
        return text
    matches = list(pattern.finditer(text))
    return (matches[-1][1] or "") if matches else None


@lru_cache
def _scorer(name: str, options: str) -> Callable[[str, dict[str, Any]], float]:
    """Return `score_answer` of the task with its options, which some scorers depend on."""
    return create_dataset(name, seed=0, **json.loads(options)).score_answer
