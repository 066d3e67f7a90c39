"""What a response is worth."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator

from pydantic import JsonValue

from qarl.config.base import Fault, Field, Section

BUILTIN_REWARDS = ("math", "exact", "regex", "length", "format", "reasoning_gym")
_USER_FUNCTION = re.compile(r"(?:.+\.py|[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):[A-Za-z_]\w*")


class RewardFunction(Section):
    """One reward function and its weight in the sum."""

    name: str = Field(
        min_length=1,
        description=f"Built-in ({', '.join(BUILTIN_REWARDS)}), path/to/file.py:function, or package.module:function.",
    )
    weight: float = Field(1.0, description="Factor in the total reward; 0 only logs it.")
    options: dict[str, JsonValue] = Field({}, description="Keyword arguments of the function.")

    @property
    def file(self) -> str | None:
        """Path of the Python file, for `file.py:function`; else None."""
        path = self.name.rpartition(":")[0]
        return path if path.endswith(".py") else None

    def faults(self) -> Iterator[Fault]:
        if self.name in BUILTIN_REWARDS or _USER_FUNCTION.fullmatch(self.name):
            return
        near = difflib.get_close_matches(self.name, BUILTIN_REWARDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"use {', '.join(BUILTIN_REWARDS)}"
        yield Fault(("name",), self.name, f"no such reward; {hint}, or file.py:function, or package.module:function")


class RewardConfig(Section):
    """The reward: a weighted sum of functions that run in worker processes with a time limit."""

    functions: list[RewardFunction] = Field(
        min_length=1, description="Reward functions; the total is their weighted sum."
    )
    workers: int = Field(1, ge=1, description="Worker processes.")
    timeout_s: float = Field(
        10.0, gt=0, description="Seconds one worker may take for its chunk of completions; after that they score 0."
    )
    max_failed_frac: float = Field(
        0.5, ge=0, le=1, description="The run stops when a larger fraction of a step's scores failed."
    )
