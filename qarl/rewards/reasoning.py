"""The built-in reward `reasoning_gym`: each task's own scorer. The one reward module that imports the package."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from qarl.errors import UserError
from qarl.rewards.builtin import column_values

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
    **columns: list,
) -> list[float]:
    """The task's score of the answer, usually in [0, 1]; `column` holds the entries of `reasoning-gym:NAME` data.

    The answer is the stripped completion, or with `pattern` the first group of its last match (`.` matches newlines,
    e.g. `<answer>(.*?)</answer>`), and 0 where it does not match.
    """
    try:
        compiled = None if pattern is None else re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise UserError(f"pattern {pattern!r} is not a regular expression: {error}") from error
    if compiled is not None and compiled.groups < 1:
        raise UserError(f"pattern {pattern!r} needs a group around the answer")
    scores = []
    for completion, entry in zip(completions, column_values(columns, column), strict=True):
        answer = completion
        if compiled is not None:
            matches = list(compiled.finditer(completion))
            if not matches:
                scores.append(0.0)
                continue
            answer = matches[-1][1] or ""
        metadata = entry["metadata"]
        score = _scorer(metadata["source_dataset"], json.dumps(metadata.get("source_options", {}), sort_keys=True))
        scores.append(float(score(answer.strip(), entry)))
    return scores


@lru_cache
def _scorer(name: str, options: str) -> Callable[[str, dict[str, Any]], float]:
    """`score_answer` of the task as it was configured: some tasks score by their options."""
    return create_dataset(name, seed=0, **json.loads(options)).score_answer
